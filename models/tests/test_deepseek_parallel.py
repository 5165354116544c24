"""One model over several processes says what one process says: tensor parallel, expert parallel, and both.

Four processes over gloo run every case once, two by two where a case needs but two; the tests look at the results.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepseek_cases import BLOCKS, FP8, relative_error, small, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hal as hal
import torch_hal_deepseek as deepseek
import torch_hal_deepseek.checkpoint
from torch_hal_deepseek.parallel import Group, Span, share

SIZE = 4
LENGTH, NEW, SPEECH = 20, 8, 40
OWN = [[5, 9], [3]]  # lengths of the prompts that ranks of an expert group bring where each has its own
STEPS = [4, 6]  # and how often each decodes

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "V3": small("V3"),
    "V2-Lite": small("V2-Lite"),  # without a query latent, with two shared experts
    "tied": small("V3", tie_word_embeddings=True),
    "fp8": small("V3", **BLOCKS, quantization_config=FP8),
    "fp8 V2-Lite": small("V2-Lite", **{**BLOCKS, "q_lora_rank": None}, quantization_config=FP8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of ``tp`` × ``ep`` ranks. With ``one_group``, the same two ranks are both groups."""

    checkpoint: str
    tp: int = 1
    ep: int = 1
    experts: tuple[int, ...] | None = None
    own_tokens: bool = False
    one_group: bool = False
    on: int = 0  # which two ranks, where two are enough
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "TP2": Case("V3", tp=2, options={"mtp": True}),
    "EP2": Case("V3", ep=2, on=2, options={"mtp": True}),
    "TP2, V2-Lite": Case("V2-Lite", tp=2),
    "EP2, uneven": Case("V3", ep=2, experts=(5, 3), on=2),
    "TP2, tied": Case("tied", tp=2),
    "EP2, an empty rank": Case("V3", ep=2, experts=(8, 0), on=2),
    "TP2, fused shared expert": Case("V3", tp=2, options={"fuse_shared_expert": True}),
    "EP2, the first rank empty": Case("V2-Lite", ep=2, experts=(0, 8), on=2),
    "TP2, fp8": Case("fp8", tp=2, options={"mtp": True}),
    "EP2, fp8, an empty rank": Case("fp8", ep=2, experts=(0, 8), on=2),
    "TP2, fp8 dequantised": Case("fp8", tp=2, options={"dequantize": True}),
    "EP2 in TP2": Case("V3", tp=2, ep=2, one_group=True, on=2),
    "TP2, fp8 V2-Lite": Case("fp8 V2-Lite", tp=2),
    "EP2 in TP2, fp8, uneven": Case("fp8", tp=2, ep=2, experts=(3, 5), one_group=True, on=2),
    "EP2, own tokens": Case("V3", ep=2, experts=(6, 2), own_tokens=True),
    "EP2, own tokens, an empty rank": Case("V3", ep=2, experts=(8, 0), own_tokens=True, on=2),
    "TP2×EP2, packed": Case("packed", tp=2, ep=2, experts=(1, 7)),
    "TP2×EP2": Case("V3", tp=2, ep=2, experts=(5, 3), options={"mtp": True}),
    "TP2×EP2, fp8": Case("fp8", tp=2, ep=2),
    "TP2×EP2, own tokens": Case("V3", tp=2, ep=2, own_tokens=True),
}

# The trained model. In float32: where activations are bfloat16, so is each rank's term of a sum, and two letters of
# nearly the same probability may change places, as they do with any other change of rounding.
TRAINED = Path(__file__).parents[1] / "austen"
WIDE = {"dtype": torch.float32}
PROMPT = list(b"It is a truth universally acknowledged")
SPOKEN = {
    "bf16, TP2": Case("bf16", tp=2, options=WIDE),
    "fp8, EP2": Case("fp8", ep=2, experts=(7, 1), on=2, options=WIDE),
    "bf16, EP2": Case("bf16", ep=2, experts=(0, 8), options=WIDE),
    "fp8, TP2, dequantised": Case("fp8", tp=2, on=2, options={**WIDE, "dequantize": True}),
    "bf16, TP2×EP2": Case("bf16", tp=2, ep=2, options=WIDE),
}


def ranks_of(case: Case) -> list[int]:
    return list(range(SIZE)) if case.tp * case.ep == SIZE and not case.one_group else [case.on, case.on + 1]


