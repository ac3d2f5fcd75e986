"""The fronts: how the kernel speaks to the filesystem.

Idea: a handler is a few lines that call `fs` and turn its answer into the kernel's structures; what the filesystem does
is decided below. Whatever a handler raises becomes an errno by one total table. Every wait has the operation's deadline.

Two fronts serve the same `FileSystem` (`fronts.py` chooses): `pyfuse3_front.py`, the only file that knows pyfuse3, runs
anywhere; `kernel_front.py` speaks the protocol itself (`protocol.py`: its tables, `device.py`: the connection) and so can
lend files to the kernel. `tuning.py` sets what only root can set from outside of FUSE.
"""
