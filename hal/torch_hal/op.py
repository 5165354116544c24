"""Ops: a typed function whose body is its native-torch reference, and what must be true of every kernel for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from .check import FREE, Checker, TensorSpec, ceil_div
from .check import PLAIN as PLAIN
from .contracts import Contracts
from .errors import ArgumentError, HalError
from .scalars import scalar_tests

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Op(Generic[P, R]):
    """One declared op. Calling it checks the arguments and runs the reference.

    ``prepare`` and ``plan`` are the references of two optional companions: weights re-laid once at load, and a
    schedule computed once a step. Their results travel as flat tensors, their layout's name as the argument
    ``layout``.
    """

    name: str
    family: str
    reference: Callable[P, R]
    shapes: Mapping[str, str]
    dtypes: Mapping[str, Any]
    where: Mapping[str, str]
    mutates: tuple[str, ...] = ()
    twin_of: str | None = None
    version: int = 1
    rounds: int = 1  # times that a result is rounded to its dtype
    accumulates: torch.dtype | None = torch.float32
    reduces: str = "1"  # expression over dims: the length of the longest sum
    flops: str = "0"  # expression over dims
    free: tuple[str, ...] = FREE  # dims that vary from call to call, which a static refusal must not look at
    traffic: str | None = None  # expression: bytes that must move, where a call touches only a part of an argument
    terms: Callable[..., Any] | None = None  # each result's sum of absolute terms, S in the error bound
    intermediate: Callable[..., Any] | None = None  # 2-norm of what a rounded intermediate adds up to, T in the bound
    intermediate_dtype: torch.dtype | None = None  # what that is rounded to, where it is not the result's dtype
    block_error: float = 0.0  # error, in units of S, of blocks that tensor cores may sum in fewer bits than float32
    fake: Callable[..., Any] | None = None  # defaults to the reference, which runs on fake tensors
    prepare: Callable[..., Any] | None = None
    plan: Callable[..., Any] | None = None
    contracts: Contracts = field(default_factory=Contracts)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = self.bind(*args, **kwargs)
        self._check_call(*arguments.values())
        if self.prepare is not None and arguments["layout"] != PLAIN:
            raise ArgumentError(
                f"{self.name}: argument 'layout': expected '{PLAIN}', got {arguments['layout']!r}; "
                "the reference reads weights as checkpoints hold them, so call a bound op on prepared ones"
            )
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Op {self.name}{self.signature}>"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference, eval_str=True)

    @functools.cached_property
    def schema(self) -> str:
        """The torch schema of arguments and results, as ``torch.library`` writes it."""
        return torch.library.infer_schema(self.reference, mutates_args=self.mutates)

    @functools.cached_property
    def checker(self) -> Checker:
        prepared = inspect.signature(self.prepare).parameters if self.prepare else {}
        specs = [
            TensorSpec(
                name,
                tuple(dims.split()),
                _as_tuple(self.dtypes.get(name, ())),
                optional=self.signature.parameters[name].default is None,
                prepared=name in prepared,
            )
            for name, dims in self.shapes.items()
        ]
        scope = cast(Mapping[str, Any], getattr(self.reference, "__globals__", {}))
        return Checker(
            self.name, specs, self.where, tuple(self.signature.parameters), scope, scalar_tests(self.signature)
        )

    @functools.cached_property
    def _check(self) -> Callable[..., None]:
        return self.checker.function()

    @functools.cached_property
    def _check_call(self) -> Callable[..., None]:
        return self.checker.function(one_device=True)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise ArgumentError, naming op, argument, expected and got, unless the call meets the contract.

        Devices may differ: arguments that only stand for others, as `specialize` takes them, lie on ``meta``.
        """
        bound = self.bind(*args, **kwargs)
        self._check(*bound.values())

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def measure(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """What a call must do: ``bytes`` read and written once each, ``flops``, and the ``reduces`` length."""
        arguments = self.bind(*args, **kwargs)
        results = self.run_fake(*args, **kwargs)
        scope = {**arguments, **self.checker.dims(arguments)}
        inputs = sum(_nbytes(value) for value in arguments.values())
        written = sum(_nbytes(arguments[name]) for name in self.mutates)
        everything = inputs + written + _nbytes(results)
        return {
            "bytes": everything if self.traffic is None else self._number(self.traffic, scope),
            "flops": self._number(self.flops, scope),
            "reduces": self._number(self.reduces, scope),
        }

    def longest_sum(self, *args: Any, **kwargs: Any) -> int:
        """The ``reduces`` length of a call, without running anything."""
        arguments = self.bind(*args, **kwargs)
        return self._number(self.reduces, {**arguments, **self.checker.dims(arguments)})

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        """The results' shapes and dtypes, computed on meta tensors: nothing is allocated and no device is used."""
        move = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, lambda x: x.to("meta"))
        return (self.fake or self.reference)(*move(args), **move(kwargs))

    def _number(self, expression: str, scope: Mapping[str, Any]) -> int:
        return int(self.checker.value(expression, {"ceil_div": ceil_div, **scope}))


_OPS: dict[str, Op[..., Any]] = {}

RESERVED = frozenset({"device", "explain", "manifest", "policy", "torch_device", "trace"})  # an `OpSet`'s own names


def op(
    *,
    shapes: Mapping[str, str],
    dtypes: Mapping[str, Any],
    where: Mapping[str, str] | None = None,
    **traits: Any,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare an op: the decorated function is its reference, its docstring its contract.

    shapes: argument -> dims, e.g. ``"... D"`` or ``"E 2*I D"`` (see `check.Checker`). dtypes: argument -> dtype,
    a tuple of them, or another argument's name. where: condition over dims and numbers -> what it means.
    The rest are fields of `Op`.
    """

    def declare(function: Callable[P, R]) -> Op[P, R]:
        name = function.__name__
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise HalError(f"op '{name}': op sets have attributes of their own so called, or like it; rename the op")
        if name in _OPS:
            raise HalError(
                f"op '{name}' is declared twice: in {_OPS[name].reference.__module__} and {function.__module__}"
            )
        family = function.__module__.rpartition(".")[2]
        declared = Op(name, family, function, shapes, dtypes, where or {}, **traits)
        hidden = [parameter for parameter in inspect.signature(function).parameters if parameter.startswith("_")]
        if hidden:
            raise HalError(f"op '{name}': arguments must not begin with '_': {', '.join(hidden)}")
        unknown = (set(shapes) | set(dtypes) | set(declared.mutates)) - set(inspect.signature(function).parameters)
        if unknown:
            raise HalError(f"op '{name}' describes arguments that it does not have: {sorted(unknown)}")
        for attribute in ("__name__", "__qualname__", "__module__"):
            object.__setattr__(declared, attribute, getattr(function, attribute))
        object.__setattr__(declared, "__doc__", _documented(declared))
        _OPS[name] = declared
        return declared

    return declare


def _documented(op: Op[..., Any]) -> str:
    """The reference's docstring, and below it the op's contracts: what `help` shows."""
    contracts = "\n".join(f"    {name}: {position}" for name, position in op.contracts.items())
    return f"{inspect.cleandoc(op.reference.__doc__ or '')}\n\nContracts:\n{contracts}\n"


def declared() -> Mapping[str, Op[..., Any]]:
    """Every op declared so far, by name."""
    return _OPS


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _nbytes(value: Any) -> int:
    leaves: Sequence[Any] = torch.utils._pytree.tree_leaves(value)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
