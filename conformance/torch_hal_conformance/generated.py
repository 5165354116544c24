"""Mutants made from the references' syntax trees: one small change each, wherever one can be made.

They ask whether the cases of an op look at everything that its reference does. What no case kills is either the same
op written differently, or a hole: `selftest` counts both, and ``mutants/survivors.toml`` explains the ones that remain.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_hal.op import declared

from .rebuild import PACKAGE, rebuild, source_of


@dataclass(frozen=True)
class Generated:
    """One change at one place; ``where``: the function, and the expression, counted if the function has it twice."""

    op: str
    where: str
    change: str
    module: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.op}@{self.where}: {self.change}"

    def build(self) -> Callable[..., Any]:
        tree = ast.parse(source_of(f"{PACKAGE}.{self.module}"))
        _, apply = list(_changes(tree, self._functions()))[self.index]
        apply()
        return rebuild(self.op, {self.module: lambda source: ast.unparse(tree)})

    def _functions(self) -> frozenset[str]:
        return _reached(self.op)[self.module]


def generated(op: str, limit: int) -> list[Generated]:
    """At most ``limit`` mutants of an op, spread evenly over what its reference and the helpers that it reaches do."""
    found: list[Generated] = []
    for module, functions in sorted(_reached(op).items()):
        tree = ast.parse(source_of(f"{PACKAGE}.{module}"))
        places, seen = _places(tree), Counter[tuple[str, str]]()
        for index, ((node, change), _) in enumerate(_changes(tree, functions)):
            where = f"{module}.{places[node]}"
            seen[where, change] += 1
            again = f" #{n}" if (n := seen[where, change]) > 1 else ""
            found.append(Generated(op, where, f"{change}{again}", module, index))
    step = max(1, -(-len(found) // limit))
    return found[::step]


WIDTH = 60  # of an expression in a name


def _places(tree: ast.Module) -> dict[ast.AST, str]:
    """Of every node in a function: the function, and the node as source, or what it is in where it is a number."""
    places: dict[ast.AST, str] = {}

    def look(node: ast.AST, around: ast.AST, function: str) -> None:
        """``around``: the least expression that holds ``node`` and is no number."""
        number = isinstance(node, ast.Constant) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
        )
        around = around if number else node
        text = ast.unparse(around).partition("\n")[0]
        places[node] = f"{function}: {text if len(text) <= WIDTH else text[: WIDTH - 1] + '…'}"
        for child in ast.iter_child_nodes(node):
            look(child, around, function)

    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                look(statement, statement, function.name)
    return places


def _reached(op: str) -> dict[str, frozenset[str]]:
    """Module -> names of the functions in torch_hal.ops that the op's reference can call."""
    home = declared()[op].reference.__module__.removeprefix(f"{PACKAGE}.")
    reached: dict[str, set[str]] = {}
    waiting = [(home, op)]
    while waiting:
        module, name = waiting.pop()
        if name in reached.get(module, set()):
            continue
        tree = ast.parse(source_of(f"{PACKAGE}.{module}"))
        function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
        if function is None:
            continue
        reached.setdefault(module, set()).add(name)
        homes = _imported(tree)
        names = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
        waiting += [(homes.get(other, module), other) for other in sorted(names)]
    return {module: frozenset(names) for module, names in reached.items()}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name -> the sibling module that it comes from."""
    return {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
    }


_SWAPS: dict[type[ast.AST], tuple[type[ast.AST], str]] = {
    ast.Add: (ast.Sub, "+ to -"),
    ast.Sub: (ast.Add, "- to +"),
    ast.Mult: (ast.Div, "* to /"),
    ast.Div: (ast.Mult, "/ to *"),
    ast.FloorDiv: (ast.Mult, "// to *"),
    ast.Lt: (ast.LtE, "< to <="),
    ast.LtE: (ast.Lt, "<= to <"),
    ast.Gt: (ast.GtE, "> to >="),
    ast.GtE: (ast.Gt, ">= to >"),
    ast.Eq: (ast.NotEq, "== to !="),
    ast.NotEq: (ast.Eq, "!= to =="),
    ast.And: (ast.Or, "and to or"),
    ast.Or: (ast.And, "or to and"),
    ast.BitAnd: (ast.BitOr, "& to |"),
    ast.BitOr: (ast.BitAnd, "| to &"),
}
_CALLS = {
    "amax": "amin", "amin": "amax", "argmax": "argmin", "sigmoid": "tanh", "silu": "relu", "abs": "neg", "ge": "gt",
    "rsqrt": "sqrt", "square": "abs", "minimum": "maximum", "maximum": "minimum", "exp": "expm1", "softmax": "sigmoid",
}  # fmt: skip
Change = tuple[tuple[Any, str], Callable[[], None]]


def _changes(tree: ast.Module, functions: frozenset[str]) -> Iterator[Change]:
    """Every change that can be made in these functions: where and what, and how to make it."""
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            for statement in function.body:
                for node in ast.walk(statement):
                    yield from _changes_of(node)


def _changes_of(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _SWAPS:
        swap, what = _SWAPS[type(node.op)]
        yield (node, what), lambda: setattr(node, "op", swap())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
        swap, what = _SWAPS[type(node.ops[0])]
        yield (node, what), lambda: setattr(node, "ops", [swap()])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):  # bool too
        value = node.value
        other = not value if isinstance(value, bool) else value + 1
        yield (node, f"{value} to {other}"), lambda: setattr(node, "value", other)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        attribute = node.func
        if attribute.attr in _CALLS:
            other_name = _CALLS[attribute.attr]
            yield (node, f"{attribute.attr} to {other_name}"), lambda: setattr(attribute, "attr", other_name)
        elif attribute.attr in ("clamp", "masked_fill", "flip") and isinstance(attribute.value, (ast.Call, ast.BinOp)):
            yield (node, f"without {attribute.attr}"), lambda: _become(node, attribute.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield (node, f"without {type(node.op).__name__}"), lambda: _become(node, node.operand)


def _become(node: ast.AST, other: ast.AST) -> None:
    """Turn ``node`` into ``other`` where it stands."""
    other = copy.deepcopy(other)
    node.__class__ = other.__class__
    node.__dict__ = other.__dict__
