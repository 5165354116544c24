"""The suite against itself: every mutant dies where it says, what is right lives, generated mutants are counted.

    python -m torch_hal_conformance.selftest [--op GLOB] [--part mutants|variants|generated] [--json FILE] [--jobs N]

Exit code 1 if a mutant lives, dies elsewhere or otherwise than it says, a right variant fails, the null backend gets a
case right, or a generated mutant lives that ``mutants/survivors.toml`` does not explain.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.resources
import json
import multiprocessing
import os
import resource
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import torch_hal as hal
from torch_hal.op import declared

from . import mutants as mutants_plugin
from .cases import BEHAVIOURS, Case, every_case, select
from .generated import Generated, generated
from .judge import Item, judge
from .mutants import PLUGIN, TRAITS, mutants
from .report.schema import CaseResult
from .signature import like_op
from .subjects import bound
from .variants import VARIANTS

SEEDS = 20
MEMORY = 8 << 30  # bytes of address space for a process that runs mutants: a wrong size must not take the machine
SECONDS = 60  # for one case of one mutant


@dataclass(frozen=True)
class Finding:
    """One thing that was tried; ``ok`` is whether it went as it must."""

    part: str  # mutants, variants, generated
    op: str
    name: str
    ok: bool
    case: str = ""  # the case that killed it
    check: str = ""
    detail: str = ""


def ops(glob: str) -> list[str]:
    """Ops without ranks, whose kernels can be swapped within this process; `ranks` has its own mutants."""
    return [op for op, spec in _specs().items() if fnmatch.fnmatchcase(op, glob) and not spec.ranks]


def _specs() -> Any:
    from .spec import specs

    return specs()


def hand_written(op: str) -> Iterator[Finding]:
    """Every mutant of an op on the case that it names."""
    for mutant in (m for m in mutants() if m.op == op):
        result = _judge(every_case()[mutant.case], mutant.kernel)
        ok = result.status == "wrong" and result.check == mutant.check
        wanted = f"expected to be killed by '{mutant.check}', got {result.status} '{result.check}': {result.message}"
        yield Finding("mutants", op, mutant.name, ok, mutant.case, result.check, mutant.why if ok else wanted)


def right_variants(op: str) -> Iterator[Finding]:
    """Kernels that are right: no case of core may fail, nor, on 20 seeds, a case of numbers at the base shape."""
    base = [case for case in select("core", op) if case.layout == "contiguous" and case.regime not in BEHAVIOURS]
    shape = base[0].shape
    more = [replace(case, seed=seed) for case in base if case.shape == shape for seed in range(1, SEEDS)]
    for name in VARIANTS:
        tried, failed, worst_e, worst_r = 0, [], 0.0, 0.0
        for case in [*select("core", op), *more]:
            result = _judge(case, name)
            tried += 1
            worst_e, worst_r = max(worst_e, result.E or 0), max(worst_r, result.R or 0)
            if result.status != "correct":
                failed.append(f"{case.id}: {result.status} {result.check}: {result.message}")
        detail = "; ".join(failed[:2]) or f"{tried} cases, E ≤ {worst_e:.3f}, R ≤ {worst_r:.3f}"
        yield Finding("variants", op, name, not failed, detail=detail)


def null(op: str) -> Iterator[Finding]:
    """A backend that gives zeros of the right shape gets no case right that is not structural."""
    wrongly = [
        case.id
        for case in select("core", op)
        if case.regime not in BEHAVIOURS and not case.structural and _judge(case, "null").status == "correct"
    ]
    yield Finding("variants", op, "null", not wrongly, detail="; ".join(wrongly[:3]) or "no case")


class Null:
    """Zeros for every op."""

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        for name in ops("*"):
            op = declared()[name]
            reads = frozenset({"*"}) if op.plan else None
            yield hal.Kernel(name, "null", run=like_op(op, functools.partial(_zeros, op)), reads=reads)


def _zeros(op: Any, *args: Any) -> Any:
    names = list(op.signature.parameters)
    for name in op.mutates:
        args[names.index(name)].zero_()
    like = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
    results = (op.fake or op.reference)(*like)
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device=device), results)


def from_syntax_trees(op: str, limit: int) -> Iterator[Finding]:
    """Mutants of the op's reference, each on the cases of core until one kills it."""
    excused, alive = survivors(), {f"m{i}": mutant for i, mutant in enumerate(generated(op, limit))}
    with _offered(op, alive):
        for case in select("core", op):
            if case.regime in BEHAVIOURS:
                continue
            for name, mutant in list(alive.items()):
                result = _judge(case, f"generated.{name}")
                if result.status != "correct":
                    told = "is listed as a survivor: remove the entry" if mutant.name in excused else ""
                    yield Finding("generated", op, mutant.name, not told, case.id, result.check, told)
                    del alive[name]
    for mutant in alive.values():
        why = excused.get(mutant.name, "")
        yield Finding("generated", op, mutant.name, bool(why), detail=why or "no case of core kills it")
    known = {mutant.name for mutant in generated(op, limit)}
    for name in excused:
        if name.startswith(f"{op}@") and name not in known:
            yield Finding("generated", op, name, False, detail="is listed as a survivor, but is no mutant any more")


