"""Every op's position on the cross-cutting contracts C1–C14, tested for every op from its declaration and a sample.

What only some ops promise (sentinels, fp8, who owns the scale) is tested with their families in ``tests/ops``;
here each such contract is tested wherever its meaning is the same for all ops that speak of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import samples_attention
import samples_dense
import samples_grouped
import samples_moe
import torch
from bounds import assert_within, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_hal as hal
from torch_hal.op import Op, declared

SAMPLES = {**samples_dense.SAMPLES, **samples_grouped.SAMPLES, **samples_moe.SAMPLES, **samples_attention.SAMPLES}
# These need ranks: tests/ops/test_collectives.py, test_expert_parallel.py.
MOVING = {"all_gather", "all_to_all", "ep_dispatch"}  # bytes, of fp8 too
COLLECTIVES = MOVING | {"all_reduce", "reduce_scatter", "ep_counts", "ep_combine"}
NAMES = sorted(set(declared()) - COLLECTIVES)

every_op = pytest.mark.parametrize("name", NAMES)


def sample(name: str, tokens: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return SAMPLES[name](torch.Generator().manual_seed(7), dtype, tokens)


def run(op: Op[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """The results, and after them the arguments that the op writes."""
    return results_of(op(**arguments)) + [arguments[name] for name in op.mutates]


def results_of(value: Any) -> list[Any]:
    return [] if value is None else tree_leaves(value)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in memory of their own, strides kept: a scale's say which layout it has."""
    return tree_map_only(Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x), arguments)


