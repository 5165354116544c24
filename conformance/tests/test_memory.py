from __future__ import annotations

import pytest
import torch

from torch_hal_conformance.memory import BAD_INDEX, place, poison, same_bits
from torch_hal_conformance.spec import LAYOUTS

HOST = torch.device("cpu")


@pytest.mark.parametrize("layout", ("contiguous", *LAYOUTS, "far"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_arguments_keep_their_values_in_any_layout(layout: str, dtype: torch.dtype) -> None:
    x = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    values, placed = place({"x": x, "n": 3, "none": None}, layout, (), HOST)
    assert same_bits(values["x"], x) and values["n"] == 3 and values["none"] is None
    assert not any(p.changed(written) for p in placed.values() for written in (True, False))


def test_layouts_are_what_they_are_called() -> None:
    x = torch.zeros(3, 8)
    strides = {layout: place({"x": x}, layout, (), HOST)[0]["x"].stride() for layout in ("contiguous", *LAYOUTS)}
    assert strides == {"contiguous": (8, 1), "rows": (16, 1), "columns": (32, 2), "wide": (72, 1), "offset": (8, 1)}
    cube = {layout: place({"x": torch.zeros(2, 3, 8)}, layout, (), HOST)[0]["x"].stride() for layout in LAYOUTS}
    assert cube == {"rows": (96, 16, 1), "columns": (192, 32, 2), "wide": (216, 72, 1), "offset": (24, 8, 1)}
    aligned, off = (place({"x": x}, layout, (), HOST)[0]["x"].storage_offset() for layout in ("contiguous", "offset"))
    assert aligned % 64 == 0 and off % 64 == 1


def test_strides_that_say_something_stay() -> None:
    scales = torch.zeros(4, 3).t()
    values, _ = place({"scales": scales, "x": scales}, "columns", ("scales",), HOST)
    assert values["scales"].stride() == (1, 3) and values["x"].stride() != (1, 3)


def test_far_rows_lie_beyond_31_bits() -> None:
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    far = place({"x": x}, "far", (), HOST)[0]["x"]
    assert (far.shape[0] - 1) * far.stride(0) >= 2**31


@pytest.mark.parametrize("layout", ("contiguous", *LAYOUTS))
def test_a_write_beside_an_argument_is_seen_and_one_into_it_only_if_it_may_not_be(layout: str) -> None:
    for offset in (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 64):
        values, placed = place({"x": torch.ones(2, 4)}, layout, (), HOST)
        flat = placed["x"].storage
        at = values["x"].storage_offset() + offset
        inside = {
            values["x"].storage_offset() + i * values["x"].stride(0) + j * values["x"].stride(1)
            for i in range(2)
            for j in range(4)
        }
        flat[at] = 5.0
        assert placed["x"].changed(written=False)
        assert placed["x"].changed(written=True) == (at not in inside)


def test_poison_is_nothing_that_an_op_may_use() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2):
        poison(x := torch.zeros(3, dtype=dtype))
        assert x.float().isnan().all()
    poison(ids := torch.zeros(3, dtype=torch.int32))
    assert (ids == BAD_INDEX).all()
