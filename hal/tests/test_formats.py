from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from fp8_codec import decode, encode
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, ceil_to_ue8m0, expand_block_scales, to_fp8

NAN, INF = float("nan"), float("inf")


def codes(values: list[float], kind: str, dtype: torch.dtype = torch.float32) -> list[int]:
    result: list[int] = to_fp8(torch.tensor(values, dtype=dtype), FP8_KINDS[kind]).view(torch.uint8).tolist()
    return result


@pytest.mark.parametrize("kind", FP8_KINDS.values(), ids=FP8_KINDS)
def test_kinds_state_what_torch_states(kind: Any) -> None:
    info = torch.finfo(kind.dtype)
    assert (kind.finfo_max, kind.min_subnormal) == (info.max, info.smallest_normal / 8)
    assert kind.quant_max == decode(0x7E, kind.name)
    assert kind.negative_zero == (decode(0x80, kind.name) == 0)


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_codec_of_these_tests_agrees_with_torch(kind: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8_KINDS[kind].dtype).double().tolist()
    mine = [decode(code, kind) for code in range(256)]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, mine, strict=True))


def test_fn_is_twice_fnuz_but_for_three_codes() -> None:
    differing = {c for c in range(256) if decode(c, "e4m3fn") != 2 * decode(c, "e4m3fnuz")}
    assert differing == {0x7F, 0x80, 0xFF}


def test_cast_vectors_fn() -> None:
    vectors = {448: 0x7E, 464: 0x7E, 480: 0x7E, 1000: 0x7E, INF: 0x7E, -INF: 0xFE, NAN: 0x7F}
    vectors |= {-1e-9: 0x80, 2.0**-9: 0x01, 2.0**-10: 0x00, 1.0: 0x38, 0.0: 0x00}
    assert codes(list(vectors), "e4m3fn") == list(vectors.values())
    assert codes([-0.0], "e4m3fn") == [0x80]


def test_cast_vectors_fnuz() -> None:
    """Clamped at 224, where a bare cast gives NaN from 248 on; no −0, whose byte is NaN."""
    vectors = {224: 0x7E, 240: 0x7E, 247: 0x7E, 248: 0x7E, INF: 0x7E, -1000: 0xFE, NAN: 0x80}
    vectors |= {-1e-9: 0x00, -(2.0**-11): 0x00, -(2.0**-10): 0x81, 2.0**-10: 0x01, 2.0**-11: 0x00}
    assert codes(list(vectors), "e4m3fnuz") == list(vectors.values())
    assert codes([-0.0], "e4m3fnuz") == [0x00]


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cast_rounds_to_nearest_even(kind: str, dtype: torch.dtype) -> None:
    """At every code, at every midpoint, and just beside."""
    points = [decode(code, kind) for code in range(0x7F)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(points)]
    beside = [m * factor for m in middles for factor in (1 - 2**-8, 1 + 2**-7)]
    values = torch.tensor([*points, *middles, *beside], dtype=dtype).double().tolist()
    values += [-v for v in values]
    assert codes(values, kind, dtype) == [encode(v, kind) for v in values]


# Scale layouts.


def scales(*shape: int) -> torch.Tensor:
    """Distinct in every element."""
    return 1 + torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) / 1024


def powers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2.0 ** torch.randint(-126, 128, shape, generator=generator).to(torch.float32)


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(5, 9), (8, 4), (1, 3), (3, 1), (1, 1), (0, 3), (3, 0), (3, 5, 9), (2, 0, 3), (0, 5, 9), (2, 3, 5, 9)]
)
def test_pack_and_unpack(name: str, shape: tuple[int, ...]) -> None:
    layout = SCALE_LAYOUTS[name]
    logical = powers(*shape) if layout.power_of_two else scales(*shape)
    stored = layout.pack(logical)
    assert stored.dtype == layout.dtype
    assert stored.shape == (*shape[:-1], layout.columns(shape[-1]))
    assert layout.matches(stored)
    assert torch.equal(layout.unpack(stored, shape[-1]), logical)


