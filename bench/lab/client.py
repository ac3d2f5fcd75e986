"""The client of a lab store: start it, control it, read its counters, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

_REPOSITORY = Path(__file__).resolve().parents[2]


class LabError(Exception):
    """The store refused an admin call."""


class LabStore:
    """A lab store in a child process that ends with the context. The kernel also ends it when the *thread* that entered the
    context ends, so enter it in a thread that stays."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        latency_ms: float = 0,
        bandwidth: float = 0,
        serve: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        """`host` is the address to listen on; `bandwidth` is bytes per second, 0 for unlimited; `serve` maps buckets to
        directory trees."""
        self.host = host
        self._command = [sys.executable, "-m", "bench.lab.store", "--root", os.fspath(root), "--host", host]
        self._command += ["--latency-ms", str(latency_ms), "--bandwidth", str(bandwidth)]
        for bucket, tree in (serve or {}).items():
            self._command += ["--serve", f"{bucket}={Path(tree).resolve()}"]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._command, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise LabError("the store did not start: its stderr says why")
        self.port = json.loads(line)["port"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()  # nothing it holds outlives it on purpose
            self._process.communicate()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url(self, bucket: str, prefix: str = "") -> str:
        return f"s3://{bucket}/{prefix}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which AWS clients use this store, and no other."""
        return {
            "AWS_ACCESS_KEY_ID": "lab",
            "AWS_SECRET_ACCESS_KEY": "lab",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, f"/_lab/{path}", body)
            reply = connection.getresponse()
            result = json.loads(reply.read())
        finally:
            connection.close()
        if reply.status != 200:
            raise LabError(result["error"])
        return result

    def _post(self, path: str, **arguments: Any) -> Any:
        return self._call("POST", path, json.dumps(arguments).encode())

    # What is in the store. None of this is counted.

    def bucket(self, bucket: str) -> None:
        """Make an empty bucket, unless there is one."""
        self._post("bucket", bucket=bucket)

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Store an object, and its bucket if need be; returns the etag, quotes included."""
        return str(self._call("PUT", "object?" + urlencode({"bucket": bucket, "key": key}), data)["etag"])

    def replace(self, bucket: str, key: str) -> str:
        """Give an object another version: same size, every byte inverted; returns the new etag."""
        return str(self._post("change", bucket=bucket, key=key)["etag"])

    def delete(self, bucket: str, key: str) -> None:
        self._call("DELETE", "object?" + urlencode({"bucket": bucket, "key": key}))

    def serve(self, bucket: str, tree: str | os.PathLike[str]) -> int:
        """Let a bucket have the files of a directory tree as they are now, and no others. Returns the number of objects."""
        return int(self._post("serve", bucket=bucket, tree=str(Path(tree).resolve()))["objects"])

    def synthesize(self, bucket: str, prefix: str, count: int, size: int) -> None:
        """Objects `<prefix>name-0000000.bin` and on; the bytes of each are `dataset.content(its key, size)`."""
        self._post("synthesize", bucket=bucket, prefix=prefix, count=count, size=size)

    # What it saw.

    def counters(self) -> dict[str, Any]:
        """`requests`, `bytes_sent`, `bytes_received` by kind, `statuses`, `in_flight`, `max_in_flight`."""
        counters: dict[str, Any] = self._call("GET", "counters")
        return counters

    def requests(self) -> list[dict[str, Any]]:
        """Since the last reset, oldest first: `at` (seconds), `kind`, `bucket`, `key`, `range`, `status`."""
        requests: list[dict[str, Any]] = self._call("GET", "requests")
        return requests

    def reset(self) -> None:
        """Reset counters and log. Contents, shape and faults stay."""
        self._post("reset")

    # How it behaves.

    def shape(self, *, latency_ms: float | None = None, bandwidth: float | None = None) -> None:
        """Change the given parts of the shape; `bandwidth` is in bytes per second, 0 for unlimited."""
        self._post("shape", latency_ms=latency_ms, bandwidth=bandwidth)

    def fault(
        self,
        action: str,
        *,
        kind: str = "get",
        key: str = "*",
        first: int = 1,
        count: int | None = None,
        seconds: float | None = None,
        after: int | None = None,
        rate: float = 0,
    ) -> int:
        """Spoil the `first`-th to (`first` + `count` - 1)-th request that matches the `kind` and `key` globs.

        `action` is one of `faults.Action`; `seconds` is for hang, hang-body (default: practically for ever) and the
        Retry-After of 503 and 429; `after` is bytes of the body for truncate, hang-body, etag, reset (None: before
        the headers); `rate` is bytes per second for slow. Returns a number `faults_fired` knows the rule by.
        """
        rule = self._post(
            "faults",
            action=action,
            kind=kind,
            key=key,
            first=first,
            count=count,
            seconds=seconds,
            after=after,
            rate=rate,
        )
        return int(rule["id"])

    def faults_fired(self) -> dict[int, int]:
        """How often each rule has acted."""
        return {int(number): fired for number, fired in self._call("GET", "faults").items()}

    def clear_faults(self) -> None:
        """Drop all rules, and release requests that hang by one."""
        self._call("DELETE", "faults")

    def credentials(
        self,
        *,
        allowed: Iterable[str] | None = None,
        expired: Iterable[str] = (),
        denied: Iterable[str] = (),
    ) -> None:
        """Replace who may do what: `allowed` access key ids (None: anyone, even anonymous), `expired` ones, and key
        prefixes `denied` to all."""
        self._post(
            "credentials",
            allowed=None if allowed is None else list(allowed),
            expired=list(expired),
            denied=list(denied),
        )

    def quirks(self, *names: str) -> None:
        """Replace how it differs from AWS: names of `exchange.Quirk`, or "ceph" for all that Ceph's RADOS Gateway does.
        Without names it does not."""
        self._post("quirks", names=names)
