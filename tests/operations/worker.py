"""A job that tries nothing again: it reads and writes until its stdin ends, and says what failed.

    python3 worker.py DIRECTORY        with {"name": "sha256", …} as the first line of stdin

Files that were there before are opened and read, and one of them stays open. A log stays open and grows, and a checkpoint is
replaced by its successor. Standard library only: it runs where nothing of this project is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time


def main() -> None:
    directory, digests = sys.argv[1], json.loads(sys.stdin.readline())
    ended = threading.Event()
    rounds = {"read": 0, "written": 0}
    longest = {"read": 0.0, "written": 0.0}
    errors: list[str] = []

    def repeat(name: str, work) -> None:  # type: ignore[no-untyped-def]  # Python 3.9 runs it, too
        last = time.monotonic()
        while not ended.is_set():
            try:
                work(rounds[name])
            except Exception as exc:
                errors.append(f"{name}: {exc!r}")
                time.sleep(0.05)
            now = time.monotonic()
            longest[name], last = max(longest[name], now - last), now
            rounds[name] += 1

    def sha256(fd: int) -> str:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # it is asked for anew
        return hashlib.sha256(os.pread(fd, 1 << 24, 0)).hexdigest()

    kept_name = min(digests)
    kept = os.open(os.path.join(directory, kept_name), os.O_RDONLY)

    def read(number: int) -> None:
        assert sha256(kept) == digests[kept_name], "other bytes in the file that stays open"
        for name, digest in digests.items():
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                assert sha256(fd) == digest, f"other bytes in {name}"
            finally:
                os.close(fd)
        assert set(os.listdir(directory)) >= set(digests)

    log = os.open(os.path.join(directory, "log"), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    temporary, final = os.path.join(directory, "checkpoint.tmp"), os.path.join(directory, "checkpoint")

    def write(number: int) -> None:
        line = b"%011d\n" % number
        assert os.write(log, line) == len(line)
        assert os.fstat(log).st_size == len(line) * (number + 1), "the log has lost lines"
        if number % 20 == 0:
            data = hashlib.sha256(line).digest() * 20_000
            with open(temporary, "wb", buffering=0) as file:
                assert file.write(data) == len(data)
                os.fsync(file.fileno())
            os.rename(temporary, final)
            with open(final, "rb") as file:
                assert file.read() == data, "another checkpoint than was written"
        time.sleep(0.002)

    threads = [threading.Thread(target=repeat, args=pair) for pair in (("read", read), ("written", write))]
    for thread in threads:
        thread.start()
    print("reading", flush=True)
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    expected = b"".join(b"%011d\n" % number for number in range(rounds["written"]))
    if os.pread(log, len(expected) + 1, 0) != expected:
        errors.append("the log is not what was written")
    os.close(log)
    print(json.dumps({"rounds": rounds, "longest_s": longest, "errors": errors}))


main()
