"""Collectives judged on several processes: native torch is right, and what goes wrong is told as what it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_hal.native import NATIVE
from torch_hal_conformance import ranks
from torch_hal_conformance.cases import Case, every_case, select
from torch_hal_conformance.isolation import Judge
from torch_hal_conformance.judge import Item
from torch_hal_conformance.mutants import PLUGIN, Mutant, collectives, expert_parallel
from torch_hal_conformance.ranks import judge_ranks
from torch_hal_conformance.report.schema import CaseResult
from torch_hal_conformance.spec import specs

TESTS = "ranks_plugin"
BASE = "all_gather/core/ranks2-M17-D64/bfloat16/contiguous/unit/0"
OPS = [op for op, spec in specs().items() if spec.ranks]
SLOW = frozenset({"hang"})  # seconds each, of which one is enough here; the self-test has them all


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> Iterator[None]:
    ranks.offer(TESTS, TESTS)
    ranks.offer(PLUGIN, collectives.__name__)
    yield
    ranks.withdraw(PLUGIN)
    ranks.withdraw(TESTS)


def judged(case: str | Case, kernel: str = NATIVE, device: str = "cpu") -> CaseResult:
    return judge_ranks(Item(every_case()[case] if isinstance(case, str) else case, kernel, device))


def tried(kernel: str, case: str = BASE) -> CaseResult:
    return judged(case, f"{TESTS}.{kernel}")


def one_a_regime() -> list[str]:
    """The cheapest case of every regime of every op."""
    found = {(case.op, case.regime): case.id for case in reversed(select("core")) if case.spec.ranks}
    return sorted(found.values())


@pytest.mark.parametrize("case", one_a_regime())
def test_native_torch_is_right(case: str) -> None:
    result = judged(case)
    assert (result.status, result.message) == ("correct", "")
    assert result.ran == ("" if every_case()[case].regime in ranks.FAULTS else NATIVE)


@pytest.mark.parametrize("op", OPS)
def test_other_seeds_and_four_ranks_are_right_too(op: str) -> None:
    cases = [case for case in select("core", op) if case.regime == "unit" and case.shape.startswith("ranks4")][:1]
    assert [judged(replace(case, seed=seed)).message for case in cases for seed in (5, 6)] == ["", ""]


MUTANTS = [
    mutant
    for module in (collectives, expert_parallel)
    for value in vars(module).values()
    for mutant in (value if isinstance(value, tuple) else (value,))
    if isinstance(mutant, Mutant)
]


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.check not in SLOW], ids=lambda m: f"{m.op}-{m.name}")
def test_a_wrong_kernel_dies_where_it_says(mutant: Mutant) -> None:
    result = judged(mutant.case, mutant.kernel)
    assert (result.status, result.check) == ("wrong", mutant.check), result.message
    assert "rank" in result.message


def test_a_kernel_that_waits_for_ever_is_stopped() -> None:
    mutant = collectives.waits_for_ever
    result = judged(mutant.case, mutant.kernel)
    assert (result.status, result.check) == ("wrong", "hang")
    assert "rank 0 hung: no error within 10.5 s, although rank 1 of 2 never made its call" in result.message
    assert "the group's time-out is 0.5 s" in result.message


def test_every_op_has_two_mutants() -> None:
    assert {m.op for m in MUTANTS} == set(OPS)
    assert all(sum(m.op == op for m in MUTANTS) >= 2 for op in OPS)
    assert {m.case for m in MUTANTS} <= set(every_case())


def test_a_rank_that_dies_is_the_cause_and_its_last_words_are_told() -> None:
    result = tried("dies")
    assert (result.status, result.check) == ("crashed", "crash")
    assert result.message.startswith("rank 1 of 2: the process died of SIGSEGV\n  | the driver has gone away")
    assert tried("right").status == "correct"  # in new processes


def test_what_a_rank_raises_is_told_not_what_follows_from_it() -> None:
    result = tried("raises")
    assert (result.status, result.check) == ("error", "ValueError")
    assert result.message == ("rank 1 of 2: ValueError: no room for the other ranks; meanwhile rank 0 waited in vain")


def test_memory_that_was_not_written_is_poison() -> None:
    assert tried("uninitialised").check == "copy"


def test_dying_of_a_dead_rank_is_no_error_that_can_be_caught() -> None:
    result = tried("dies_of_the_dead", BASE.replace("unit", "dead_rank"))
    assert result.status == "crashed"
    assert result.message == (
        "rank 0: the process ended with exit code 3: expected an error that can be caught; rank 1 of 2 was killed "
        "before its call, and the group's time-out is 0.5 s"
    )


def test_a_refusal_by_all_is_unsupported_and_one_by_some_is_wrong() -> None:
    assert tried("two_dims").status == "correct"
    result = tried("two_dims", BASE.replace("ranks2-M17-D64", "ranks2-M515"))
    assert result.status == "unsupported" and "wants two dims, got 1" in result.message
    result = tried("first_rank_only")
    assert (result.status, result.check) == ("wrong", "refusal")
    assert "rank 1 of 2 refuses the call and rank 0 not: " in result.message and "only the first rank" in result.message


def test_too_few_devices_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(type="cuda", dist_backend="gloo", torch_device=torch.device("cuda", 0))
    monkeypatch.setattr(Item, "ops", lambda item: SimpleNamespace(device=device))
    monkeypatch.setattr(torch, "get_device_module", lambda type: SimpleNamespace(device_count=lambda: 2))
    result = judged("all_reduce/core/ranks4-M17-D64/float32/contiguous/unit/0", device="cuda")
    assert (result.status, result.message) == ("unsupported", "needs 4 devices, has 2")
    device.dist_backend = "mccl"
    result = judged("all_reduce/core/ranks2-M17-D64/float32/contiguous/unit/0", device="cuda")
    assert result.status == "unsupported" and "no process groups of 'mccl'" in result.message


def test_a_plugin_that_takes_its_process_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import multiprocessing, os\n{}if multiprocessing.parent_process(): {}\n"
    hook = "import torch_hal as hal\n@hal.hookimpl\ndef torch_hal_kernels(): return []\n"
    (tmp_path / "rank_dies.py").write_text(text.format(hook, "os._exit(7)"))
    (tmp_path / "rank_raises.py").write_text(text.format(hook, "raise OSError('no driver')"))
    monkeypatch.syspath_prepend(tmp_path)
    for module, told in (("rank_dies", "the process ended with exit code 7"), ("rank_raises", "OSError: no driver")):
        ranks.offer("other", module)
        result = judged(BASE)
        ranks.withdraw("other")
        assert (result.status, result.check) == ("error", "StartError")
        assert "the ranks did not come together: rank " in result.message and told in result.message


def test_an_installed_backend_is_found_by_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the judging process, which is killed at the end, and leaves nothing running."""
    info = tmp_path / "acme_ranks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ranks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch_hal.backends]\nacme_ranks = {TESTS}\n")
    paths = [str(tmp_path), str(Path(__file__).parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Judge() as judge:
        results = [judge(BASE, f"acme_ranks.{kernel}", "cpu") for kernel in ("right", "dies", "uninitialised", "right")]
    assert [(r.status, r.check) for r in results] == [
        *(("correct", ""), ("crashed", "crash"), ("wrong", "copy"), ("correct", "")),
    ]
    assert results[0].ran == "acme_ranks.right"
    deadline = time.monotonic() + 20
    while (left := list(tmp_path.glob("torch_hal_ranks_*")) + _running(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _running(folder: Path) -> list[str]:
    """Processes that were started with the folder on their path."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            ours = f"TMPDIR={folder}".encode() in environment.read_bytes()
        except OSError:
            continue
        if ours and environment.parent.name != str(os.getpid()):
            found.append(environment.parent.name)
    return found


def test_groups_start_within_seconds_and_end_with_their_process() -> None:
    code = (
        "from torch_hal_conformance.ranks_pool import pool\n"
        "if __name__ == '__main__':\n"
        "    print(*[process.pid for process in pool(2, 'cpu')._processes])\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_case_that_zeros_would_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.zeros(shape))
    result = judged("all_reduce/core/ranks2-M17-D64/float32/contiguous/unit/0")
    assert (result.status, result.check) == ("wrong", "vacuous")
    assert result.message.startswith("zeros would pass this case")
