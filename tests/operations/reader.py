"""A job that reads files until its stdin ends, and tries again: then it says how long it had nothing to read at most.

    python3 reader.py DIRECTORY        with {"name": "sha256", …} as the first line of stdin

Standard library only: it runs where nothing of this project is installed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import time


def main() -> None:
    directory, digests = sys.argv[1], json.loads(sys.stdin.readline())
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    reads, longest, wrong, errors = 0, 0.0, 0, dict[str, int]()
    last = time.monotonic()
    print("reading", flush=True)
    while not ended.is_set():
        for name, digest in digests.items():
            try:
                with open(os.path.join(directory, name), "rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    found = hashlib.sha256(file.read()).hexdigest()
            except OSError as exc:
                code = errno.errorcode.get(exc.errno or 0, str(exc.errno))
                errors[code] = errors.get(code, 0) + 1
                time.sleep(0.02)
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            reads += 1
            wrong += found != digest
    longest = max(longest, time.monotonic() - last)
    print(json.dumps({"reads": reads, "longest_s": longest, "wrong": wrong, "errors": errors}))


main()