def exact(op: Op[..., Any], arguments: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Results in float64 on the very bits of the arguments, their absolute terms, and their rounded intermediates."""
    arguments = tree_map_only(Tensor, lambda x: x.double() if is_wide(x) else x, copied(arguments))
    if "out_dtype" in arguments:
        arguments["out_dtype"] = torch.float64
    terms = results_of(op.terms(**arguments)) if op.terms else []
    intermediates = results_of(op.intermediate(**arguments)) if op.intermediate else [None] * len(terms)
    results = results_of(op.reference(**arguments)) + [arguments[name] for name in op.mutates]
    return results, terms, intermediates


def is_wide(x: Tensor) -> bool:
    """Whether x is floating point of more than 8 bits: fp8 codes stay as they are."""
    return x.is_floating_point() and x.element_size() > 1


def assert_same_op(op: Op[..., Any], arguments: dict[str, Any], got: list[Any], expected: list[Any]) -> None:
    """Bits as expected; where a matrix product may sum in another order, within the declared bound of the exact."""
    if op.terms is None:
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
        return
    arguments = copied(arguments)
    length = max(op.measure(**arguments)["reduces"], 1)
    for y, other, y_exact, s, t in zip(got, expected, *exact(op, arguments), strict=True):
        assert (y.dtype, y.shape) == (other.dtype, other.shape)
        if not is_wide(y):
            assert torch.equal(y, other)
            continue
        finite = y_exact.isfinite()
        assert torch.equal(y.isfinite(), finite)
        middle = None if t is None else t[finite]
        terms, rounds = s.expand_as(y_exact)[finite], max(op.rounds, 1)
        assert_within(y[finite], y_exact[finite], terms, length, rounds, middle, op.intermediate_dtype)


def test_every_op_has_a_sample() -> None:
    assert set(SAMPLES) == set(NAMES)


@every_op
def test_every_position_is_taken(name: str) -> None:
    positions = declared()[name].contracts.items()
    assert [title.split()[0] for title, _ in positions] == [f"C{i}" for i in range(1, 15)]
    assert all(text.strip() for _, text in positions)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c1_zero_rows_give_zero_rows(name: str, dtype: torch.dtype) -> None:
    op = declared()[name]
    empty, full = sample(name, 0, dtype), sample(name, 3, dtype)
    for i, (got, like) in enumerate(zip(run(op, empty), run(op, full), strict=True)):
        assert got.dtype == like.dtype and got.dim() == like.dim()
        if (name, i) in ONE_FOR_ALL_ROWS:
            assert got.shape == like.shape and got.isfinite()
        elif not op.mutates or name == "fused_add_rms_norm_":
            assert [n for n, m in zip(got.shape, like.shape, strict=True) if n != m] == [0]


ONE_FOR_ALL_ROWS = {("per_tensor_quant_fp8", 1), ("moe_align_block_size", 2)}  # a scale, a count


def far_apart(x: Tensor) -> Tensor:
    """``x`` in storage where its last row lies 2³¹ elements after its first."""
    step, inner = -(-(2**31) // (x.shape[0] - 1)), x[0].numel()
    storage = torch.empty((x.shape[0] - 1) * step + inner, dtype=x.dtype)  # pages that are not touched cost nothing
    return storage.as_strided(x.shape, (step, *x[0].contiguous().stride())).copy_(x)


@every_op
def test_c2_offsets_past_31_bits(name: str) -> None:
    op, arguments = declared()[name], sample(name, 4, torch.bfloat16)
    expected = run(op, copied(arguments))
    spreadable = [k for k, x in arguments.items() if isinstance(x, Tensor) and x.dim() > 1]
    for key in set(spreadable) - {"x_scale"}:  # whose strides are its layout
        spread = {**copied(arguments), key: far_apart(arguments[key])}
        assert_same_op(op, arguments, run(op, spread), expected)
    assert spreadable


def widened(x: Tensor) -> Tensor:
    """``x`` as a slice of a wider tensor, every stride doubled and NaN in between (zero where there is no NaN)."""
    if x.dim() == 0 or x.dtype in (torch.int32, torch.int64) or x.numel() == 0:
        return x
    wide = torch.zeros([2 * n for n in x.shape], dtype=torch.float32)
    if x.is_floating_point() and x.element_size() > 1:
        wide.fill_(float("nan"))
    wide = wide.to(x.dtype)
    view = wide[tuple(slice(0, 2 * n, 2) for n in x.shape)]
    return view.copy_(x)


@every_op
def test_c3_any_strides(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    spread = {k: widened(v) if isinstance(v, Tensor) and k != "x_scale" else v for k, v in arguments.items()}
    expected = run(op, copied(arguments))
    assert_same_op(op, arguments, run(op, spread), expected)


@every_op
def test_c4_inputs_stay_and_results_are_new(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    before = copied(arguments)
    results = results_of(op(**arguments))
    for key, value in arguments.items():
        if isinstance(value, Tensor) and key not in op.mutates:
            assert same_bits(value, before[key]), key
    owners = {x.untyped_storage().data_ptr() for x in arguments.values() if isinstance(x, Tensor) and x.numel()}
    assert all(result.untyped_storage().data_ptr() not in owners for result in results if result.numel())
    for key in op.mutates:
        assert not same_bits(arguments[key], before[key]), f"{key} is declared as written, but was not"


def test_c5_c6_fp8_ops_say_so_and_the_others_need_not() -> None:
    default = hal.Contracts()
    for name, op in declared().items():
        speaks = (op.contracts.C5_fp8_kind, op.contracts.C6_fp8_cast) != (default.C5_fp8_kind, default.C6_fp8_cast)
        assert speaks == ("fp8" in name or name in MOVING), name


@every_op
def test_c7_ops_that_take_ids_say_what_a_bad_one_means(name: str) -> None:
    op = declared()[name]
    takes_ids = bool(set(op.signature.parameters) & {"slots", "topk_ids", "page_table"})
    if takes_ids:
        assert op.contracts.C7_sentinels != hal.Contracts().C7_sentinels
    for key in ("slots", "topk_ids"):
        if key in op.signature.parameters:
            arguments = sample(name)
            for bad in (-1, 2**30):
                run(op, {**arguments, key: torch.full_like(arguments[key], bad)})  # no read or write out of bounds


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that ops allocate starts as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@every_op
def test_c8_every_element_is_written(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    expected = run(op, copied(arguments))
    with poisoned_memory():
        got = run(op, arguments)
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c9_errors_stay_within_the_declared_bound(name: str, dtype: torch.dtype) -> None:
    op, arguments = declared()[name], sample(name, 5, dtype)
    results = run(op, copied(arguments))
    assert_same_op(op, arguments, results, results)
    assert op.terms is not None or name in WITHOUT_TERMS


# Copies are bitwise; codes and ids are compared where their family is tested.
WITHOUT_TERMS = {
    "moe_align_block_size", "ep_scatter", "ep_scatter_fp8",
    "concat_mla_k", "concat_mla_absorb_q", "mla_kv_store", "mla_kv_gather", "sample", "per_token_group_quant_fp8",
    "per_token_quant_fp8", "per_tensor_quant_fp8", "static_quant_fp8", "silu_and_mul_quant_fp8",
    "masked_silu_and_mul_quant_fp8", "rms_norm_quant_fp8", "fused_add_rms_norm_quant_fp8", "block_quant_fp8",
    "block_requant_ue8m0_fp8", "convert_kind_fp8",
    "mha_kv_store", "mla_kv_store_fp8", "apply_token_bitmask", "apply_token_bitmask_",
}  # fmt: skip


@every_op
def test_c10_equal_inputs_give_equal_bits(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    first, second = run(op, copied(arguments)), run(op, copied(arguments))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


class NoHostSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or shapes depend on data."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "unique",
        "_pin_memory",
        "bincount",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        assert not name.startswith(self.FORBIDDEN), f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]), "a mask as index"
        return func(*args, **(kwargs or {}))


@every_op
def test_c11_no_host_sync_and_shapes_known_ahead(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    with NoHostSync():
        results = results_of(op.reference(**copied(arguments)))
    fakes = results_of(op.run_fake(**arguments))
    assert [(r.shape, r.dtype) for r in results] == [(f.shape, f.dtype) for f in fakes]


def test_c12_exactly_the_named_ops_apply_a_scaling_factor() -> None:
    owners = {n for n, op in declared().items() if op.contracts.C12_scale_owner != hal.Contracts().C12_scale_owner}
    assert {"grouped_topk", "biased_grouped_topk", "moe_sum_reduce", "shared_expert_add"} <= owners
    for name in ("grouped_topk", "biased_grouped_topk", "moe_sum_reduce"):
        op, arguments = declared()[name], sample(name)
        once, twice = (op(**{**arguments, "scale": scale}) for scale in (1.0, 2.0))
        torch.testing.assert_close(tree_leaves(twice)[0], 2 * tree_leaves(once)[0])
    experts = sample("fused_experts")
    doubled = {**experts, "topk_weights": 2 * experts["topk_weights"]}
    torch.testing.assert_close(hal.ops.fused_experts(**doubled), 2 * hal.ops.fused_experts(**experts))


@every_op
def test_c13_ids_of_either_width_mean_the_same(name: str) -> None:
    op, arguments = declared()[name], sample(name)
    for key in set(arguments) & {"slots", "topk_ids", "positions"}:
        narrow, wide = ({**copied(arguments), key: arguments[key].to(t)} for t in (torch.int32, torch.int64))
        assert all(same_bits(a, b) for a, b in zip(run(op, narrow), run(op, wide), strict=True))
    results = results_of(op(**arguments))
    assert all(r.dtype == torch.int32 for r in results if not r.is_floating_point())


class Opaque:
    """A plugin that offers every op's reference as an opaque kernel."""

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        for name, op in list(declared().items()):
            yield hal.Kernel(name, "opaque", run=opaque(op), reads=frozenset({"*"}) if op.plan else None)


def opaque(op: Op[..., Any]) -> Any:
    """A new function with the reference's signature, which nothing can be traced through."""
    scope: dict[str, Any] = {"_reference": op.reference}
    names = ", ".join(op.signature.parameters)
    exec(f"def {op.name}({names}):\n    return _reference({names})", scope)
    scope[op.name].__defaults__ = op.reference.__defaults__
    return scope[op.name]


@pytest.fixture(scope="module")
def opaque_ops() -> Iterator[hal.OpSet]:
    hal.register(Opaque(), "opaque_test")
    yield hal.bind("cpu")
    hal.unregister("opaque_test")


@every_op
def test_c14_every_op_is_a_sound_torch_op(name: str, opaque_ops: hal.OpSet) -> None:
    op, arguments = declared()[name], sample(name)
    assert [a.split()[1] for a in op.schema.split("(", 1)[1].split(", ") if "!" in a.split()[0]] == list(op.mutates)
    target = getattr(torch.ops.torch_hal, f"{name}__opaque").default
    checks = ["test_faketensor", "test_schema"]
    if any(isinstance(x, Tensor) and x.element_size() == 1 for x in arguments.values()):
        checks.pop()  # torch's own comparison multiplies, which it cannot do in fp8; C4 above tests the same
    torch.library.opcheck(target, tuple(op.bind(**arguments).values()), test_utils=checks)
    assert getattr(opaque_ops, name).kernel.name == "opaque"


@every_op
def test_b21_every_bound_op_compiles_whole(name: str, opaque_ops: hal.OpSet) -> None:
    """Both kinds of kernel: traced through and opaque, with the graph naming the opaque one."""
    torch._dynamo.reset()
    op = declared()[name]
    for ops in (hal.bind("cpu", hal.Policy(require={"*": "native"})), opaque_ops):
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, example: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        arguments, again = sample(name), sample(name)
        eager = run(op, again)
        compiled = torch.compile(lambda values, ops=ops: getattr(ops, name)(**values), fullgraph=True, backend=keep)
        results = results_of(compiled(arguments)) + [arguments[key] for key in op.mutates]
        assert all(same_bits(a, b) for a, b in zip(results, eager, strict=True))
        assert len(graphs) == 1 and (f"{name}__opaque" in graphs[0].code) == (ops is opaque_ops)
