"""Reports as runs would leave them, for tests of what reads reports."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch_hal_conformance.report.schema import PROFILES, CaseResult, Environment, OpScope, Profile, Report

OPS = {  # op -> its dtypes
    "attention_with_kv_cache": ("float32", "bfloat16", "float16"),
    "apply_rope": ("float32", "bfloat16", "float16"),
    "fp8_gemm": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "grouped_topk": ("float32", "bfloat16"),
    "moe_align_block_size": ("int32", "int64"),
    "mla_decode": ("bfloat16", "float16"),
    "per_token_group_quant_fp8": ("float32", "bfloat16", "float16"),
    "rms_norm": ("float32", "bfloat16", "float16"),
    "sample_top_p": ("float32",),
    "silu_and_mul": ("float32", "bfloat16", "float16"),
    "store_kv_cache": ("float32", "bfloat16", "float8_e4m3fn"),
    "tree_verify": ("int64",),
}
REGIMES = {
    "core": ("unit", "b24_empty", "b25_strides", "b22_capture"),
    "deepseek": ("unit", "tiny", "mean_shifted", "b19_selection_key"),
    "full": ("b26_far",),
}
SHAPES = {"core": "n17-d128", "deepseek": "n64-d7168", "full": "n65537-d7168"}

DIGEST = "9f2b4c71d0aa5e3388c1f7e6b2d94405e17c0f3ab86d52947e60c3f1a8b7d2e9"
VERSION = "0.1.0"

ENVIRONMENT = Environment(
    suite_version=VERSION,
    source_digest=DIGEST,
    torch_hal="0.1.0",
    backend="acme",
    backend_version="0.3.1",
    backend_distribution="torch-hal-acme",
    device="ACME Accelerator 200",
    device_type="cuda",
    arch="sm_90",
    driver="580.95.05",
    evidence="device",
    torch="2.13.0+cu130",
    python="3.12.11",
    libraries={"acme_kernels": "1.8.0", "numpy": "2.4.6", "triton": "3.7.0"},
    os="Linux-6.8.0-x86_64-with-glibc2.39",
    cpu="Example CPU 9554 64-Core Processor",
    cores=64,
    memory_gib=1511.6,
    date="2026-11-03T09:41:27+00:00",
    command="torch-hal conformance --backend acme --profile deepseek --report reports/acme",
    settings={"TORCH_HAL_LOG": "1"},
)


def environment(**changes: Any) -> Environment:
    return Environment(**{**ENVIRONMENT.model_dump(), **changes})


def ids(profile: Profile = "deepseek") -> dict[Profile, frozenset[str]]:
    """The must-pass lists: the ids of each profile alone, up to ``profile``."""
    wanted = PROFILES[: PROFILES.index(profile) + 1]
    return {
        name: frozenset(
            f"{op}/{name}/{SHAPES[name]}/{dtype}/{'rows' if regime == 'b25_strides' else 'contiguous'}/{regime}/0"
            for op, dtypes in OPS.items()
            for dtype, regime in itertools.product(dtypes, REGIMES[name])
        )
        for name in wanted
    }


def case(id: str, kernel: str = "acme.fast", **fields: Any) -> CaseResult:
    """A result, correct unless said otherwise, with figures drawn from its name."""
    draw = random.Random(f"{id}@{kernel}")
    parts = id.split("/")
    regime = parts[5]
    values: dict[str, Any] = {
        "id": id,
        "kernel": kernel,
        "status": "correct",
        "seconds": draw.uniform(0.01, 0.4),
        "kernel_seconds": draw.lognormvariate(-8.5, 1.2),
        "ran": kernel,
        "must_pass": True,
        "structural": regime == "b24_empty",
        "behaviours": (int(regime[1:3]),) if regime[0] == "b" and regime[1:3].isdigit() else (),
    }
    if parts[3].startswith(("float32", "bfloat", "float16")) and regime[0] != "b":
        values |= {"E": draw.uniform(0.05, 0.7), "R": draw.uniform(0.85, 1.1)}
    values |= fields
    if values["status"] == "unsupported":
        values |= {"E": None, "R": None, "kernel_seconds": None, "ran": ""}
    if values["status"] in ("wrong", "error", "crashed", "xpassed") and "reproduce" not in fields:
        values["reproduce"] = f"torch-hal conformance --backend {kernel.partition('.')[0]} --case {id}@{kernel}"
    return CaseResult(**values)


def build(
    cases: list[CaseResult],
    offered: Mapping[str, tuple[str, ...]],
    profile: Profile = "deepseek",
    selection: str = "*",
    seeds: tuple[int, ...] = (0,),
    unavailable: Mapping[str, dict[str, str]] | None = None,
    **environment_changes: Any,
) -> Report:
    every = [id for found in ids(profile).values() for id in found]
    lacking = unavailable or {}
    return Report.of(
        environment=environment(**environment_changes),
        profile=profile,
        selection=selection,
        seeds=seeds,
        profile_ids=dict(Counter(id.split("/")[0] for id in every)),
        scopes=[
            OpScope(
                op=op,
                offered=offered.get(op, ()),
                unavailable=lacking.get(op, {}),
                falls_to="" if offered.get(op) else "native",
            )
            for op in OPS
        ],
        cases=cases,
    )


def good(profile: Profile = "deepseek", ops: tuple[str, ...] = tuple(OPS)[:8], **changes: Any) -> Report:
    """A backend that offers some ops, all of them right."""
    backend = changes.get("backend", "acme")
    offered = dict.fromkeys(ops, (f"{backend}.fast",))
    cases = [case(id, f"{backend}.fast") for part in ids(profile).values() for id in part if id.split("/")[0] in ops]
    return build(cases, offered, profile, **changes)


def mixed(**changes: Any) -> Report:
    """Everything that can come of a case, with two kernels for one op."""
    offered = dict.fromkeys(tuple(OPS)[:11], ("acme.fast",)) | {"rms_norm": ("acme.fast", "acme.vector")}
    unavailable = {
        "sample_top_p": {"acme.sampler": "needs acme_kernels>=2.0, installed is 1.8.0"},
        "rms_norm": {"acme.tensor": "arch sm_90 is not one of sm_100f"},
    }
    unavailable["tree_verify"] = {"acme.tree": "acme_kernels has no image for sm_90 <none built>"}
    cases = [
        case(id, kernel, **_fate(id, kernel))
        for part in ids("deepseek").values()
        for id in part
        for kernel in offered.get(id.split("/")[0], ())
    ]
    return build(cases, offered, unavailable={k: v for k, v in unavailable.items() if k in OPS}, **changes)


def _fate(id: str, kernel: str) -> dict[str, Any]:
    op, _, _, dtype, layout, regime, _ = id.split("/")
    match op, dtype, regime:
        case "mla_decode", "bfloat16", "mean_shifted":
            message = "result 0 at [3, 7, 120]: expected 1.53125, got 1.609375: 6.21 times the error bound; 812 of 8192"
            return _wrong("bound", message + " elements are beyond it", E=6.21, R=2.4)
        case "mla_decode", "float16", "mean_shifted":
            return _wrong("nonfinite", "result 0 at [0, 0]: expected 2.5, got nan; NaN is misplaced at 128 of 8192")
        case "rms_norm", "bfloat16", "tiny" if kernel == "acme.vector":
            return _wrong(
                "rms", "result 0: its rms error is 1.62 times what native torch's allows for, > 1.25", 0.81, 1.62
            )
        case "fp8_gemm", "float8_e4m3fnuz", _:
            return {"status": "unsupported", "message": "acme.fast takes float8_e4m3fn, got float8_e4m3fnuz"}
        case "moe_align_block_size", "int64", "b24_empty":
            message = "the worker died by signal 11 (SIGSEGV) while the kernel ran\nlast line: illegal memory access"
            return {"status": "crashed", "check": "crash", "message": message, "kernel_seconds": None, "ran": ""}
        case "grouped_topk", "bfloat16", "b22_capture":
            message = "RuntimeError: operation not permitted when stream is capturing (at route, acme.py:88)"
            return {"status": "error", "check": "RuntimeError", "message": message, "kernel_seconds": None, "ran": ""}
        case "store_kv_cache", "float32", "b19_selection_key":
            return {
                "status": "xfailed",
                "check": "copy",
                "message": "known: https://example.org/acme/issues/41: differs",
            }
        case "silu_and_mul", "float16", "unit" if "/deepseek/" in id:
            message = (
                "is listed as a known failure (https://example.org/acme/issues/12), but does not fail: remove the entry"
            )
            return {"status": "xpassed", "check": "xfail", "message": message}
    if layout == "rows" and op == "apply_rope":
        return {"status": "unsupported", "message": "needs contiguous rows"}
    return {}


def _wrong(check: str, message: str, E: float | None = None, R: float | None = None) -> dict[str, Any]:
    return {"status": "wrong", "check": check, "message": message, "E": E, "R": R}


def many(number: int = 5000, failing: float = 0.02, **changes: Any) -> Report:
    """A report of about ``number`` cases over 48 ops."""
    draw, cases, counts = random.Random(number), [], Counter[str]()
    regimes = (
        "unit",
        "tiny",
        "mean_shifted",
        "saturating",
        "ties",
        "b24_empty",
        "b25_strides",
        "b22_capture",
        "b23_replay",
    )
    names = [f"{op}_{suffix}" for op in OPS for suffix in ("forward", "fused", "paged", "grouped")]
    per_op = -(-number // len(names))
    for op in names:
        axes = itertools.product(("float32", "bfloat16", "float16", "float8_e4m3fn"), regimes, range(1, 99))
        for dtype, regime, n in itertools.islice(sorted(axes, key=lambda axis: axis[2]), per_op):
            id = f"{op}/deepseek/n{n}-d7168/{dtype}/contiguous/{regime}/{n % 3}"
            fate: dict[str, Any] = {}
            if draw.random() < failing:
                fate = _wrong(
                    "bound", f"result 0 at [{n}, 7]: expected 1.5, got 1.75: 9.1 times the error bound", 9.1, 4.0
                )
            elif dtype == "float8_e4m3fn" and op.startswith("r"):
                fate = {"status": "unsupported", "message": "takes float32, bfloat16, float16, got float8_e4m3fn"}
            cases.append(case(id, **fate))
            counts[op] += 1
    return Report.of(
        environment=environment(**changes),
        profile="deepseek",
        seeds=(0, 1, 2),
        profile_ids=dict(counts) | {f"native_only_{i}": 40 for i in range(5)},
        scopes=[OpScope(op=op, offered=("acme.fast",)) for op in names]
        + [OpScope(op=f"native_only_{i}", falls_to="native") for i in range(5)],
        cases=cases,
    )


NASTY = '</script><b>bold</b><img src=x onerror="hacked()">\'"&amp;{{ 7 * 7 }}<!-- \u2028 \x00 ]]>'


def nasty() -> Report:
    """Hostile text wherever a report has text."""
    id = f"rms_norm/core/{NASTY.replace('/', '|')}/float32/contiguous/unit/0"
    cases = [
        case(id, status=status, check=NASTY, message=NASTY, ran=NASTY, kernel=f"{NASTY}.{status}", reproduce=NASTY)
        for status in ("wrong", "xfailed", "unsupported", "correct")
    ]
    kernels = {"rms_norm": tuple(case.kernel for case in cases)}
    unavailable = {"tree_verify": {NASTY: NASTY}}
    fields = ("backend", "backend_version", "device", "arch", "date", "command", "cpu", "os", "selection")
    hostile: dict[str, Any] = dict.fromkeys(fields, NASTY)
    hostile |= {"libraries": {NASTY: NASTY}, "settings": {NASTY: NASTY}}
    return build(cases, kernels, unavailable=unavailable, **hostile)
