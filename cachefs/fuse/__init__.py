"""The FUSE backends, through which the kernel calls the filesystem.

`operations.py` implements each request over `FileSystem`; a backend only unpacks requests and packs answers. Two backends
share it, and `backends.py` chooses one: `native_backend.py` speaks the protocol itself (`protocol.py` has its tables) and
so can register backing files; `pyfuse3_backend.py` runs everywhere. One total table (`errno_table.py`) maps every exception
to an errno, and every wait that may end early has a deadline."""
