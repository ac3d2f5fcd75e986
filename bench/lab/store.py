"""The lab store: a small S3 server that makes costs countable.

    python -m bench.lab.store --root DIR --port 0 --serve data=/some/tree --latency-ms 20 --bandwidth 200M

It listens on 127.0.0.1 (or on `--host`), prints one JSON line with its port when it is ready, and then serves path-style S3
to any client. It counts and logs every request, delays and limits replies as it was told, and makes those fail that a fault
rule names. It has a thread per connection, makes blocking calls and sends bodies by sendfile: that is faster than the
programs that are measured with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

from bench.lab import admin, routes
from bench.lab.exchange import Lab
from bench.lab.objects import Warehouse
from bench.lab.wire import BadRequest, Connection

_PR_SET_PDEATHSIG = 1
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def bandwidth(text: str) -> float:
    """Bytes per second: "200M" is 200,000,000; 0 is unlimited."""
    unit = _UNITS.get(text[-1:].upper())
    return float(text[:-1]) * unit if unit else float(text)


def serve_connection(lab: Lab, sock: socket.socket) -> None:
    with sock:
        conn = Connection(sock)
        try:
            while conn.keep_alive:
                request = conn.receive()
                if request is None:
                    return
                (admin.answer if request.bucket == admin.NAME else routes.answer)(lab, conn, request)
        except BadRequest:
            conn.keep_alive = False
            conn.send(conn.head(400, {"Content-Length": "0"}))
        except OSError:
            pass  # the client has closed the connection


def serve(lab: Lab, listener: socket.socket) -> None:
    """Accept connections until the process ends."""
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve_connection, args=(lab, sock), daemon=True).start()


def die_with(parent: int) -> None:
    """Have the kernel end this process when the thread of `parent` that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended before the store had begun")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lab.store", description="The lab's S3 store.")
    parser.add_argument("--root", type=Path, required=True, help="where objects that are put are kept")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--latency-ms", type=float, default=0, help="added before each reply")
    parser.add_argument("--bandwidth", type=bandwidth, default=0, help="bytes/s for all bodies, as in 200M")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="BUCKET=DIR", help="show a directory tree as a bucket"
    )
    parser.add_argument("--parent", type=int, help="process id of the parent to die with")
    options = parser.parse_args()
    # A reader of an object that was uploaded in parts holds a descriptor of each part.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.parent:
        die_with(options.parent)
    lab = Lab(Warehouse(options.root))
    lab.shape(options.latency_ms / 1000, options.bandwidth)
    for pair in options.serve:
        bucket, _, tree = pair.partition("=")
        if not (bucket and tree and os.path.isdir(tree)):
            parser.error(f"--serve {pair}: write BUCKET=DIR, with a directory that is there")
        lab.warehouse.serve(bucket, Path(tree))
    try:
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except (OSError, OverflowError) as exc:
        parser.error(f"cannot listen at {options.host}:{options.port}: {exc}: choose another --port")
    with listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serve(lab, listener)


if __name__ == "__main__":
    main()
