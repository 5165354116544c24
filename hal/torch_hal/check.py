"""Argument checks, generated once from a declaration's shapes, dtypes and conditions.

The fast path is one boolean expression over attributes, compiled into the op's call frame; only when it is
false does `Checker.complain` look for the argument at fault and word the error.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from .errors import ArgumentError, HalError
from .scalars import NAMESPACE

FLOAT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
INDEX = (torch.int32, torch.int64)

PLAIN = "plain"  # the layout of weights as checkpoints hold them, and of a plan that nobody made

FREE = ("T", "M", "B")  # dims that vary from call to call unless an op names others; leading ``...`` dims do too


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉: how many blocks of ``b`` cover ``a``."""
    return -(-a // b)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor argument must look like: dims by name, expression or ``...``; dtypes, or another's name."""

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[torch.dtype | str, ...]
    optional: bool
    prepared: bool = False  # as declared only in the plain layout; elsewhere the layout's own business

    def describe(self) -> str:
        return f"[{', '.join(self.dims)}]"

    def resize(self, shape: list[int], value: Callable[[str], int], size: int) -> list[int]:
        """``shape`` with its dims as ``value`` says, and one of the leading ``...`` dims, if any, ``size``."""
        for i, dim in _positions(self.dims):
            if dim != "_":
                shape[i] = value(dim)
        if "..." in self.dims and len(shape) >= len(self.dims):
            shape[self.dims.index("...")] = size
        return shape


class Checker:
    """The compiled contract of one op's arguments.

    ``condition(var)`` is the source of the fast test for a call frame; ``namespace`` is what it refers to.
    Dims bind in argument order: a plain name takes the size where it first stands and must equal it afterwards;
    anything else (``2*I``, ``ceil_div(N, 128)``, ``3``) is an expression over names and number arguments.
    What concerns prepared arguments holds in the plain layout.
    """

    def __init__(
        self,
        op: str,
        specs: Sequence[TensorSpec],
        where: Mapping[str, str],
        parameters: Sequence[str],
        scope: Mapping[str, Any],
        scalars: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self.scalars = scalars  # argument -> (source of the test of its type, what it must be)
        self.op, self.specs, self.where, self.parameters = op, tuple(specs), dict(where), tuple(parameters)
        used = {
            name
            for text in [*where, *(dim for spec in specs for dim in spec.dims if dim != "...")]
            for name in _names(text)
        }
        self.namespace: dict[str, Any] = {"ceil_div": ceil_div, **{name: scope[name] for name in used & set(scope)}}
        self._bindings: dict[str, str] = {}  # dim name -> source of its value
        self._clauses: list[str] = []
        self._prepared = {spec.name for spec in self.specs if spec.prepared}  # and the dims that only they tell
        for spec in sorted(self.specs, key=lambda spec: spec.prepared):
            self._bind(spec)
        known = {"_", *self._bindings, *self.parameters, *self.namespace, *dir(builtins)}
        if unknown := sorted(used - known):
            raise HalError(f"op '{op}': {', '.join(unknown)} is no dimension, argument or name in its module")
        self.namespace |= NAMESPACE
        self._clauses += [test for test, _ in self.scalars.values()]
        for spec in self.specs:
            self._compile(spec)
        for expression in self.where:
            self._add(self._substitute(expression), self._concerns_prepared(expression))

    def _bind(self, spec: TensorSpec) -> None:
        for i, dim in _positions(spec.dims):
            named = dim.isidentifier() and dim != "_" and dim not in self.parameters
            if named and dim not in self._bindings and not spec.optional:
                self._bindings[dim] = f"{spec.name}.shape[{i}]"
                if spec.prepared:
                    self._prepared.add(dim)

    def _compile(self, spec: TensorSpec) -> None:
        x = spec.name
        rank = len(spec.dims) - ("..." in spec.dims)
        clauses = [f"{x}.dim() {'>=' if '...' in spec.dims else '=='} {rank}"]
        if spec.dtypes:
            options = []
            for j, dtype in enumerate(spec.dtypes):
                if isinstance(dtype, str):
                    options.append(f"{dtype}.dtype")
                else:
                    self.namespace[f"_{x}_dtype{j}"] = dtype
                    options.append(f"_{x}_dtype{j}")
            clauses.append(
                f"{x}.dtype is {options[0]}" if len(options) == 1 else f"{x}.dtype in ({', '.join(options)},)"
            )
        for i, dim in _positions(spec.dims):
            here = f"{x}.shape[{i}]"
            if dim == "_" or self._bindings.get(dim) == here:
                continue
            clauses.append(f"{here} == {self._substitute(dim)}")
        body = " and ".join(clauses)
        self._add(f"{x} is None or ({body})" if spec.optional else body, spec.prepared)

    def _add(self, clause: str, only_plain: bool) -> None:
        self._clauses.append(f"(layout != {PLAIN!r} or ({clause}))" if only_plain else f"({clause})")

    def _concerns_prepared(self, expression: str) -> bool:
        return bool(_names(expression) & self._prepared)

    def _substitute(self, expression: str) -> str:
        """The expression with each dim's name replaced by where its size is read."""
        bindings = self._bindings

        class Names(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                return ast.parse(bindings[node.id], mode="eval").body if node.id in bindings else node

        return ast.unparse(Names().visit(ast.parse(expression, mode="eval")))

    def condition(self, device: str | None) -> str:
        """Source of the whole fast test; ``device`` names a variable that every tensor's device must equal."""
        clauses = []
        if device is not None:
            for spec in self.specs:
                test = f"{spec.name}.device == {device}"
                clauses.append(f"({spec.name} is None or {test})" if spec.optional else test)
        return " and ".join(clauses + self._clauses) or "True"

    def value(self, expression: str, scope: Mapping[str, Any]) -> Any:
        """An expression of the declaration, evaluated with arguments and dims by name."""
        return eval(expression, self.namespace, dict(scope))

    def _holds(self, expression: str, scope: Mapping[str, Any]) -> bool:
        try:
            return bool(self.value(expression, scope))
        except Exception:  # an argument of another type than the condition expects
            return False

    def dims(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The named dims of a call, by name; in another layout than plain, without those that only it could tell."""
        hidden = set() if arguments.get("layout", PLAIN) == PLAIN else self._prepared
        told = {name: source for name, source in self._bindings.items() if name not in hidden}
        return {name: eval(source, self.namespace, dict(arguments)) for name, source in told.items()}

    def complain(self, arguments: Mapping[str, Any], device: torch.device | None) -> NoReturn:
        """Raise the ArgumentError that says which argument breaks which rule."""
        for name, (test, wanted) in self.scalars.items():
            if not self.value(test, arguments):
                self._fail(name, wanted, f"{type(arguments[name]).__name__} {_show(arguments[name])}", "convert it")
        plain = arguments.get("layout", PLAIN) == PLAIN
        hidden = [] if plain else [spec for spec in self.specs if spec.prepared]
        for spec in self.specs:
            x = arguments[spec.name]
            if x is None and spec.optional:
                continue
            if not isinstance(x, torch.Tensor):
                self._fail(spec.name, f"a tensor {spec.describe()}", f"{type(x).__name__}", "pass a torch.Tensor")
            if device is not None and x.device != device:
                self._fail(
                    spec.name,
                    f"a tensor on {device}",
                    f"one on {x.device}",
                    f"move it, .to('{device}'), or bind another op set",
                )
            if spec in hidden:
                continue
            rank = len(spec.dims) - ("..." in spec.dims)
            if x.dim() < rank or (x.dim() != rank and "..." not in spec.dims):
                self._fail(
                    spec.name,
                    f"rank {rank} {spec.describe()}",
                    f"shape {tuple(x.shape)}",
                    "check the layout in the op's docstring",
                )
            allowed = [arguments[d].dtype if isinstance(d, str) else d for d in spec.dtypes]
            if allowed and x.dtype not in allowed:
                self._fail(
                    spec.name,
                    " or ".join(str(d) for d in dict.fromkeys(allowed)),
                    str(x.dtype),
                    "cast it explicitly, or choose an op for that type",
                )
        bound = self.dims(arguments)
        for spec in self.specs:
            x = arguments[spec.name]
            if x is None or spec in hidden:
                continue
            for i, dim in _positions(spec.dims):
                want = None if dim == "_" else self.value(dim, {**arguments, **bound})
                if want is not None and x.shape[i] != want:
                    known = ", ".join(f"{k}={v}" for k, v in bound.items())
                    self._fail(
                        spec.name,
                        f"{spec.describe()} with {dim} = {want} ({known})",
                        f"shape {tuple(x.shape)}",
                        "the named dimensions must agree between arguments",
                    )
        for expression, meaning in self.where.items():
            if not self._holds(expression, {**arguments, **bound}):
                seen = _names(expression) & (set(bound) | set(self.parameters))
                got = ", ".join(f"{n}={_show({**arguments, **bound}[n])}" for n in sorted(seen))
                self._fail(
                    ", ".join(sorted(seen & set(self.parameters))) or "shapes",
                    f"{meaning} ({expression})",
                    got,
                    "change the call",
                )
        raise ArgumentError(f"{self.op}: arguments {arguments} break the op's contract")

    def _fail(self, argument: str, expected: str, got: str, remedy: str) -> NoReturn:
        raise ArgumentError(f"{self.op}: argument '{argument}': expected {expected}, got {got}; {remedy}")

    def function(self, one_device: bool = False) -> Callable[..., None]:
        """A stand-alone check with the op's parameters, for callers outside a frame; of devices too, if asked."""
        first = next((spec.name for spec in self.specs if not spec.optional), None) if one_device else None
        device = None if first is None else f"{first}.device"
        fast = eval(f"lambda {', '.join(self.parameters)}: {self.condition(device)}", self.namespace)

        def check(*values: Any) -> None:
            try:
                fine = fast(*values)
            except Exception:  # an argument of another type than the test expects
                fine = False
            if not fine:
                arguments = dict(zip(self.parameters, values, strict=True))
                self.complain(arguments, None if first is None else getattr(arguments[first], "device", None))

        return check


def _positions(dims: Sequence[str]) -> list[tuple[int, str]]:
    """Each dim with its index: from the front before ``...``, from the back after it."""
    if "..." not in dims:
        return list(enumerate(dims))
    split = list(dims).index("...")
    return list(enumerate(dims[:split])) + [(i - len(dims), dims[i]) for i in range(split + 1, len(dims))]


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


def _show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} with strides {value.stride()}"
