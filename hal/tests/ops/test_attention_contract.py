"""What the attention ops declare: schemas, fakes, whole graphs, error terms, work, and errors for wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formula import L, R, normal, offsets, pack, paged
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops.attention import concat_mla_absorb_q, concat_mla_k, merge_state, mha_varlen, mla_decode

# For each op: schema, call, results' shapes and dtypes.
DECODE = paged([7, 0, 3], 2, torch.bfloat16)
MHA = {**pack([3, 0, 4], [3, 2, 6], torch.bfloat16), "causal": True}
MERGE = {"out_a": normal(3, 2, 8), "lse_a": normal(3, 2), "out_b": normal(3, 2, 8), "lse_b": normal(3, 2)}
OPS = [
    (
        mha_varlen,
        "(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, float scale, bool causal)"
        " -> (Tensor, Tensor)",
        MHA,
        [((7, 2, 16), torch.bfloat16), ((7, 2), torch.float32)],
    ),
    (
        mla_decode,
        "(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor page_table, Tensor seq_lens, float scale, "
        'Tensor? plan=None, str layout="plain") -> (Tensor, Tensor)',
        DECODE,
        [((3, 2, 2, L), torch.bfloat16), ((3, 2, 2), torch.float32)],
    ),
    (
        merge_state,
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
        MERGE,
        [((3, 2, 8), torch.float32), ((3, 2), torch.float32)],
    ),
    (
        concat_mla_k,
        "(Tensor k_nope, Tensor k_pe) -> Tensor",
        {"k_nope": normal(3, 2, 8), "k_pe": normal(3, 1, 4)},
        [((3, 2, 12), torch.float32)],
    ),
    (
        concat_mla_absorb_q,
        "(Tensor q_nope, Tensor q_pe) -> Tensor",
        {"q_nope": normal(5, 3, 2, 8), "q_pe": normal(5, 3, 2, 4)},
        [((5, 3, 2, 12), torch.float32)],
    ),
]


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@pytest.mark.parametrize(("op", "schema", "call", "want"), OPS, ids=[op.name for op, *_ in OPS])
def test_schema_fakes_and_whole_graph(op: Any, schema: str, call: dict[str, Any], want: list[Any]) -> None:
    assert op.schema.replace("'", '"') == schema
    eager = as_list(op(**call))
    assert [(x.shape, x.dtype) for x in eager] == want
    with FakeTensorMode() as mode:
        faked = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}
        assert [(x.shape, x.dtype) for x in as_list(op(**faked))] == want
    assert [(x.shape, x.dtype, x.stride()) for x in as_list(op.run_fake(**call))] == [
        (x.shape, x.dtype, x.stride()) for x in eager
    ]
    compiled = torch.compile(op.reference, fullgraph=True, backend="eager")
    assert all(torch.equal(x, y) for x, y in zip(as_list(compiled(**call)), eager, strict=True))
    before = {k: v.clone() for k, v in call.items() if isinstance(v, Tensor)}
    op(**call)
    assert all(torch.equal(call[k].nan_to_num(), v.nan_to_num()) for k, v in before.items())


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_terms_bound_the_error_of_float32(offset: float) -> None:
    """Also where keys have a mean far from zero, and scores lose the digits that a softmax then amplifies."""
    mha = {**pack([6, 0, 2], [6, 2, 1]), "causal": True}
    mha["k"] = mha["k"] + offset
    decode = paged([6, 0], 2, torch.float32)
    decode["cache"].add_(offset)
    merge = {**MERGE, "lse_a": MERGE["lse_a"] + offset}
    for op, call in ((mha_varlen, mha), (mla_decode, decode), (merge_state, merge)):
        exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
        assert op.terms is not None
        reduces = op.measure(**call)["reduces"]
        for got, want, terms in zip(op(**call), op(**exact), op.terms(**exact), strict=True):
            assert terms.shape == want.shape and bool(terms.isfinite().all())
            assert bool((terms[want.isfinite()] * (1 + 1e-9) >= want[want.isfinite()].abs()).all())
            error = (got.double() - want).masked_fill(want.isinf(), 0).abs()
            assert bool((error <= 2**-24 * (want.abs().masked_fill(want.isinf(), 0) + 4 * reduces**0.5 * terms)).all())


def test_measures() -> None:
    measured = mla_decode.measure(**DECODE)
    keys = DECODE["page_table"].shape[1] * 4
    assert measured["flops"] == 2 * 3 * 2 * 2 * keys * (2 * L + R)
    assert measured["reduces"] == L + R
    assert mha_varlen.measure(**MHA)["flops"] == 2 * 7 * 6 * 2 * (24 + 16)
    assert mha_varlen.measure(**MHA)["reduces"] == 24


@pytest.mark.parametrize(
    ("op", "call", "change", "words"),
    [
        (mha_varlen, MHA, {"k": normal(11, 2, 20, dtype=torch.bfloat16)}, ["'k'", "Dk = 24", "(11, 2, 20)"]),
        (mha_varlen, MHA, {"v": normal(12, 2, 16, dtype=torch.bfloat16)}, ["'v'", "Tk = 11", "(12, 2, 16)"]),
        (mha_varlen, MHA, {"k": normal(11, 1, 24, dtype=torch.bfloat16)}, ["'k'", "H = 2", "(11, 1, 24)"]),
        (mha_varlen, MHA, {"v": normal(11, 2, 16)}, ["'v'", "torch.bfloat16", "torch.float32"]),
        (mha_varlen, MHA, {"cu_k": offsets([11])}, ["'cu_k'", "offsets = 4", "(2,)"]),
        (mha_varlen, MHA, {"cu_q": offsets([3, 0, 4]).long()}, ["'cu_q'", "torch.int32", "torch.int64"]),
        (mha_varlen, MHA, {"max_k": -1}, ["'max_k'", "max_k >= 0", "max_k=-1"]),
        (mha_varlen, MHA, {"q": normal(7, 48, dtype=torch.bfloat16)}, ["'q'", "rank 3", "(7, 48)"]),
        (mla_decode, DECODE, {"cache": DECODE["cache"][..., :L]}, ["'cache'", "= 576", "512)"]),
        (mla_decode, DECODE, {"cache": DECODE["cache"].flatten(0, 1)}, ["'cache'", "rank 3", "576)"]),
        (mla_decode, DECODE, {"cache": DECODE["cache"].float()}, ["'cache'", "torch.bfloat16", "torch.float32"]),
        (mla_decode, DECODE, {"page_table": DECODE["page_table"][:2]}, ["'page_table'", "B = 3", "(2, 3)"]),
        (mla_decode, DECODE, {"page_table": DECODE["page_table"].long()}, ["'page_table'", "int32", "int64"]),
        (mla_decode, DECODE, {"seq_lens": DECODE["seq_lens"][:1]}, ["'seq_lens'", "B = 3", "(1,)"]),
        (mla_decode, DECODE, {"q_pe": DECODE["q_pe"][:, :1]}, ["'q_pe'", "s = 2", "(3, 1, 2, 64)"]),
        (mla_decode, DECODE, {"plan": torch.zeros(2)}, ["'plan'", "torch.int32", "torch.float32"]),
        (mla_decode, DECODE, {"plan": torch.zeros(2, 1, dtype=torch.int32)}, ["'plan'", "rank 1", "(2, 1)"]),
        (merge_state, MERGE, {"lse_b": normal(2, 3)}, ["'lse_b'", "T = 3", "(2, 3)"]),
        (merge_state, MERGE, {"lse_a": normal(3, 2).half()}, ["'lse_a'", "torch.float32", "torch.float16"]),
        (merge_state, MERGE, {"out_b": normal(3, 2, 8).half()}, ["'out_b'", "torch.float32", "torch.float16"]),
        (concat_mla_k, OPS[3][2], {"k_pe": normal(3, 2, 4)}, ["'k_pe'", "with 1 = 1", "(3, 2, 4)"]),
        (concat_mla_absorb_q, OPS[4][2], {"q_pe": normal(5, 2, 2, 4)}, ["q_nope, q_pe", "same tokens", "(5, 2, 2, 4)"]),
    ],
)
def test_errors_name_argument_expected_and_got(
    op: Any, call: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ArgumentError) as error:
        op(**{**call, **change})
    assert all(word in str(error.value) for word in [op.name, "expected", "got", *words]), str(error.value)
