"""The tables of the protocol against the kernel's own header."""

from __future__ import annotations

import re
from pathlib import Path
from struct import Struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.fs.attributes import Attributes, Entry
from cachefs.fuse import protocol
from cachefs.fuse.protocol import Init, Op, OpenFlags, Setattr

UAPI = Path("/usr/include/linux/fuse.h")

OUT = 16  # what comes before a body in the structures that have both

SIZES: list[tuple[str, Struct, int]] = [
    # what the kernel calls it, ours, its size there
    ("fuse_in_header", protocol.IN_HEADER, 40),
    ("fuse_out_header", protocol.OUT_HEADER, OUT),
    ("fuse_init_in, before 7.36", protocol.INIT_IN, 16),
    ("fuse_init_in.flags2", protocol.INIT_IN_FLAGS2, 4),
    ("fuse_init_out", protocol.INIT_OUT, 64),
    ("fuse_open_in", protocol.OPEN_IN, 8),
    ("fuse_read_in", protocol.READ_IN, 40),
    ("fuse_release_in", protocol.RELEASE_IN, 24),
    ("fuse_getxattr_in", protocol.GETXATTR_IN, 8),
    ("fuse_setxattr_in, without FUSE_SETXATTR_EXT", protocol.SETXATTR_IN, 8),
    ("fuse_interrupt_in", protocol.INTERRUPT_IN, 8),
    ("fuse_create_in", protocol.CREATE_IN, 16),
    ("fuse_mknod_in", protocol.MKNOD_IN, 16),
    ("fuse_mkdir_in", protocol.MKDIR_IN, 8),
    ("fuse_rename_in", protocol.RENAME_IN, 8),
    ("fuse_rename2_in", protocol.RENAME2_IN, 16),
    ("fuse_write_in", protocol.WRITE_IN, 40),
    ("fuse_flush_in", protocol.FLUSH_IN, 24),
    ("fuse_fsync_in", protocol.FSYNC_IN, 16),
    ("fuse_fallocate_in", protocol.FALLOCATE_IN, 32),
    ("fuse_setattr_in", protocol.SETATTR_IN, 88),
    ("fuse_attr", Struct("=" + protocol.ATTR), 88),
    ("fuse_entry_out", Struct("=" + protocol.ENTRY), 128),
    ("fuse_entry_out, answered", protocol.ENTRY_REPLY, OUT + 128),
    ("fuse_attr_out, answered", protocol.ATTR_REPLY, OUT + 104),
    ("fuse_open_out, answered", protocol.OPEN_REPLY, OUT + 16),
    ("fuse_entry_out and fuse_open_out", protocol.CREATE_REPLY, OUT + 144),
    ("fuse_write_out, answered", protocol.WRITE_REPLY, OUT + 8),
    ("fuse_getxattr_out, answered", protocol.XATTR_SIZE_REPLY, OUT + 8),
    ("fuse_statfs_out, answered", protocol.STATFS_REPLY, OUT + 80),
    ("fuse_dirent", protocol.DIRENT, 24),
    ("fuse_direntplus", protocol.DIRENTPLUS, 152),
    ("fuse_notify_inval_inode_out", protocol.INVAL_INODE, 24),
    ("fuse_notify_inval_entry_out", protocol.INVAL_ENTRY, 16),
    ("fuse_backing_map", protocol.BACKING_MAP, 16),
]


@pytest.mark.parametrize(("ours", "size"), [row[1:] for row in SIZES], ids=[row[0] for row in SIZES])
def test_sizes(ours: Struct, size: int) -> None:
    assert ours.size == size


def test_nothing_is_padded_as_a_compiler_would() -> None:
    """A structure that the compiler would lay out otherwise is wrong, as the kernel's are the compiler's."""
    for name, value in vars(protocol).items():
        if isinstance(value, Struct):
            fields = value.format.removeprefix("=")
            # On what both call the end, compilers round up to the alignment; the kernel's structures need none.
            assert Struct("@" + fields).size == value.size, name


def _ioctl(way: int, number: int, size: int) -> int:
    return way << 30 | size << 16 | 229 << 8 | number


