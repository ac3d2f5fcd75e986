"""fsspec's own FUSE mount, unchanged: `python -m bench.fsspec_mount BUCKET MOUNTPOINT ENDPOINT`."""

from __future__ import annotations

import sys

import fsspec
from fsspec.fuse import run


def main() -> None:
    bucket, mountpoint, endpoint = sys.argv[1:]
    fs = fsspec.filesystem("s3", key="lab", secret="lab", client_kwargs={"endpoint_url": endpoint})
    run(fs, bucket, mountpoint, foreground=True, threads=False)


if __name__ == "__main__":
    main()
