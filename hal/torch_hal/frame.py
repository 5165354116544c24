"""The call frame: Python source for one bound op, with exactly what its kernels and policy need."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import ArgumentError, PluginError, Unsupported
from .fallback import Fallback
from .kernel import ANY_LAYOUT
from .loading import Loaded
from .op import Op

if TYPE_CHECKING:
    from .policy import Policy

_numbers = itertools.count()


class Trace:
    """Which kernel ran with which arguments: the last ``limit`` calls, oldest first."""

    def __init__(self, limit: int = 100_000) -> None:
        self.calls: deque[tuple[str, str, tuple[str, ...]]] = deque(maxlen=limit)

    def record(self, op: str, kernel: str, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():  # a compiled graph names its kernels itself
            self.calls.append((op, kernel, tuple(summarize(a) for a in arguments)))

    def counts(self) -> dict[tuple[str, str], int]:
        """(op, kernel) -> calls."""
        counted: dict[tuple[str, str], int] = {}
        for op, kernel, _ in self.calls:
            counted[op, kernel] = counted.get((op, kernel), 0) + 1
        return counted


def build_frame(
    op: Op[..., Any], chain: Sequence[Loaded], policy: Policy, trace: Trace | None, fallback: Fallback
) -> Callable[..., Any]:
    """A function with the op's signature that calls the first kernel of ``chain`` which does not refuse."""
    scope = _Scope(op, chain, policy, trace, fallback)
    source = "\n".join([f"def {op.name}({', '.join(_parameters(op, scope.names))}):", *scope.body()]) + "\n"
    filename = f"<torch_hal frame {next(_numbers)}: {op.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), scope.names)
    function: Callable[..., Any] = scope.names[op.name]
    weakref.finalize(function, linecache.cache.pop, filename, None)
    function.__doc__ = op.__doc__
    function.__module__ = "torch_hal.ops"
    function.__signature__ = op.signature  # type: ignore[attr-defined]
    return function


def _parameters(op: Op[..., Any], names: dict[str, Any]) -> list[str]:
    parameters = []
    for name, parameter in op.signature.parameters.items():
        if parameter.default is inspect.Parameter.empty:
            parameters.append(name)
        else:
            names[f"_default_{name}"] = parameter.default
            parameters.append(f"{name}=_default_{name}")
    return parameters


