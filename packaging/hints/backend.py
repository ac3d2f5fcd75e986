"""Builds cachefs-hints: the modules of cachefs that `cachefs.hints` needs, and no `cachefs/__init__.py`.

Without that file `cachefs` is a namespace here, so that a cachefs-fuse elsewhere on sys.path is not hidden by it.
"""

import shutil
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403 (the hooks are setuptools' own)

HERE = Path(__file__).parent
MODULES = ("hints.py", "base/client.py", "base/errors.py", "base/linux.py")


def _copy():
    """Copy the modules to src/. A sdist has them there already."""
    package = HERE.parents[1] / "cachefs"
    if package.is_dir():
        shutil.rmtree(HERE / "src", ignore_errors=True)
        for name in MODULES:
            place = HERE / "src/cachefs" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, place)


# Each hook needs them, and a front end runs each in a process of its own.
_copy()
