"""A process that judges items one by one, so that a kernel that crashes takes nothing else with it.

    python -m torch_hal_conformance.worker

It says ``ready``, then reads ``{"number": n, "wish": …}`` a line and answers each with ``n`` and one JSON object:
``{"backend": name, "device": name or null}`` with the `subjects.Subject`, or ``{"error": text}``; ``{"case": id,
"kernel": id, "device": name}`` with a `report.schema.CaseResult`. What plugins and kernels print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys

import torch_hal as hal

from . import state as state  # before any backend: as torch begins
from .cases import Case, every_case
from .judge import Item, judge
from .subjects import SubjectError, find


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    cases = every_case()
    print("ready", file=answers, flush=True)
    me = os.getpid()
    for line in sys.stdin:
        number, wish = json.loads(line).values()
        answer = _subject(**wish) if "backend" in wish else _result(cases[wish["case"]], wish["kernel"], wish["device"])
        if os.getpid() != me:  # a kernel forked, and its child came back here
            os._exit(1)
        print(number, answer, file=answers, flush=True)


def _subject(backend: str, device: str | None) -> str:
    try:
        return find(backend, device).to_json()
    except (SubjectError, hal.HalError) as error:
        return json.dumps({"error": str(error)})


def _result(case: Case, kernel: str, device: str) -> str:
    item = Item(case, kernel, device)
    if not case.spec.ranks:
        return judge(item).model_dump_json()
    from .ranks import judge_ranks

    return judge_ranks(item).model_dump_json()


if __name__ == "__main__":
    main()
