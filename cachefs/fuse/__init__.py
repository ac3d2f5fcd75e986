"""The FUSE backends, through which the kernel calls the filesystem.

`operations.py` has what each request does over `FileSystem`; a backend only unpacks requests and packs answers. Two backends
share it, and `backends.py` chooses one: `native_backend.py` speaks the protocol itself (`protocol.py`: its tables) and
so can register backing files; `pyfuse3_backend.py` runs everywhere. Every exception becomes
an errno by one total table (`errno_table.py`), and every wait that may end early has a deadline."""