class _Scope:
    """The pieces of one frame: its source lines, and the names that they refer to."""

    def __init__(
        self, op: Op[..., Any], chain: Sequence[Loaded], policy: Policy, trace: Trace | None, fallback: Fallback
    ) -> None:
        self.op, self.chain, self.policy, self.trace, self.fallback = op, chain, policy, trace, fallback
        self.device = fallback.device
        self.arguments = list(op.signature.parameters)
        self.call = f"({', '.join(self.arguments)})"
        # No `__name__` here: Dynamo would look these names up in the module so called, and mix frames up.
        self.names: dict[str, Any] = {}

    def body(self) -> list[str]:
        lines = self._validation() if self.policy.validation else []
        if any(loaded.refuses for loaded in self.chain) or "layout" in self.arguments:
            lines += ["    _whys = ()"]
        for i, loaded in enumerate(self.chain):
            lines += self._attempt(i, loaded)
        if self._can_run_out():
            self.names["_exhausted"] = self._exhausted
            lines += [f"    _exhausted(_whys, {self._pack()})"]
        return lines

    def _validation(self) -> list[str]:
        self.names |= {k: v for k, v in self.op.checker.namespace.items() if not k.startswith("__")}
        self.names |= {"_device": self.device, "_complain": self._complain}
        return [
            "    try:",
            f"        _fine = {self.op.checker.condition('_device')}",
            "    except Exception:",
            "        _fine = False",
            "    if not _fine:",
            f"        _complain({self._pack()})",
        ]

    def _attempt(self, i: int, loaded: Loaded) -> list[str]:
        self.names |= {f"_run{i}": loaded.run, "_note": self._note}
        tests = []
        if "layout" in self.arguments and ANY_LAYOUT not in loaded.kernel.layouts:
            self.names[f"_reads{i}"] = loaded.kernel.layouts
            tests.append(f"None if layout in _reads{i} else f\"does not read layout '{{layout}}'\"")
        for kind in ("static", "dynamic"):
            if (refuse := getattr(loaded, kind)) is not None:
                self.names |= {f"_{kind}{i}": refuse, "_failed": self._failed}
                tests.append(f"_{kind}{i}{self.call}")
        if not tests:
            return self._run(i, loaded, "    ")
        first, *rest = tests
        if loaded.refuses:
            lines = ["    try:", f"        _why = {first}"]
            for source in rest:
                lines += ["        if _why is None:", f"            _why = {source}"]
            lines += ["    except Exception as _error:", f"        _why = _failed(_error, {i})"]
        else:
            lines = [f"    _why = {first}"]
        lines += ["    if _why is None:", *self._run(i, loaded, "        ")]
        self.names["_reason"] = self._reason
        return [*lines, f"    _whys += (({i}, _reason(_why, {i})),)"]

    def _run(self, i: int, loaded: Loaded, indent: str) -> list[str]:
        lines = []
        if i > 0:
            self.names |= {"_fell": self._fell, f"_fell_in_trace{i}": self._at_trace_time(i)}
            self.names |= {"_compiling": torch.compiler.is_compiling}
            lines += [f"{indent}_fell_in_trace{i}() if _compiling() else _fell({i}, _whys)"]
        if self.trace is not None:
            self.names |= {"_record": self.trace.record, "_range": torch.profiler.record_function}
            lines += [f"{indent}_record({self.op.name!r}, {loaded.kernel.id!r}, {self._pack()})"]
        run = [f"return _run{i}{self.call}"]
        if self.trace is not None:
            run = [f"with _range({f'torch_hal::{self.op.name}:{loaded.kernel.id}'!r}):", f"    {run[0]}"]
        return [
            *lines,
            f"{indent}try:",
            *(f"{indent}    {line}" for line in run),
            f"{indent}except Exception as _error:",
            f"{indent}    _note(_error, {i}, {self._pack()})",
            f"{indent}    raise",
        ]

    def _can_run_out(self) -> bool:
        last = self.chain[-1]
        reads_all = "layout" not in self.arguments or ANY_LAYOUT in last.kernel.layouts
        return last.refuses or not reads_all

    def _pack(self) -> str:
        return f"({', '.join(self.arguments)},)"

    # What the generated source calls off the fast path.

    def _complain(self, values: tuple[Any, ...]) -> None:
        self.op.checker.complain(dict(zip(self.arguments, values, strict=True)), self.device)

    def _failed(self, error: Exception, i: int) -> str:
        return self.fallback.failed(error, self.chain[i].kernel)

    def _reason(self, why: Any, i: int) -> str:
        if not isinstance(why, str) or not why:
            kernel = self.chain[i].kernel.id
            raise PluginError(f"kernel '{kernel}' of {self.op.name}: a refusal gave {why!r}, expected None or a reason")
        return why

    def _fell(self, i: int, whys: tuple[tuple[int, str], ...]) -> None:
        if not self.fallback.warned:
            refused = [(self.chain[j].kernel, why) for j, why in whys]
            self.fallback.report(self.chain[i].kernel, refused, "a call", stacklevel=3)

    def _at_trace_time(self, i: int) -> Callable[[], None]:
        """What a compiler runs, rather than traces, when a traced call gets past the kernels before the i-th."""

        def fell() -> None:
            why = "refused what the compiler traced; an eager call says why"
            self._fell(i, tuple((j, why) for j in range(i)))

        fell._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see ops/collectives.py
        return fell

    def _exhausted(self, whys: tuple[tuple[int, str], ...], values: tuple[Any, ...]) -> None:
        reasons = "; ".join(f"{self.chain[j].kernel.id}: {text}" for j, text in whys)
        kind = ArgumentError if all("does not read layout" in text for _, text in whys) else Unsupported
        raise kind(
            f"{self.op.name} on {self.device}: no bound kernel takes this call ({self._shown(values)}). {reasons}"
        )

    def _shown(self, values: tuple[Any, ...]) -> str:
        return ", ".join(f"{n}={summarize(v)}" for n, v in zip(self.arguments, values, strict=True))

    def _note(self, error: Exception, i: int, values: tuple[Any, ...]) -> None:
        kernel = self.chain[i].kernel
        with contextlib.suppress(Exception):  # whatever a note meets, the kernel's own exception is the user's
            error.add_note(
                f"torch_hal: in {self.op.name}({self._shown(values)}), "
                f"kernel '{kernel.name}' of plugin '{kernel.plugin}' on {self.device}"
            )


def summarize(value: Any) -> str:
    """An argument in a few words: dtype, shape and strides of a tensor, the value of anything else."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.is_contiguous() else f" strides {value.stride()}"
        return f"{dtype}{list(value.shape)}{layout}"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"[{', '.join(summarize(v) for v in value[:4])}, … {len(value)} in all]"
    return repr(value)
