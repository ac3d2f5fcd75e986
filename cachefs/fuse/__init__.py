"""The skin: how the kernel speaks to the filesystem.

Idea: a handler is a few lines that call `fs` and turn its answer into the kernel's structures; what the filesystem does
is decided below. Whatever a handler raises becomes an errno by one total table. Every wait has the operation's deadline.

`skin.py` is the only file that knows pyfuse3. `kernel.py` sets what only root can set from outside of FUSE.
"""

from cachefs.fuse.skin import Skin, mount

__all__ = ["Skin", "mount"]
