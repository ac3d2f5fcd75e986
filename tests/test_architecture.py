"""The rooms table of docs/explanation/architecture.md, held by reading every import in the package."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import cachefs
from cachefs.base import errors
from cachefs.fuse.errno_table import TABLE, is_expected

PACKAGE = Path(cachefs.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

RANK = {
    **dict.fromkeys(("__init__", "base"), 0),
    "config": 1,
    **dict.fromkeys(("origin", "store", "peers"), 2),
    **dict.fromkeys(("fetch", "upload"), 3),
    "fs": 4,
    **dict.fromkeys(("prefetch", "fuse"), 5),
    **dict.fromkeys(("daemon", "observe", "hints"), 6),
    **dict.fromkeys(("cli", "__main__"), 7),
}
"""Room → floor. Imports go to the own room or to a lower floor; between rooms of one floor only where SIDEWAYS says."""

SIDEWAYS = {6, 7}
"""Floors whose modules are single files of one kind and may use each other. Rooms (origin, store) may not."""

NEVER = {
    "fs": {"fuse", "store", "daemon"},
    "store": {"origin", "fetch", "fs"},
    "upload": {"fs", "fuse"},
    "origin": {"store", "fetch", "fs"},
    "peers": {"origin", "store", "fetch", "fs"},
}

FENCES = {
    "lmdb": ("base/database.py",),
    "pyfuse3": ("fuse/",),
    **dict.fromkeys(
        ("pycurl", "botocore", "azure", "google", "fsspec", "s3fs", "adlfs", "gcsfs", "aiohttp"),
        ("origin/",),
    ),
    **dict.fromkeys(("click", "rich"), ("cli/",)),
    "h11": ("peers/etcd.py",),
    "ssl": ("peers/", "origin/http.py"),
    "prometheus_client": ("observe/",),
    "asyncio": (),
}
"""Third-party package → where in cachefs/ it may be imported."""


def room_of(name: str) -> str:
    """`cachefs.store.tier` → `store`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def name_of(path: Path) -> str:
    parts = ["cachefs", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[tuple[int, str, bool]]:
    """(line, absolute dotted name, only for the type checker) of everything a module imports, at any depth."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = name_of(path).split(".")
                package = here if path.name == "__init__.py" else here[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name, id(node) in typing_only) for name in names]
    return found


def test_every_module_has_a_place_in_the_table() -> None:
    homeless = {room_of(name_of(path)) for path in MODULES} - RANK.keys()
    assert not homeless, f"give these a floor in RANK: {homeless}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path: Path) -> None:
    room = room_of(name_of(path))
    wrong = []
    for line, name, typing_only in imports_of(path):
        if not name.startswith("cachefs.") and name != "cachefs":
            continue
        other = room_of(name)
        if other not in RANK:
            other = "__init__"  # `from cachefs import __version__`
        if other == room:
            continue
        below = RANK[other] < RANK[room] or (RANK[other] == RANK[room] and RANK[room] in SIDEWAYS)
        if not below or (other in NEVER.get(room, ()) and not typing_only):
            wrong.append(f"line {line}: {room} imports {name}")
    assert not wrong


def test_the_filesystem_reaches_the_cache_only_through_its_reader_protocol() -> None:
    wrong = [
        f"{path.name}:{line} {name}"
        for path in MODULES
        if room_of(name_of(path)) == "fs"
        for line, name, _ in imports_of(path)
        if room_of(name) in ("fetch", "store") and name.startswith("cachefs.")
    ]
    assert not wrong


@pytest.mark.parametrize("package", FENCES)
def test_third_party_packages_stay_behind_their_fence(package: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in MODULES
        for line, name, typing_only in imports_of(path)
        if name.split(".")[0] == package
        and not typing_only
        and not str(path.relative_to(PACKAGE)).startswith(FENCES[package] or ("nowhere",))
    ]
    assert not wrong


def test_the_page_names_the_packages_of_each_room() -> None:
    page = (PACKAGE.parent / "docs/explanation/architecture.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)/` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    said = {
        room: set(re.sub(r"\(.*\)", "", cell).replace("-", "_").replace(",", " ").split())
        for room, cell in rows
    }
    used = {room: set() for room in said}
    for path in MODULES:
        for _, name, typing_only in imports_of(path):
            package = name.split(".")[0]
            inside = package in sys.stdlib_module_names - {"ssl"} or package in ("cachefs", "trio", "outcome")
            if not typing_only and not inside:
                used[room_of(name_of(path))].add(package)
    assert said == used


def functions_of(path: Path) -> set[str]:
    """The functions of a module, and the methods of its classes with the name of the class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        above = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {
            above + one.name for one in inside if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        }
    return found


def test_the_ways_through_the_code_exist() -> None:
    """A name without a file belongs to a file that was named before it."""
    page = (PACKAGE.parent / "docs/explanation/architecture.md").read_text()
    part = page.partition("## Reading the code\n")[2].partition("\n## ")[0]
    ways = re.findall(r"^- \*\*(.*?)\*\*(.*?)(?=^- |^$)", part, re.MULTILINE | re.DOTALL)
    assert len(ways) == 8
    for way, text in ways:
        files: list[Path] = []
        for file, name in re.findall(r"`(?:([a-z_]+/[a-z_0-9]+\.py):?)?([\w.]*)`", text):
            files = [*files, PACKAGE / file] if file else files
            assert not name or any(name in functions_of(path) for path in files), (way, name)
            assert all(path.exists() for path in files), way


@pytest.mark.parametrize(
    "room", sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
)
def test_no_modules_of_a_room_import_each_other(room: str) -> None:
    """Neither directly nor through others, nor for the type checker."""
    names = {
        name_of(path): path for path in MODULES if path.parent == PACKAGE / room and path.stem != "__init__"
    }
    left = {
        module: {
            other
            for _, name, _ in imports_of(path)
            for other in (name, name.rpartition(".")[0])
            if other in names
        }
        for module, path in names.items()
    }
    while free := {module for module, uses in left.items() if not uses & left.keys()}:
        left = {module: uses for module, uses in left.items() if module not in free}
    assert not left, f"a circle among {sorted(left)}"


MOST_ATTRIBUTES = 15


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What an instance of the class has: what its methods assign to `self`, its fields, and its slots."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__slots__":
            found |= set(ast.literal_eval(part.value))
    return found


@pytest.mark.parametrize("room", ["fs", "upload"])
def test_no_class_of_a_room_has_more_attributes_than_a_reader_can_follow(room: str) -> None:
    classes = {
        f"{path.name}: {node.name}": attributes_of(node)
        for path in MODULES
        if path.parent == PACKAGE / room
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert max(map(len, classes.values())) > 10, "attributes are not found"
    assert not {name: len(found) for name, found in classes.items() if len(found) > MOST_ATTRIBUTES}


def unnamed_tuples(annotation: ast.expr | None) -> bool:
    """True if an annotation spells a tuple of more than two kinds of elements, instead of a name that says what they are."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return annotation is not None and any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tuple"
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) > 2
        for node in ast.walk(annotation)
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tuples_in_signatures_have_names(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(map(unnamed_tuples, [node.returns, *(argument.annotation for argument in given)])):
                found.append(f"{node.lineno}: {node.name}")
    assert not found


def test_every_exception_of_ours_has_an_errno() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "cachefs."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    pending: list[type[BaseException]] = [errors.CachefsError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert is_expected(kind.__new__(kind)), f"{kind.__qualname__} would be EIO with a traceback"
        if kind.__module__ == errors.__name__:
            assert kind in TABLE, f"{kind.__qualname__} got its errno by chance"


def test_the_demo_imports_nothing_that_its_setup_leaves_out() -> None:
    """`scripts/setup demo` installs the package and its extra "demo"; the demo and its store run on that alone."""
    root = PACKAGE.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    installed = {re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_") for line in wanted}
    todo, seen, foreign = ["bench.demo", "bench.lab.store"], set[str](), set[str]()
    while todo:
        name = todo.pop()
        file = root.joinpath(*name.split(".")).with_suffix(".py")
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            todo += [name for name in names if name.startswith("bench.")]
            foreign |= {name.split(".")[0] for name in names}
    assert "httptools" in foreign and len(seen) > 10
    assert foreign - installed - set(sys.stdlib_module_names) <= {"bench", "cachefs"}


def test_what_is_installed_has_one_exact_version() -> None:
    """pip finds versions that fit together by search, which may not end; scripts/setup gives it nothing to search."""
    root = PACKAGE.parent
    document = tomllib.loads((root / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"].values()
    wanted = [*document["project"]["dependencies"], *(line for extra in extras for line in extra)]
    pinned, lowest = _versions(root / "constraints/pinned.txt"), _versions(root / "constraints/lowest.txt")
    for requirement in wanted:
        name, bound = requirement.split(">=")
        assert pinned[name], f"run scripts/constraints: {name} is new"
        (version,) = lowest[name]
        shorter, longer = sorted((bound, version), key=len)
        assert longer.removeprefix(shorter).strip(".0") == "", f"{requirement} was not tested, {version} was"
    servers = _versions(root / "constraints/servers.txt")
    for requirement in document["dependency-groups"]["servers"]:
        assert servers[re.split(r"[\[>]", requirement)[0]]
    lock = (root / "constraints/azurite/package-lock.json").read_text()
    assert '"integrity"' in lock and '"resolved"' not in lock, "a lock names no registry"
    assert "-c constraints/pinned.txt" in (root / "scripts/install").read_text()


def _versions(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in file.read_text().splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9][\w.]*)( ; .*)?", line)
        assert match, f"{file.name}: no exact version: {line}"
        found.setdefault(match[1], set()).add(match[2])
    return found
