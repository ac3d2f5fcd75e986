"""What it costs a process to bring objects from a store into files: libcurl alone, obstore with threads, and our client.

    python -m bench.fetching [--files N] [--large MIB]

Each way writes small objects (100 KB) to files of their own and hashes them (xxh3), and one large object in ranges of 8 MiB
into one file. Printed are files or bytes a second and this process's processor time. The store runs on the same machine:
compare ways, not machines. Ways take turns; the better of two rounds counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pycurl
import trio
import xxhash

from bench.lab.client import LabStore
from cachefs.base.metrics import Metrics
from cachefs.origin import Origin, open_origin

SMALL, PART = 100_000, 8 << 20
IN_FLIGHT = 32


class File:
    """A sink: as a cache write, it writes and hashes each piece."""

    def __init__(self, fd: int, at: int = 0) -> None:
        self._fd, self._at, self._hash = fd, at, xxhash.xxh3_64()

    def write(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        self._at += os.pwrite(self._fd, data, self._at)


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


class Ways:
    """The three clients. Each fetches `files` small objects, or one large one, into `place`."""

    def __init__(self, lab: LabStore, place: Path, files: int, large: int) -> None:
        self.lab, self.place, self.files, self.large = lab, place, files, large

    def curl_small(self) -> None:
        self._curl((f"small/{i}", None, opened(self.place / str(i)), 0) for i in range(self.files))

    def curl_large(self) -> None:
        fd = opened(self.place / "large")
        self._curl(("large", f"{at}-{at + PART - 1}", os.dup(fd), at) for at in range(0, self.large, PART))
        os.close(fd)

    def _curl(self, jobs: Iterator[tuple[str, str | None, int, int]]) -> None:
        multi = pycurl.CurlMulti()

        def begin(handle: Any) -> int:
            job = next(jobs, None)
            if job is None:
                return 0
            key, wanted, handle.fd, at = job
            handle.reset()
            handle.setopt(pycurl.URL, f"{self.lab.endpoint}/bkt/{key}")
            handle.setopt(pycurl.BUFFERSIZE, 256 << 10)
            if wanted:
                handle.setopt(pycurl.RANGE, wanted)
            handle.setopt(pycurl.WRITEFUNCTION, File(handle.fd, at).write)
            multi.add_handle(handle)
            return 1

        live = sum(begin(pycurl.Curl()) for _ in range(IN_FLIGHT))
        while live:
            multi.perform()
            _, finished, failed = multi.info_read()
            assert not failed, failed
            for handle in finished:
                multi.remove_handle(handle)
                os.close(handle.fd)
                live += begin(handle) - 1
            if live and not finished:
                multi.select(1.0)

    def obstore_small(self) -> None:
        import obstore

        def one(i: int) -> None:
            fd = opened(self.place / str(i))
            File(fd).write(memoryview(obstore.get(self._obstore(), f"small/{i}").bytes()))
            os.close(fd)

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(one, range(self.files)))

    def obstore_large(self) -> None:
        import obstore

        fd = opened(self.place / "large")

        def one(at: int) -> None:
            sink = File(fd, at)
            reply = obstore.get(self._obstore(), "large", options={"range": (at, at + PART)})
            for chunk in reply.stream(min_chunk_size=128 << 10):
                sink.write(memoryview(chunk))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(0, self.large, PART)))
        os.close(fd)

    _store: Any = None

    def _obstore(self) -> Any:
        from obstore.store import S3Store

        if self._store is None:
            self._store = S3Store(
                "bkt",
                endpoint=self.lab.endpoint,
                region="us-east-1",
                access_key_id="lab",
                secret_access_key="lab",
                virtual_hosted_style_request=False,
                client_options={"allow_http": True},
            )
        return self._store

    def ours_small(self) -> None:
        async def one(origin: Origin, i: int) -> None:
            key = f"small/{i}"
            fd = opened(self.place / str(i))
            await origin.read(key, self.etags[key], 0, SMALL, File(fd), whole=True)
            os.close(fd)

        self._ours(lambda origin, i: one(origin, i), range(self.files), IN_FLIGHT)

    def ours_large(self) -> None:
        fd = opened(self.place / "large")

        async def one(origin: Origin, at: int) -> None:
            await origin.read("large", self.etags["large"], at, at + PART, File(fd, at))

        self._ours(one, range(0, self.large, PART), 8)
        os.close(fd)

    def _ours(self, one: Callable[[Origin, int], Any], items: range, in_flight: int) -> None:
        async def main() -> None:
            origin = open_origin("s3://bkt", endpoint_url=self.lab.endpoint, metrics=Metrics())
            pending = iter(items)

            async def worker() -> None:
                for item in pending:
                    await one(origin, item)

            async with trio.open_nursery() as nursery:
                for _ in range(in_flight):
                    nursery.start_soon(worker)
            await origin.aclose()

        trio.run(main)

    def look(self) -> None:
        """Learn the etags."""
        self.etags: dict[str, str] = {}

        async def main() -> None:
            origin = open_origin("s3://bkt", endpoint_url=self.lab.endpoint, metrics=Metrics())
            self.etags["large"] = (await origin.head("large")).etag
            token: str | None = None
            while True:
                page = await origin.list_page("small/", token=token)
                self.etags.update((found.key, found.etag) for found in page.objects)
                token = page.next_token
                if token is None:
                    return await origin.aclose()

        trio.run(main)


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fetching", description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--large", type=int, default=256, help="MiB")
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab", "AWS_REGION": "us-east-1"}
    home = Path(tempfile.mkdtemp(prefix="cachefs-fetching-", dir="/dev/shm"))
    try:
        (home / "tree/small").mkdir(parents=True)
        (home / "out").mkdir()
        for i in range(options.files):
            (home / "tree/small" / str(i)).write_bytes(os.urandom(SMALL))
        large = options.large << 20
        with (home / "tree/large").open("wb") as file:
            for _ in range(options.large):
                file.write(os.urandom(1 << 20))
        with LabStore(home / "store") as lab:
            lab.serve("bkt", home / "tree")
            ways = Ways(lab, home / "out", options.files, large)
            ways.look()
            best: dict[str, tuple[float, float]] = {}
            names = [f"{way}_{size}" for size in ("small", "large") for way in ("curl", "obstore", "ours")]
            for _ in range(2):
                for name in names:
                    before, begun = used(), time.perf_counter()
                    getattr(ways, name)()
                    measured = time.perf_counter() - begun, used() - before
                    best[name] = min(best.get(name, measured), measured)
            for name, (seconds, processor) in best.items():
                if name.endswith("small"):
                    rate = f"{options.files / seconds:7.0f} files/s  {processor / options.files * 1e3:.3f} ms a file"
                else:
                    rate = f"{large / seconds / 1e9:7.2f} GB/s     {processor / large * 1e9:.2f} s a GB"
                print(f"{name.replace('_', ', '):16} {rate}")
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
