"""The raw client: what the store and this machine give to a program that only downloads.

No mount, no cache, no file: a fast client library (obstore, in Rust), several connections, parts sized by
trying out what is fastest here, and the bytes are dropped as they come. Reading through a path costs more than this; the
figures say how much.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import obstore
import urllib3
from obstore.store import S3Store

from bench.lab.client import LabStore
from bench.readers import Reading, share

IN_FLIGHT = 8
PART = 16 << 20
"""Part size and parts in flight. Measured: 1 to 64 MiB, 2 to 16 in flight, streamed or in one buffer each; this is the
fastest without a shape, and fills the pipe with one."""

CHUNK = 256 << 10


class RawClient:
    """Reads one bucket."""

    def __init__(self, lab: LabStore, bucket: str) -> None:
        self._store = S3Store(
            bucket,
            endpoint=lab.endpoint,
            region="us-east-1",
            access_key_id="lab",
            secret_access_key="lab",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def sequential(self, key: str, size: int, *, keep: bool = False) -> Reading:
        """One object, in parallel ranges. With `keep`, its bytes are stored in memory instead of dropped."""
        begun = time.perf_counter()
        kept = memoryview(mmap.mmap(-1, size)) if keep else None

        def part(start: int) -> int:
            reply = obstore.get(self._store, key, options={"range": (start, min(size, start + PART))})
            at = start
            for chunk in reply.stream(min_chunk_size=CHUNK):
                if kept is not None:
                    kept[at : at + len(chunk)] = chunk
                at += len(chunk)
            return at - start

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            total = sum(pool.map(part, range(0, size, PART)))
        return Reading(total, 1, time.perf_counter() - begun)

    def first_byte(self, key: str, length: int) -> float:
        """Seconds of one GET of the first `length` bytes."""
        begun = time.perf_counter()
        obstore.get_range(self._store, key, start=0, end=length)
        return time.perf_counter() - begun

    def small(self, keys: list[str], in_flight: int = IN_FLIGHT) -> Reading:
        """Whole objects, so many at the same time."""
        return share(keys, in_flight, lambda key: len(obstore.get(self._store, key).bytes()))

    def ranges(self, keys: list[str], size: int, part: int, in_flight: int) -> Reading:
        """Objects of one size, one after another, so many parts at the same time."""
        parts = [(key, start) for key in keys for start in range(0, size, part)]

        def read(wanted: tuple[str, int]) -> int:
            key, start = wanted
            reply = obstore.get(self._store, key, options={"range": (start, min(size, start + part))})
            return sum(len(chunk) for chunk in reply.stream(min_chunk_size=CHUNK))

        return share(parts, in_flight, read)


UPLOADED_PART = 8 << 20
PARTS_IN_FLIGHT = 16
"""Part size and parts in flight of uploads: the same as those of cachefs."""


class RawWriter:
    """Writes into one bucket, from memory: the speed of the store for a program that knows all bytes beforehand. It uses
    the HTTP client of cachefs, unsigned, because the lab store checks no signatures."""

    def __init__(self, lab: LabStore, bucket: str) -> None:
        self._url = f"{lab.endpoint}/{bucket}"
        self._pool = urllib3.PoolManager(maxsize=PARTS_IN_FLIGHT)

    def large(self, key: str, size: int, part: Callable[[int, int], bytes]) -> Reading:
        """One object in parts, several at the same time; `part` returns the bytes [start, stop)."""
        begun = time.perf_counter()
        url = f"{self._url}/{key}"
        reply = self._send("POST", f"{url}?uploads=")
        (name,) = re.findall("<UploadId>(.*?)</UploadId>", reply.data.decode())

        def send(number: int) -> str:
            start = (number - 1) * UPLOADED_PART
            body = part(start, min(size, start + UPLOADED_PART))
            etag = self._send("PUT", f"{url}?partNumber={number}&uploadId={name}", body).headers["etag"]
            return f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            rows = "".join(pool.map(send, range(1, -(-size // UPLOADED_PART) + 1)))
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        self._send("POST", f"{url}?uploadId={name}", body)
        return Reading(size, 1, time.perf_counter() - begun)

    def small(self, keys: list[str], data: Callable[[str], bytes], in_flight: int = IN_FLIGHT) -> Reading:
        """Whole objects, so many at the same time."""

        def put(key: str) -> int:
            body = data(key)
            self._send("PUT", f"{self._url}/{key}", body)
            return len(body)

        return share(keys, in_flight, put)

    def reading(self, key: str) -> Callable[[int], bytes]:
        """The store's object under the key: a function that returns its next bytes, fewer only at the end."""
        return self._send("GET", f"{self._url}/{key}", preload_content=False).read

    def missing(self, key: str) -> bool:
        """Whether the store has no object under the key."""
        return self._pool.request("HEAD", f"{self._url}/{key}").status == 404

    def _send(self, method: str, url: str, body: bytes = b"", **how: bool) -> urllib3.BaseHTTPResponse:
        reply = self._pool.request(method, url, body=body, retries=False, **how)
        if reply.status != 200:
            raise OSError(f"{method} {url}: {reply.status}")
        return reply