def test_numbers_of_ioctls() -> None:
    assert _ioctl(1, 1, 16) == protocol.BACKING_OPEN
    assert _ioctl(1, 2, 4) == protocol.BACKING_CLOSE


def test_newer_flags_than_most_headers_have() -> None:
    assert Init.PASSTHROUGH == 1 << 37
    assert OpenFlags.PASSTHROUGH == 1 << 7
    assert Op.TMPFILE == 51


@pytest.fixture(scope="module")
def header() -> str:
    if not UAPI.exists():
        pytest.skip(f"no {UAPI}")
    return re.sub(r"/\*.*?\*/", " ", UAPI.read_text(), flags=re.DOTALL)


def _numbers(header: str, prefix: str) -> dict[str, int]:
    """NAME → value, of `#define FUSE_NAME (1 << 3)` and `FUSE_NAME = 3,`."""
    found: dict[str, int] = {}
    shift = re.compile(rf"#define\s+{prefix}(\w+)\s+\(1(?:ULL)?\s*<<\s*(\d+)\)")
    for name, bits in shift.findall(header):
        found[name] = 1 << int(bits)
    for name, value in re.findall(rf"\b{prefix}(\w+)\s*=\s*(\d+)\s*,", header):
        found[name] = int(value)
    return found


def test_operations_are_the_kernels(header: str) -> None:
    theirs = _numbers(header, "FUSE_")
    compared = {op.name: (op, theirs[op.name]) for op in Op if op.name in theirs}
    assert len(compared) >= 35
    assert all(ours == number for ours, number in compared.values()), compared


@pytest.mark.parametrize(
    ("ours", "prefix", "least"), [(Init, "FUSE_", 8), (OpenFlags, "FOPEN_", 3), (Setattr, "FATTR_", 9)]
)
def test_flags_are_the_kernels(
    header: str, ours: type[Init] | type[OpenFlags] | type[Setattr], prefix: str, least: int
) -> None:
    theirs = _numbers(header, prefix)
    compared = {flag.name: (int(flag), theirs[flag.name]) for flag in ours if flag.name in theirs}
    assert len(compared) >= least
    assert all(mine == number for mine, number in compared.values()), compared


def test_notifications_are_the_kernels(header: str) -> None:
    theirs = _numbers(header, "FUSE_NOTIFY_")
    assert theirs["INVAL_INODE"] == protocol.NOTIFY_INVAL_INODE
    assert theirs["INVAL_ENTRY"] == protocol.NOTIFY_INVAL_ENTRY


def test_structures_are_the_kernels(header: str) -> None:
    """Sizes added up from the header's fields: those of the table above are not only ours."""
    widths = {"uint64_t": 8, "int64_t": 8, "uint32_t": 4, "int32_t": 4, "uint16_t": 2}
    known: dict[str, int] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", header, flags=re.DOTALL):
        size = 0
        for kind, field in re.findall(r"(\w+|struct \w+)\s+(\w+(?:\[\w*\])?);", body):
            width = widths.get(kind, known.get(kind.removeprefix("struct "), 0))
            many = re.search(r"\[(\w*)\]", field)
            size += width * (int(many[1] or 0) if many else 1)
        known[name] = size
    plain = {name: (ours.size, known[name]) for name, ours, _ in SIZES if name in known}
    assert len(plain) >= 12
    assert all(ours == theirs for ours, theirs in plain.values()), plain
    for name, ours, _ in SIZES:
        what, comma, _ = name.partition(", answered")
        if comma:
            assert ours.size == OUT + known[what], name


@given(st.lists(st.integers(-(1 << 61), 1 << 61), min_size=3, max_size=3), st.floats(0, 1e6))
def test_a_listing_packs_attributes_as_a_lookup_does(times: list[int], ttl: float) -> None:
    mtime_ns, atime_ns, ctime_ns = times
    attributes = Attributes(7, 0o100640, 1, 5000, mtime_ns, 3, 4, atime_ns, ctime_ns)
    packed = protocol.direntplus(Entry(b"name", attributes, 9, ttl))
    assert packed.startswith(Struct("=" + protocol.ENTRY).pack(*protocol.entry(attributes, ttl)))
