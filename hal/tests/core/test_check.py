"""Argument checks: the fast test and the worded complaint agree on every call, and the wording says what is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_hal as hal
from torch_hal.check import INDEX, Checker, TensorSpec, ceil_div

FLOATS = (torch.float32, torch.bfloat16)
BLOCK = 4


def checker() -> Checker:
    """A contract with every kind of rule: leading dims, products, blocks, an optional tensor, another's dtype."""
    specs = [
        TensorSpec("x", ("...", "D"), FLOATS, optional=False),
        TensorSpec("w", ("E", "2*I", "D"), ("x",), optional=False),
        TensorSpec("scale", ("ceil_div(E, BLOCK)", "I"), (torch.float32,), optional=False),
        TensorSpec("ids", ("_", "top_k"), INDEX, optional=False),
        TensorSpec("bias", ("E",), ("x",), optional=True),
    ]
    rules = {"1 <= top_k <= E": "top_k is at most E", "x.shape[0] == ids.shape[0]": "one row of ids a token"}
    return Checker("acme", specs, rules, ("x", "w", "scale", "ids", "top_k", "bias"), {"BLOCK": BLOCK})


def valid() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 8),
        "w": torch.ones(5, 6, 8),
        "scale": torch.ones(2, 3),
        "ids": torch.zeros(3, 2, dtype=torch.int64),
        "top_k": 2,
        "bias": None,
    }


def tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.choice([1, 2, 3, 5, 6, 8]) for _ in range(draw.randint(0, 4))]
    return torch.zeros(shape, dtype=draw.choice([*FLOATS, *INDEX, torch.float16]))


