"""Builds cachefs-hints: the modules of cachefs that `cachefs.hints` needs, and no `cachefs/__init__.py`.

Without that file `cachefs` is a namespace here, so that a cachefs-fuse elsewhere on sys.path is not hidden by it.
"""

import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the other hooks are setuptools' own)

HERE = Path(__file__).parent
MODULES = ("hints.py", "base/client.py", "base/errors.py", "base/linux.py")


def _copied():
    """Copy the modules to src/. A sdist has them there already."""
    package = HERE.parents[1] / "cachefs"
    if package.is_dir():
        shutil.rmtree(HERE / "src", ignore_errors=True)
        for name in MODULES:
            place = HERE / "src/cachefs" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, place)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _copied()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    _copied()
    return build_meta.build_sdist(sdist_directory, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _copied()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