def storage_order(name: str, logical: torch.Tensor) -> list[float]:
    """A matrix's stored numbers one after the other, as the formats' descriptions say, zero where there is padding."""
    rows, groups = logical.shape
    if name == "row_f32":
        return [logical[m, g].item() for m in range(rows) for g in range(groups)]
    if name == "mn_f32":
        return [logical[m, g].item() for g in range(groups) for m in range(rows)]
    padded = -(-rows // 4) * 4
    if name == "mn_f32_tma":
        return [logical[m, g].item() if m < rows else 0.0 for g in range(groups) for m in range(padded)]
    assert name == "mn_ue8m0"  # bytes, the lowest of a word first
    words = [(w, m) for w in range(-(-groups // 4)) for m in range(padded)]
    return [
        127 + math.log2(logical[m, g].item()) if m < rows and g < groups else 0
        for w, m in words
        for g in range(4 * w, 4 * w + 4)
    ]


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_storage_of_each_expert(name: str) -> None:
    """Byte for byte, distinct scales, three words along K; every expert's padding its own."""
    layout = SCALE_LAYOUTS[name]
    logical = 2.0 ** torch.arange(-65, 70, dtype=torch.float32).reshape(3, 5, 9)
    stored = layout.pack(logical)
    dtype = torch.uint8 if layout.power_of_two else torch.float32
    size = stored[0].untyped_storage().nbytes() // 3 // dtype.itemsize
    whole = torch.empty(0, dtype=dtype).set_(stored.untyped_storage()).reshape(3, size)
    assert whole.tolist() == [storage_order(name, expert) for expert in logical]
    assert all(torch.equal(layout.pack(logical[e]), stored[e]) for e in range(3))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SCALE_LAYOUTS, 2)))
def test_every_layout_converts_to_every_other(source: str, target: str) -> None:
    logical = powers(2, 6, 10)
    stored = SCALE_LAYOUTS[target].pack(SCALE_LAYOUTS[source].unpack(SCALE_LAYOUTS[source].pack(logical), 10))
    assert SCALE_LAYOUTS[target].matches(stored)
    assert torch.equal(stored, SCALE_LAYOUTS[target].pack(logical))


def test_weights_scales_in_the_layout_of_activations() -> None:
    """576 rows, the last block of which is a half, and nine groups along K: three words."""
    blocks = 2.0 ** torch.arange(45, dtype=torch.float32).reshape(5, 9)
    rows = expand_block_scales(blocks, 576)
    assert rows.shape == (576, 9)
    assert all(torch.equal(rows[n], blocks[n // 128]) for n in range(576))
    stored = SCALE_LAYOUTS["mn_ue8m0"].pack(rows)
    assert stored.shape == (576, 3) and torch.equal(SCALE_LAYOUTS["mn_ue8m0"].unpack(stored, 9), rows)
    experts = torch.stack([blocks, blocks.flip(0)])
    assert torch.equal(expand_block_scales(experts, 576)[1], expand_block_scales(blocks.flip(0), 576))


@pytest.mark.parametrize("scale", [1.5, 0.9999999, 3e-39, -2.0, INF, NAN])
def test_ue8m0_never_cuts_a_mantissa_off(scale: float) -> None:
    """What is no power of two cannot be stored, and reads as NaN instead of as a scale up to half as large."""
    layout = SCALE_LAYOUTS["mn_ue8m0"]
    restored = layout.unpack(layout.pack(torch.tensor([[1.0, scale, 2.0, 4.0, scale]])), 5)[0]
    assert restored[[1, 4]].isnan().all() and restored[[0, 2, 3]].tolist() == [1.0, 2.0, 4.0]


def test_ue8m0_of_zero_is_zero() -> None:
    layout = SCALE_LAYOUTS["mn_ue8m0"]
    assert layout.pack(torch.zeros(1, 4)).tolist() == [[0]]
    assert layout.unpack(torch.zeros(1, 1, dtype=torch.int32), 4).tolist() == [[0.0] * 4]


def test_row_layout_is_contiguous() -> None:
    assert SCALE_LAYOUTS["row_f32"].pack(scales(9, 5).T).stride() == (9, 1)


@pytest.mark.parametrize("name", ["mn_f32_tma", "mn_ue8m0"])
def test_column_major_storage_pads_rows_to_four_with_zeros(name: str) -> None:
    layout = SCALE_LAYOUTS[name]
    stored = layout.pack(powers(2, 5, 9))
    columns = layout.columns(9)
    assert stored.stride() == (columns * 8, 1, 8)
    whole = stored.as_strided((2, columns, 8), (columns * 8, 8, 1))
    assert torch.equal(whole[..., 5:], torch.zeros(2, columns, 3, dtype=layout.dtype))


def test_ue8m0_words_hold_four_exponents_lowest_byte_first() -> None:
    logical = 2.0 ** torch.tensor([[0.0, 1.0, -1.0, 127.0, -126.0]])
    words = SCALE_LAYOUTS["mn_ue8m0"].pack(logical)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0xFE7E807F, 0x00000001]


def test_matches_refuses_the_other_majorness() -> None:
    rows, columns = scales(8, 8), SCALE_LAYOUTS["mn_f32_tma"].pack(scales(8, 8))
    assert not SCALE_LAYOUTS["mn_f32_tma"].matches(rows)
    assert not SCALE_LAYOUTS["row_f32"].matches(columns)
    assert not SCALE_LAYOUTS["mn_f32_tma"].matches(scales(8, 5).T)  # column-major, 5 rows not padded to 8
    assert not SCALE_LAYOUTS["mn_f32_tma"].matches(scales(1, 2))  # one row: columns must still lie 4 apart
    assert SCALE_LAYOUTS["row_f32"].matches(scales(8, 16)[:, :8])
    assert not SCALE_LAYOUTS["mn_f32"].matches(scales(8, 5))
    assert not SCALE_LAYOUTS["mn_f32"].matches(SCALE_LAYOUTS["mn_f32_tma"].pack(scales(5, 8)))
    assert SCALE_LAYOUTS["mn_f32"].matches(scales(8, 5).T)


@pytest.mark.parametrize("name", ["mn_f32_tma", "mn_ue8m0"])
def test_matches_knows_where_an_experts_scales_begin(name: str) -> None:
    layout = SCALE_LAYOUTS[name]
    stored = layout.pack(powers(4, 6, 9))
    assert layout.matches(stored) and layout.matches(stored[:2]) and layout.matches(stored[1])
    assert not layout.matches(stored[::2])  # every other expert: a gap between two
    assert not layout.matches(stored[:, :3])  # three rows of columns that are padded for six
    assert not layout.matches(layout.pack(powers(24, 9)).reshape(4, 6, 9 if name == "mn_f32_tma" else 3))


def test_ceil_to_ue8m0_around_every_power() -> None:
    exact = [2.0**e for e in range(-126, 128)]
    tensor = torch.tensor(exact, dtype=torch.float32)
    above = torch.nextafter(tensor[:-1], torch.tensor(INF))
    below = torch.nextafter(tensor[1:], torch.tensor(0.0))
    assert ceil_to_ue8m0(tensor).tolist() == exact
    assert ceil_to_ue8m0(above).tolist() == exact[1:]
    assert ceil_to_ue8m0(below).tolist() == exact[1:]
    assert ceil_to_ue8m0(torch.tensor([2.0**-140, 3e38])).tolist() == [2.0**-126, 2.0**127]  # the ends of its range


def test_layouts_trace() -> None:
    logical = powers(5, 9)

    def round_trip(x: torch.Tensor) -> list[torch.Tensor]:
        packed = [layout.pack(ceil_to_ue8m0(x)) for layout in SCALE_LAYOUTS.values()]
        return [*packed, SCALE_LAYOUTS["mn_ue8m0"].unpack(packed[-1], 9), expand_block_scales(x, 600)]

    eager = round_trip(logical)
    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(logical)
    with FakeTensorMode() as mode:
        fakes = round_trip(mode.from_tensor(logical))
    for a, b, fake in zip(eager, compiled, fakes, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() == fake.stride() and fake.dtype == a.dtype
