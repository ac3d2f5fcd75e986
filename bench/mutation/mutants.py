"""Mutants: small faults, found by reading a module's syntax tree, and written by replacing one piece of its text.

Not mutated: texts and docstrings, annotations, what is logged, what is only for the type checker, and the values of
module constants that are counts or times (their docstrings say measured or guessed: no test should hold them).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Mod: ast.FloorDiv,
}
LOGGERS = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """`start` and `stop` are byte offsets of what is replaced by `new`. `lines` are those that a test must run to notice it,
    as (function, line of it); none: the module must only be used."""

    path: str
    function: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    lines: frozenset[tuple[str, int]]
    around: tuple[str, str] = ("", "")
    """The rest of the line, of a name or a number."""

    @property
    def change(self) -> str:
        before, behind = self.around
        old = f"{before}[{self.old}]{behind}" if before or behind else self.old
        return f"{_one_line(old)} -> {_one_line(self.new)}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.change}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """The mutants in the order of the text."""
    found = list(_Finder(path, source).mutants())
    return sorted(set(found), key=lambda m: (m.start, m.stop, m.new))


def functions_of(source: bytes) -> dict[str, tuple[int, int, str]]:
    """Name → first line, last line, and a hash of the text."""
    texts = source.splitlines()
    found: dict[str, tuple[int, int, str]] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                text = b"\n".join(texts[child.lineno - 1 : child.end_lineno])
                digest = hashlib.blake2b(text, digest_size=8).hexdigest()
                found[inner] = (child.lineno, child.end_lineno, digest)
            visit(child, inner)

    visit(ast.parse(source), "")
    return found


def within(functions: dict[str, tuple[int, int, str]], line: int) -> tuple[str, int]:
    """(the innermost function around a line, the line within it); ("", line) outside of all functions."""
    around = [(first, name) for name, (first, last, _) in functions.items() if first <= line <= last]
    first, name = max(around, default=(1, ""))
    return name, line - first


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._functions = functions_of(source)
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        yield from self._body(self._tree.body, "", None)

    def _body(self, body: list[ast.stmt], name: str, function: ast.AST | None) -> Iterator[Mutant]:
        for statement in body:
            yield from self._statement(statement, name, function)

    def _statement(self, node: ast.stmt, name: str, function: ast.AST | None) -> Iterator[Mutant]:
        if isinstance(node, ast.ClassDef):
            protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
            if not protocol:
                yield from self._body(node.body, f"{name}.{node.name}".lstrip("."), None)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{name}.{node.name}".lstrip(".")
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from self._expression(default, inner, frozenset())
            yield from self._body(node.body, inner, node)
            return
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        lines = self._lines(node) if function is not None else frozenset()
        yield from self._whole(node, name, function, lines)
        for child in self._own(node, function):
            yield from self._expression(child, name, lines)
        for block in ("body", "orelse", "finalbody"):
            yield from self._body(getattr(node, block, []), name, function)
        for handler in getattr(node, "handlers", []):
            yield from self._body(handler.body, name, function)
        for case in getattr(node, "cases", []):
            if case.guard is not None:
                yield from self._expression(
                    case.guard, name, frozenset({within(self._functions, case.guard.lineno)})
                )
            yield from self._body(case.body, name, function)

    def _own(self, node: ast.stmt, function: ast.AST | None) -> list[ast.expr]:
        """The expressions of a statement, without those of nested statements."""
        if isinstance(node, ast.AnnAssign):
            return [node.value] if node.value is not None and not self._is_constant(node, function) else []
        if isinstance(node, ast.Assign) and self._is_constant(node, function):
            return []
        if isinstance(node, ast.With | ast.AsyncWith):
            return [item.context_expr for item in node.items]
        return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]

    def _is_constant(self, node: ast.Assign | ast.AnnAssign, function: ast.AST | None) -> bool:
        """A named count or time, or a value with a docstring."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        return function is None and bool(names) and all(name.id.isupper() for name in names)

    def _whole(
        self, node: ast.stmt, name: str, function: ast.AST | None, lines: frozenset[tuple[str, int]]
    ) -> Iterator[Mutant]:
        """Mutants that omit a statement, or return another result."""
        if function is None:
            return
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            if isinstance(value, ast.Call) and not _is_logging(value):
                yield self._replace(node, "pass", name, lines)
        elif isinstance(node, ast.AugAssign | ast.Delete | ast.Raise):
            yield self._replace(node, "pass", name, lines)
        elif isinstance(node, ast.Assign) and not name.endswith("__init__"):
            if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
                yield self._replace(node, "pass", name, lines)
        elif isinstance(node, ast.Return) and node.value is not None:
            if isinstance(node.value, ast.Constant):
                return  # flipped as a constant
            yield self._replace(node.value, "None", name, lines)

    def _expression(self, node: ast.expr, name: str, lines: frozenset[tuple[str, int]]) -> Iterator[Mutant]:
        if isinstance(node, ast.Call) and _is_logging(node):
            return
        if isinstance(node, ast.JoinedStr):
            return
        for new in _variants(node):
            text = ast.unparse(new)
            simple = isinstance(new, ast.Constant | ast.Name | ast.Call | ast.Attribute)
            yield self._replace(node, text if simple else f"({text})", name, lines)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword | ast.comprehension):
                for inner in ast.iter_child_nodes(child):
                    if isinstance(inner, ast.expr):
                        yield from self._expression(inner, name, lines)
            elif isinstance(child, ast.expr):
                yield from self._expression(child, name, lines)

    def _replace(
        self, node: ast.expr | ast.stmt, new: str, name: str, lines: frozenset[tuple[str, int]]
    ) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        stop = self._starts[node.end_lineno - 1] + node.end_col_offset
        old = self._source[start:stop].decode()
        around = ("", "")
        if isinstance(node, ast.Constant | ast.Name):
            first, last = self._starts[node.lineno - 1], self._starts[node.lineno]
            around = (
                self._source[first:start].decode().lstrip(),
                self._source[stop:last].decode().split("  #")[0].rstrip(),
            )
        return Mutant(self._path, name or "(module)", node.lineno, start, stop, old, new, lines, around)

    def _lines(self, node: ast.stmt) -> frozenset[tuple[str, int]]:
        """The head of a compound statement."""
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body and isinstance(body[0], ast.stmt) else node.end_lineno
        assert last is not None
        return frozenset(
            within(self._functions, line) for line in range(node.lineno, max(node.lineno, last) + 1)
        )


def _is_logging(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in LOGGERS
    )


def _variants(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for at in range(len(node.values)):
            rest = [*node.values[:at], *node.values[at + 1 :]]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not | ast.Invert | ast.USub):
            yield node.operand
    elif isinstance(node, ast.BinOp):
        text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str | bytes)
        if type(node.op) in OPERATORS and not text and not isinstance(node.right, ast.JoinedStr):
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
            if node.value:
                yield ast.Constant(node.value - 1)
