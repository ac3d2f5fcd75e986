"""The lab's API, JSON below `/_lab/`. Its requests are neither counted, nor shaped, nor made to fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lab.exchange import CEPH, Credentials, Lab, Quirk
from bench.lab.faults import Rule
from bench.lab.wire import Connection, Request

NAME = "_lab"
"""A name that no bucket can have: S3 forbids underscores."""

Arguments = dict[str, Any]


def answer(lab: Lab, conn: Connection, request: Request) -> None:
    try:
        if request.key == "object":
            result = _object(lab, conn, request)
        else:
            arguments = json.loads(b"".join(conn.body()) or b"{}")
            result = _CALLS[f"{request.method} {request.key}"](lab, arguments)
        status = 200
    except (KeyError, TypeError, ValueError, OSError) as exc:
        status, result = 400, {"error": f"{type(exc).__name__}: {exc}"}
    conn.skip_body()
    data = json.dumps(result).encode()
    conn.send(
        conn.head(status, {"Content-Type": "application/json", "Content-Length": str(len(data))}) + data
    )


def _object(lab: Lab, conn: Connection, request: Request) -> Arguments:
    """PUT and DELETE of one object. The key is in the query, so any key is possible."""
    bucket, key = request.query["bucket"], request.query["key"]
    if request.method == "PUT":
        stored = lab.warehouse.store(conn.body())
        with lab.warehouse.lock:
            lab.warehouse.bucket(bucket).put(key, stored)
        return {"etag": stored.etag}
    with lab.warehouse.lock:
        lab.warehouse.bucket(bucket).delete(key)
    return {}


def _reset(lab: Lab, arguments: Arguments) -> Arguments:
    lab.ledger.reset()
    return {}


def _shape(lab: Lab, arguments: Arguments) -> Arguments:
    latency = arguments.get("latency_ms")
    lab.shape(None if latency is None else latency / 1000, arguments.get("bandwidth"))
    return {"latency_ms": lab.latency * 1000, "bandwidth": lab.down.rate}


def _clear(lab: Lab, arguments: Arguments) -> Arguments:
    lab.script.clear()
    return {}


def _credentials(lab: Lab, arguments: Arguments) -> Arguments:
    allowed = arguments.get("allowed")
    lab.credentials = Credentials(
        None if allowed is None else frozenset(allowed),
        frozenset(arguments.get("expired", ())),
        tuple(arguments.get("denied", ())),
    )
    return {}


def _quirks(lab: Lab, arguments: Arguments) -> Arguments:
    names = set(arguments["names"])
    ceph = CEPH if "ceph" in names else frozenset()
    lab.quirks = ceph | {Quirk(name) for name in names - {"ceph"}}
    return {}


def _bucket(lab: Lab, arguments: Arguments) -> Arguments:
    lab.warehouse.bucket(arguments["bucket"])
    return {}


def _change(lab: Lab, arguments: Arguments) -> Arguments:
    changed = lab.warehouse.change(arguments["bucket"], arguments["key"])
    if changed is None:
        raise KeyError(arguments["key"])
    return {"etag": changed.etag}


def _synthesize(lab: Lab, arguments: Arguments) -> Arguments:
    lab.warehouse.synthesize(
        arguments["bucket"], arguments["prefix"], int(arguments["count"]), int(arguments["size"])
    )
    return {}


_CALLS: dict[str, Callable[[Lab, Arguments], Any]] = {
    "GET counters": lambda lab, arguments: lab.ledger.counters(),
    "GET requests": lambda lab, arguments: lab.ledger.log(),
    "POST reset": _reset,
    "POST shape": _shape,
    "POST faults": lambda lab, arguments: {"id": lab.script.add(Rule(**arguments))},
    "GET faults": lambda lab, arguments: lab.script.fired(),
    "DELETE faults": _clear,
    "POST credentials": _credentials,
    "POST quirks": _quirks,
    "POST bucket": _bucket,
    "POST serve": lambda lab, arguments: {
        "objects": lab.warehouse.serve(arguments["bucket"], Path(arguments["tree"]))
    },
    "POST synthesize": _synthesize,
    "POST change": _change,
}