def broken(draw: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with one or two changed: another shape, dtype, type, or none."""
    changed = dict(arguments)
    for _ in range(draw.randint(1, 2)):
        name = draw.choice(list(arguments))
        number = draw.choice([0, 1, 2, 5, 6, -1, 2.5, "2", None])
        changed[name] = number if name == "top_k" else draw.choice([tensor(draw), None, "text", 3, [1, 2]])
    return changed


def reference_verdict(a: dict[str, Any]) -> bool:
    """The same contract, written out."""
    try:
        x, w, scale, ids, top_k, bias = a.values()
        tensors = [x, w, scale, ids] + ([] if bias is None else [bias])
        return (
            all(isinstance(t, torch.Tensor) for t in tensors)
            and x.dim() >= 1 and x.dtype in FLOATS
            and w.dim() == 3 and w.dtype == x.dtype and w.shape[2] == x.shape[-1]
            and scale.dim() == 2 and scale.dtype == torch.float32 and scale.shape[0] == -(-w.shape[0] // BLOCK)
            and w.shape[1] == 2 * scale.shape[1]
            and ids.dim() == 2 and ids.dtype in INDEX and ids.shape[1] == top_k
            and (bias is None or (bias.dim() == 1 and bias.dtype == x.dtype and bias.shape[0] == w.shape[0]))
            and 1 <= top_k <= w.shape[0]
            and x.shape[0] == ids.shape[0]
        )  # fmt: skip
    except TypeError:  # numbers of another type
        return False


def test_the_fast_test_the_complaint_and_the_contract_agree() -> None:
    contract = checker()
    check = contract.function()
    fast = eval(f"lambda x, w, scale, ids, top_k, bias: {contract.condition(None)}", contract.namespace)
    check(*valid().values())
    draw, refused = random.Random(0), 0
    for _ in range(600):
        arguments = broken(draw, valid())
        try:
            fine = bool(fast(*arguments.values()))
        except Exception:
            fine = False
        assert fine == reference_verdict(arguments), {k: getattr(v, "shape", v) for k, v in arguments.items()}
        if fine:
            check(*arguments.values())
        else:
            refused += 1
            with pytest.raises(hal.ArgumentError, match=r"^acme: argument '[\w, ]+': expected .*, got .*; "):
                check(*arguments.values())
            with pytest.raises(hal.ArgumentError):
                contract.complain(arguments, None)
    assert 200 < refused < 600


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": 3}, r"argument 'x': expected a tensor \[..., D\], got int; pass a torch.Tensor"),
        ({"x": torch.ones(())}, r"argument 'x': expected rank 1 \[..., D\], got shape \(\)"),
        ({"w": torch.ones(5, 8)}, r"argument 'w': expected rank 3 \[E, 2\*I, D\], got shape \(5, 8\)"),
        (
            {"w": torch.ones(5, 6, 7)},
            r"argument 'w': expected \[E, 2\*I, D\] with D = 8 \(.*E=5.*\), got shape \(5, 6, 7\)",
        ),
        ({"w": torch.ones(5, 6, 8).bfloat16()}, "argument 'w': expected torch.float32, got torch.bfloat16"),
        ({"w": torch.ones(5, 5, 8)}, r"argument 'w': expected .* with 2\*I = 6 .*, got shape \(5, 5, 8\)"),
        (
            {"scale": torch.ones(3, 3)},
            r"argument 'scale': expected .* with ceil_div\(E, BLOCK\) = 2 .*, got shape \(3, 3\)",
        ),
        ({"ids": torch.zeros(3, 1).long()}, r"argument 'ids': expected \[_, top_k\] with top_k = 2"),
        ({"bias": torch.ones(4)}, r"argument 'bias': expected \[E\] with E = 5 .*, got shape \(4,\)"),
        ({"bias": "none"}, r"argument 'bias': expected a tensor \[E\], got str"),
        (
            {"top_k": 6, "ids": torch.zeros(3, 6).long()},
            r"argument 'top_k': expected top_k is at most E \(1 <= top_k <= E\), got E=5, top_k=6",
        ),
        ({"x": torch.ones(2, 8)}, r"argument 'ids, x': expected one row of ids a token"),
    ],
)
def test_a_complaint_names_the_argument_what_was_expected_and_what_came(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(hal.ArgumentError, match=f"^acme: {message}"):
        checker().function()(*{**valid(), **changed}.values())


def test_a_dim_that_nothing_but_an_optional_tensor_tells_is_not_bound() -> None:
    specs = [TensorSpec("x", ("T",), (), optional=False), TensorSpec("mask", ("T",), (), optional=True)]
    check = Checker("acme", specs, {}, ("x", "mask"), {}).function()
    check(torch.ones(3), None)
    check(torch.ones(3), torch.ones(3))
    with pytest.raises(hal.ArgumentError, match="argument 'mask'"):
        check(torch.ones(3), torch.ones(2))


def test_a_declaration_with_a_dim_that_nothing_tells_is_an_error() -> None:
    specs = [TensorSpec("x", ("T", "2*I"), (), optional=False)]
    with pytest.raises(hal.HalError, match="op 'acme': I is no dimension, argument or name"):
        Checker("acme", specs, {}, ("x",), {})
    with pytest.raises(hal.HalError, match="op 'acme': rows is no dimension"):
        Checker("acme", [], {"rows > 0": "there are rows"}, ("x",), {})


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 128, 0), (1, 128, 1), (128, 128, 1), (129, 128, 2)])
def test_ceil_div(a: int, b: int, expected: int) -> None:
    assert ceil_div(a, b) == expected


def test_an_op_called_by_itself_checks_as_a_bound_one_does() -> None:
    cache, slots = torch.zeros(2, 4, 12), torch.zeros(3, dtype=torch.int32)
    wrong = (cache, slots, torch.zeros(8), torch.zeros(3, 4))  # c_kv lacks a dim that an earlier rule reads
    for call in (hal.ops.mla_kv_store, hal.bind("cpu").mla_kv_store):
        with pytest.raises(hal.ArgumentError, match="mla_kv_store: argument 'c_kv': expected rank 2"):
            call(*wrong)
    logits = torch.zeros(2, 8)
    for call in (hal.ops.topk_softmax, hal.bind("cpu").topk_softmax):
        for top_k in (0, 9, "2", None):
            with pytest.raises(hal.ArgumentError, match="topk_softmax: argument 'top_k'"):
                call(logits, top_k, True)