def groups_of(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """The tensor and the expert groups of a case, by ranks."""
    ranks = ranks_of(case)
    if len(ranks) == SIZE:
        return [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    return [ranks] if case.tp > 1 else [], [ranks] if case.ep > 1 else []


def run(model: deepseek.DeepSeek) -> dict[str, Any]:
    ids = token_ids(LENGTH)
    cache, sequences = model.new_cache(1, LENGTH), [deepseek.Sequence() for _ in ids]
    result: dict[str, Any] = {
        "logits": model.logits(ids),
        "first": model.prefill(list(ids[:, None]), sequences, cache),  # of sequences of one token each
        "text": list(model.generate(ids[:9], NEW)),
        "sampled": list(model.generate(ids[:5], NEW, temperature=1.0, top_p=0.9, seed=3)),
        "report": model.report,
    }
    if model.mtp is not None:
        result["acceptance"] = deepseek.draft_acceptance(model, ids)
    return result


def run_with_own_tokens(model: deepseek.DeepSeek, rank: int, lockstep: bool = True) -> dict[str, Any]:
    """Greedy text of this rank's prompts; in lockstep, steps go on, without tokens, while another rank has some.

    And what it continues one of them with, where ranks agree in each step on what is to travel.
    """
    prompts = [token_ids(n, seed=n) for n in OWN[rank]]
    cache, sequences = model.new_cache(20, len(prompts)), [deepseek.Sequence() for _ in prompts]
    capacity = max(map(sum, OWN)) if lockstep else None
    ids = model.prefill(prompts, sequences, cache, capacity).argmax(-1)
    text = [ids]
    for _ in range(STEPS[rank]):
        ids = model.decode(ids[:, None], sequences, cache, 2 if lockstep else None)[:, 0].argmax(-1)
        text.append(ids)
    for _ in range(max(STEPS) - STEPS[rank] if lockstep else 0):
        model.decode(torch.empty(0, 1, dtype=torch.int64), [], cache, 2)
    return {"text": torch.stack(text, 1).tolist(), "continued": list(model.generate(prompts[0], STEPS[rank]))}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    names = {}
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
        group = dist.new_group(ranks)
        names[tuple(ranks)] = group.group_name if rank in ranks else ""
    results: dict[str, Any] = {}
    for name, case in {**CASES, **SPOKEN}.items():
        if rank not in ranks_of(case):
            continue
        tp, ep = (next((g for g in groups if rank in g), None) for groups in groups_of(case))
        parallel = deepseek.Parallel(
            tp_group=names[tuple(tp)] if tp else None,
            ep_group=names[tuple(ep)] if ep else None,
            experts_per_rank=case.experts,
            own_tokens=case.own_tokens,
        )
        source = TRAINED if name in SPOKEN else Path(folder)
        model = deepseek.load(source / case.checkpoint, parallel=parallel, **case.options)
        if name in SPOKEN:
            results[name] = list(model.generate(PROMPT, SPEECH))
        else:
            results[name] = run_with_own_tokens(model, ep.index(rank)) if case.own_tokens and ep else run(model)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for name, config in CHECKPOINTS.items():
        deepseek.random_checkpoint(folder / name, config, seed=1, mtp="V2" not in name)
    pack(folder / "V3", folder / "packed")
    pack(folder / "fp8", folder / "packed fp8")
    return folder


def pack(source: Path, out: Path) -> None:
    """The same with a layer's experts in two tensors, as transformers holds them."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    experts = {name for name in tensors if ".experts." in name}
    for prefix in {name.split("experts.")[0] + "experts" for name in experts}:
        for end in {name.split("proj.weight")[1] for name in experts}:
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight{end}").float() for e in range(8)])
                for part in ("gate", "up", "down")
            )
            dtype = torch.float8_e4m3fn if "fp8" in out.name and not end else torch.float32
            tensors[f"{prefix}.gate_up_proj{end}"] = torch.cat([gate, up], 1).to(dtype)
            tensors[f"{prefix}.down_proj{end}"] = down.to(dtype)
    save_file(tensors, out / "model.safetensors")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    mp.spawn(worker, args=(str(folder),), nprocs=SIZE)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(SIZE)]


TOGETHER = [name for name, case in CASES.items() if not case.own_tokens]


@pytest.mark.parametrize("name", [name for name in TOGETHER if "fp8" not in CASES[name].checkpoint])
def test_ranks_together_say_what_one_process_says(name: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    expected = run(deepseek.load(folder / case.checkpoint, **case.options))
    for rank in ranks_of(case):
        got = ranks[rank][name]
        for key in ("logits", "first"):
            assert relative_error(got[key], expected[key]) < 1e-5
        for key in ("text", "sampled", "acceptance"):
            assert got.get(key) == expected.get(key)


@pytest.mark.parametrize("name", [name for name in TOGETHER if "fp8" in CASES[name].checkpoint])
def test_fp8_ranks_together_say_what_one_process_says(name: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    """But for the odd code at a tie, which the order of a sum may sway, and all that follows from it with it."""
    case = CASES[name]
    alone = deepseek.load(folder / case.checkpoint, **case.options)
    expected = run(alone)
    for rank in ranks_of(case):
        got = ranks[rank][name]
        errors = (got["first"] - expected["first"]).norm(dim=-1) / expected["first"].norm(dim=-1)
        assert (errors < 1e-5).sum() >= 0.75 * LENGTH
        assert relative_error(got["logits"], expected["logits"]) < 0.3
        text = torch.tensor(got["text"])
        logits = alone.logits([*token_ids(9), *text])[8:-1]
        assert (logits.amax(-1) - logits.gather(-1, text[:, None])[:, 0]).max() < 0.3
        assert (got.get("acceptance") is None) == (expected.get("acceptance") is None)


@pytest.mark.parametrize("name", TOGETHER)
def test_all_ranks_agree_to_the_last_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    """So that they draw alike."""
    first, *others = (ranks[rank][name] for rank in ranks_of(CASES[name]))
    for other in others:
        assert torch.equal(first["logits"], other["logits"])
        assert (first["text"], first["sampled"]) == (other["text"], other["sampled"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.own_tokens])
def test_ranks_with_tokens_of_their_own(name: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    alone = deepseek.load(folder / case.checkpoint)
    _, expert_groups = groups_of(case)
    for group in expert_groups:
        for i, rank in enumerate(group):
            assert ranks[rank][name] == run_with_own_tokens(alone, i, lockstep=False)


@pytest.mark.parametrize("name", SPOKEN)
def test_the_trained_model_says_the_same_however_it_is_spread(name: str, ranks: list[dict[str, Any]]) -> None:
    case = SPOKEN[name]
    expected = list(deepseek.load(TRAINED / case.checkpoint, **case.options).generate(PROMPT, SPEECH))
    assert len(expected) == SPEECH
    for rank in ranks_of(case):
        assert ranks[rank][name] == expected


@pytest.mark.parametrize("checkpoint", ["bf16", "fp8"])
def test_the_trained_model_says_the_same_whichever_way_it_computes(checkpoint: str) -> None:
    """Decoded token by token, prefilled at once, in chunks, and decoded, both of these beside another text."""
    model = deepseek.load(TRAINED / checkpoint, dtype=torch.float32)
    expected = list(model.generate(PROMPT, SPEECH))
    text, start = PROMPT + expected[:-1], len(PROMPT)
    assert model.logits(text)[start - 1 :].argmax(-1).tolist() == expected
    others = text[::-1]
    cache, pair, chosen = model.new_cache(len(text), 2), [deepseek.Sequence(), deepseek.Sequence()], {}
    for begin in range(0, 49, 7):
        chunks = [part[begin : begin + 7] for part in (text, others)]
        chosen[begin + 7] = int(model.prefill(chunks, pair, cache)[0].argmax())
    for end in range(50, len(text) + 1):
        ids_BS = torch.tensor([[text[end - 1]], [others[end - 1]]])
        chosen[end] = int(model.decode(ids_BS, pair, cache)[0, 0].argmax())
    spoken = {end: token for end, token in chosen.items() if end >= start}
    assert len(spoken) > SPEECH // 2
    assert spoken == {end: expected[end - start] for end in spoken}


# --- what a rank reads: one process takes each rank's place in turn ---


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Group]], None]:
    """Make this process a rank of the groups named so."""

    def place(groups: dict[str, Group]) -> None:
        monkeypatch.setattr(Group, "named", classmethod(lambda cls, name: groups[name] if name else cls()))

    return place


SPREAD = {
    "TP2": (deepseek.Parallel("tp"), [{"tp": Group("tp", r, 2)} for r in range(2)]),
    "EP3": (deepseek.Parallel(None, "ep"), [{"ep": Group("ep", r, 3)} for r in range(3)]),
    "TP2×EP2": (
        deepseek.Parallel("tp", "ep", (7, 1)),
        [{"tp": Group("tp", t, 2), "ep": Group("ep", e, 2)} for e in range(2) for t in range(2)],
    ),
}


@pytest.mark.parametrize("checkpoint", ["V3", "tied", "packed", "fp8", "packed fp8", "fp8 V2-Lite"])
@pytest.mark.parametrize("spread", SPREAD)
def test_ranks_read_their_parts_and_no_more(
    checkpoint: str,
    spread: str,
    folder: Path,
    place: Callable[[dict[str, Group]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel, ranks = SPREAD[spread]
    config, stored = deepseek.load_config(folder / checkpoint), load_file(folder / checkpoint / "model.safetensors")
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in stored.items()}
    known: set[str] = set()
    for groups in ranks:
        place(groups)
        files = deepseek.Checkpoint(folder / checkpoint)
        model = deepseek.allocate(config, hal.bind("cpu"), names=files.files, parallel=parallel)
        targets, read, wanted = list(model.targets()), watch(monkeypatch), 0
        report = files.load(targets, config.num_hidden_layers)
        known |= {name for name, _ in targets}
        for name, part in targets:
            if part is not None:
                window = tuple(slice(b, b + n) for b, n in zip(part.begin, part.into.shape, strict=True))
                covered[name][window] += 1
                wanted += stored[name][window].nbytes
                expected = stored[name]
                if part.scale is not None:
                    expected = hal.ops.block_dequant_fp8(expected, stored[f"{name}_scale_inv"], torch.float32)
                assert torch.equal(part.into.to(torch.float32), expected[window].to(torch.float32)), name
        # What is dequantised is read from the first of a block's rows on.
        assert wanted <= sum(read) <= wanted * (1.05 if checkpoint == "fp8 V2-Lite" else 1.0)
        assert (report.bytes, report.unused) == (wanted, ())
    later = f"model.layers.{config.num_hidden_layers}."
    assert known == {name for name in stored if not name.startswith(later)}
    for name in known:
        assert covered[name].min() >= 1, name
        if ".experts." in name:
            assert covered[name].max() == 1, name
        if "layernorm" in name or "kv_a_proj" in name:
            assert covered[name].min() == len(ranks), name


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every tensor or slice that is read from now on."""
    read: list[int] = []
    original = torch_hal_deepseek.checkpoint._window

    def window(*arguments: Any) -> Tensor:
        result: Tensor = original(*arguments)
        read.append(result.nbytes)
        return result

    monkeypatch.setattr(torch_hal_deepseek.checkpoint, "_window", window)
    return read


# --- shares, and errors ---


def test_shares() -> None:
    assert share("x", 12, Group("g", 1, 3)) == Span(12, 4, 4, 4)
    assert share("x", 12, Group("g", 1, 3)).times(5) == Span(60, 20, 20, 20)
    # V2-Lite's dense layer: 86 blocks of 128, the last for 64 columns.
    assert [share("x", 10944, Group("g", r, 2), 128) for r in range(2)] == [
        Span(10944, 0, 5504, 5504),
        Span(10944, 5504, 5440, 5504),
    ]
    assert share("x", 330, Group(), 128) == Span(330, 0, 330, 384)
    with pytest.raises(deepseek.ParallelError, match="heads: 4 cannot be shared equally by the 3 ranks of tp_group"):
        share("heads", 4, Group("g", 0, 3))
    with pytest.raises(deepseek.ParallelError, match="moe: 1408 in FP8 blocks of 128, which are 11, cannot be shared"):
        share("moe", 1408, Group("g", 0, 2), 128)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 11])
