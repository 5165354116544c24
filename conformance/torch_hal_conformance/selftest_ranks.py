"""The suite against itself, for collectives: wrong kernels in every rank's process, and right ones that differ.

python -m torch_hal_conformance.selftest_ranks [--op GLOB] [--seeds N]
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import replace

from .cases import BEHAVIOURS, every_case, select
from .judge import Item
from .mutants import PLUGIN, mutants
from .ranks import FAULTS, judge_ranks, offer, withdraw
from .selftest import Finding
from .spec import specs

VARIANTS = "rank_variants"  # the plugin: `variants_ranks`


def findings(glob: str = "*", seeds: int = 3, variants: bool = True) -> Iterator[Finding]:
    """Every mutant of every op with ranks on the case that it names, and every right variant on core.

    seeds: on how many the base shapes are looked at. In a process that may start others, which has no `PLUGIN` yet.
    """
    ops = [op for op, spec in specs().items() if spec.ranks and fnmatch.fnmatchcase(op, glob)]
    with _offered(PLUGIN, "mutants.collectives"):
        for op in ops:
            yield from hand_written(op)
    with _offered(VARIANTS, "variants_ranks"):
        for op in ops if variants else ():
            yield from right_variants(op, seeds)
            yield null(op)


@contextlib.contextmanager
def _offered(name: str, module: str) -> Iterator[None]:
    offer(name, f"{__package__}.{module}")
    try:
        yield
    finally:
        withdraw(name)


def hand_written(op: str) -> Iterator[Finding]:
    for mutant in (m for m in mutants() if m.op == op):
        result = judge_ranks(Item(every_case()[mutant.case], mutant.kernel, "cpu"))
        ok = result.status == "wrong" and result.check == mutant.check
        wanted = f"expected to be killed by '{mutant.check}', got {result.status} '{result.check}': {result.message}"
        yield Finding("mutants", op, mutant.name, ok, mutant.case, result.check, mutant.why if ok else wanted)


def right_variants(op: str, seeds: int) -> Iterator[Finding]:
    """Kernels that are right: no case of core may fail, nor one of numbers at a base shape with other seeds."""
    from .variants_ranks import KERNELS

    cases = [case for case in select("core", op) if case.regime not in BEHAVIOURS]
    first = cases[0].shape
    base = [
        case for case in cases if case.shape in (first, first.replace("ranks2", "ranks4")) and case.regime not in FAULTS
    ]
    more = [replace(case, seed=seed) for case in base for seed in range(1, seeds)]
    for name in (name for name in KERNELS if op in KERNELS[name]):
        failed, worst_e, worst_r = [], 0.0, 0.0
        for case in [*cases, *more]:
            result = judge_ranks(Item(case, f"{VARIANTS}.{name}", "cpu"))
            worst_e, worst_r = max(worst_e, result.E or 0), max(worst_r, result.R or 0)
            if result.status != "correct":
                failed.append(f"{case.id}: {result.status} {result.check}: {result.message}")
        detail = "; ".join(failed[:2]) or f"{len(cases) + len(more)} cases, E ≤ {worst_e:.3f}, R ≤ {worst_r:.3f}"
        yield Finding("variants", op, name, not failed, detail=detail)


def null(op: str) -> Finding:
    """A backend that gives zeros of the right shape gets no case right that is not structural."""
    cases = [case for case in select("core", op) if case.regime not in (*BEHAVIOURS, *FAULTS) and not case.structural]
    right = [c.id for c in cases if judge_ranks(Item(c, f"{VARIANTS}.null", "cpu")).status == "correct"]
    return Finding("variants", op, "null", not right, detail="; ".join(right[:3]) or "no case")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="*", metavar="GLOB")
    parser.add_argument("--seeds", default=3, type=int, metavar="N")
    options = parser.parse_args()
    bad = 0
    for finding in findings(options.op, options.seeds):
        bad += not finding.ok
        state = "ok" if finding.ok else "WRONG"
        print(
            f"{state:5} {finding.part:8} {finding.op:14} {finding.name:18} {finding.check:10} {finding.detail}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