class _offered:
    """Registers an op's generated mutants as a plugin for a while."""

    def __init__(self, op: str, found: Mapping[str, Generated]) -> None:
        reads = frozenset({"*"}) if declared()[op].plan else None
        self._kernels = [
            hal.Kernel(op, name, run=mutant.build(), reads=reads, traits=TRAITS) for name, mutant in found.items()
        ]

    @hal.hookimpl
    def torch_hal_kernels(self) -> list[hal.Kernel]:
        return self._kernels

    def __enter__(self) -> None:
        bound.cache_clear()
        hal.register(self, "generated")

    def __exit__(self, *exception: object) -> None:
        hal.unregister("generated")


@functools.cache
def survivors() -> dict[str, str]:
    """Generated mutants that no case can kill, and why."""
    text = (importlib.resources.files(__package__) / "mutants" / "survivors.toml").read_text(encoding="utf-8")
    return {entry["mutant"]: entry["why"] for entry in tomllib.loads(text).get("survivor", [])}


def _judge(case: Case, kernel: str) -> CaseResult:
    """One case, which may take a mutant so long and no longer."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        return judge(Item(case, kernel, "cpu"))
    finally:
        signal.alarm(0)


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


PARTS: dict[str, list[Callable[[str], Iterator[Finding]]]] = {
    "mutants": [hand_written],
    "variants": [right_variants, null],
    "generated": [functools.partial(from_syntax_trees, limit=10**6)],
}


def _process(task: tuple[str, str]) -> list[Finding]:
    """All findings of one part for one op."""
    part, op = task
    return [finding for look in PARTS[part] for finding in look(op)]


def _begin() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    hal.register(mutants_plugin, PLUGIN)
    hal.register(Null(), "null")
    for name, build in VARIANTS.items():
        hal.register(build(name), name)


def run(glob: str, parts: list[str], jobs: int) -> list[Finding]:
    """Everything, in ``jobs`` processes; prints a line for each op and part."""
    tasks = [(part, op) for part in parts for op in ops(glob)]
    findings: list[Finding] = []
    left = dict.fromkeys(tasks)
    context = multiprocessing.get_context("spawn")
    while left:
        with ProcessPoolExecutor(jobs, context, _begin) as pool:
            futures = {pool.submit(_process, task): task for task in left}
            for future in as_completed(futures):
                task = futures[future]
                try:
                    found = future.result()
                except BrokenProcessPool:  # whose mutant it was is not told: each is tried again, alone
                    if jobs > 1:
                        continue
                    found = [Finding(*task, "", False, detail="a mutant took the process with it")]
                del left[task]
                findings += found
                _tell(task, found, len(tasks) - len(left), len(tasks))
        jobs = 1
    return sorted([*findings, *_with_ranks(glob, parts)], key=lambda f: (f.part, f.op, f.name))


def _with_ranks(glob: str, parts: list[str]) -> list[Finding]:
    """Those of the ops that run on several processes, from this one, which may start others."""
    from . import selftest_ranks

    if not {"mutants", "variants"} & set(parts):
        return []
    found = [f for f in selftest_ranks.findings(glob, SEEDS, "variants" in parts) if f.part in parts]
    for part, op in dict.fromkeys((f.part, f.op) for f in found):
        some = [f for f in found if (f.part, f.op) == (part, op)]
        _tell((part, op), some, len(some), len(some))
    return found


def _tell(task: tuple[str, str], found: list[Finding], done: int, total: int) -> None:
    bad = sum(not f.ok for f in found)
    state = f"{bad} WRONG" if bad else "ok"
    print(f"[{done}/{total}] {task[0]:9} {task[1]:34} {len(found):4}  {state}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="*", metavar="GLOB")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="repeatable; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    findings = run(options.op, options.part or list(PARTS), options.jobs)
    if options.json:
        text = json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    for finding in findings:
        if not finding.ok:
            print(f"WRONG {finding.part} {finding.op} {finding.name}: {finding.detail}")
    print(summary(findings))
    return 0 if findings and all(finding.ok for finding in findings) else 1


def summary(findings: list[Finding]) -> str:
    """The counts, a line for each part."""
    lines = []
    for part, of_part in (("mutants", "killed where they say"), ("variants", "as they must"), ("generated", "killed")):
        some = [f for f in findings if f.part == part]
        good = sum(bool(f.case) if part == "generated" else f.ok for f in some)
        checks = Counter(f.check for f in some if f.check)
        by = ", ".join(f"{n} by {check}" for check, n in checks.most_common(6))
        explained = sum(f.ok and not f.case for f in some) if part == "generated" else 0
        rest = f"; {explained} survivors explained" if explained else ""
        lines += [f"{part}: {good} of {len(some)} {of_part}{rest}" + (f" ({by})" if by else "")] if some else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