def test_experts_are_spread_as_evenly_as_can_be(size: int, place: Callable[[dict[str, Group]], None]) -> None:
    config, names = deepseek.parse_config(small("V3")), []
    for rank in range(size):
        place({"ep": Group("ep", rank, size)})
        model = deepseek.allocate(config, hal.bind("cpu"), parallel=deepseek.Parallel(ep_group="ep"))
        experts = model.ranks.experts
        names += range(experts.begin, experts.begin + experts.size)
        assert model.ranks.experts_per_rank[rank] == experts.size
        assert max(model.ranks.experts_per_rank) - min(model.ranks.experts_per_rank) <= 1
    assert names == list(range(8))


TP2, EP2 = {"tp": Group("tp", 1, 2)}, {"ep": Group("ep", 0, 2)}
REFUSED: dict[str, tuple[dict[str, Any], deepseek.Parallel, dict[str, Group], str]] = {
    "heads": (small("V3"), deepseek.Parallel("tp"), {"tp": Group("tp", 0, 3)}, "num_attention_heads: 4 cannot be"),
    "dense": (
        small("V3", num_attention_heads=5, num_key_value_heads=5),
        deepseek.Parallel("tp"),
        {"tp": Group("tp", 0, 5)},
        r"model.layers.0.mlp.gate_proj: 96 cannot be shared equally by the 5 ranks",
    ),
    "fp8 experts": (
        small("V3", **{**BLOCKS, "moe_intermediate_size": 384}, quantization_config=FP8),
        deepseek.Parallel("tp"),
        TP2,
        r"model.layers.1.mlp.experts: 384 in FP8 blocks of 128, which are 3, cannot be shared equally by the 2 ranks",
    ),
    "fp8 heads": (
        small("V3", **{**BLOCKS, "v_head_dim": 96}, quantization_config=FP8),
        deepseek.Parallel("tp"),
        TP2,
        r"o_proj.weight: a rank's part, 192 to 384 of 384, cuts FP8 blocks of 128",
    ),
    "experts": (small("V3"), deepseek.Parallel(None, "ep", (4, 5)), EP2, r"\(4, 5\) do not spread 8 experts over 2"),
    "ranks": (small("V3"), deepseek.Parallel(None, "ep", (4, 2, 2)), EP2, r"do not spread 8 experts over 2 ranks"),
    "fewer than none": (small("V3"), deepseek.Parallel(None, "ep", (9, -1)), EP2, "do not spread 8 experts"),
    "own tokens": (small("V3"), deepseek.Parallel("tp", own_tokens=True), TP2, "own_tokens: needs an ep_group"),
    "own tokens shared": (
        small("V3"), deepseek.Parallel("tp", "tp", own_tokens=True), TP2, "own_tokens: needs an ep_group"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_spread_is_named(case: str, place: Callable[[dict[str, Group]], None]) -> None:
    config, parallel, groups, message = REFUSED[case]
    place(groups)
    with pytest.raises(deepseek.ParallelError, match=message):
        list(deepseek.allocate(deepseek.parse_config(config), hal.bind("cpu"), parallel=parallel).targets())


def test_fp8_blocks_may_be_cut_if_they_are_dequantised(place: Callable[[dict[str, Group]], None]) -> None:
    config, parallel, groups, _ = REFUSED["fp8 heads"]
    place(groups)
    parsed = deepseek.parse_config(config)
    model = deepseek.allocate(parsed, hal.bind("cpu"), parallel=parallel, dequantize=True)
    part = next(part for name, part in model.targets() if name.endswith("o_proj.weight"))
    assert part is not None and part.scale is not None
    assert (part.begin, tuple(part.into.shape), tuple(part.scale.shape)) == ((0, 192), (256, 192), (2, 2))


def test_other_errors(place: Callable[[dict[str, Group]], None], folder: Path) -> None:
    with pytest.raises(hal.ArgumentError, match=r"Parallel: argument 'group'.*got 'nobody'"):
        deepseek.load(folder / "V3", parallel=deepseek.Parallel("nobody"))
    place(TP2)
    model = deepseek.load(folder / "V3", parallel=deepseek.Parallel("tp"))
    with pytest.raises(ValueError, match="seed: ranks that make up one model"):
        model.generate([1], 1, temperature=1.0)
    place(EP2)
    with pytest.raises(deepseek.ParallelError, match="fuse_shared_expert: not with an ep_group"):
        deepseek.load(folder / "V3", parallel=deepseek.Parallel(ep_group="ep"), fuse_shared_expert=True)
    alone = deepseek.load(folder / "V3")
    with pytest.raises(ValueError, match="capacity: expected a number ≥ 3, the tokens of this rank, got 2"):
        alone.prefill([[1, 2, 3]], [deepseek.Sequence()], alone.new_cache(3), capacity=2)


def test_an_expert_that_another_rank_holds_must_be_there(
    place: Callable[[dict[str, Group]], None], folder: Path, tmp_path: Path
) -> None:
    """So that no rank waits for one that failed to load."""
    tensors = load_file(folder / "V3" / "model.safetensors")
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "V3" / "config.json").read_text())
    place(EP2)
    with pytest.raises(deepseek.CheckpointError, match=f"{name}: missing"):
        deepseek.load(tmp_path, parallel=deepseek.Parallel(ep_group="ep"))
