"""Pages made from the declarations while the site is built: one for each op family, one for the Python interface."""

from __future__ import annotations

import dataclasses
import enum
import html
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import torch_hal as hal
from torch_hal import native, plugins
from torch_hal.kernel import Kernel, Library
from torch_hal.op import Op, declared
from torch_hal.twins import with_twins


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the navigation."""
    assert config.nav is not None
    config.nav += [{"Conformance": ["conformance-selftest.md"]}] if SELFTEST.exists() else []
    config.nav += [{"Ops": [f"ops/{family}.md" for family in families()]}, {"Reference": ["api.md"]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Write the generated pages."""
    for family, ops in families().items():
        files.append(File.generated(config, f"ops/{family}.md", content=family_page(family, ops)))
    files.append(File.generated(config, "api.md", content=api_page()))
    if SELFTEST.exists():
        files.append(File.generated(config, "conformance-selftest.md", content=selftest_page()))
    return files


SELFTEST = Path(__file__).with_name("selftest.json")  # written by ``nox -s conformance_selftest -- --json``


def selftest_page() -> str:
    """Which wrong backends the conformance suite was shown, and the case that kills each."""
    findings = json.loads(SELFTEST.read_text(encoding="utf-8"))
    parts: dict[str, list[dict[str, Any]]] = {"mutants": [], "variants": [], "generated": []}
    for finding in findings:
        parts[finding["part"]].append(finding)
    killed = [f for f in parts["generated"] if f["case"]]
    spared = [f for f in parts["generated"] if not f["case"]]
    by_op = {op: [f for f in parts["generated"] if f["op"] == op] for op in sorted({f["op"] for f in findings})}
    rate = [(f"`{op}`", f"{sum(bool(f['case']) for f in made)} of {len(made)}") for op, made in by_op.items() if made]
    return "\n\n".join(
        [
            "# What the suite is tested with",
            "Made by `nox -s conformance_selftest -- --json docs/selftest.json` from one run.",
            f"## Wrong backends, written by hand\n\n{len(parts['mutants'])} mutants; each died in the case and by the "
            "check that it names.",
            table(("op", "mutant", "what is wrong", "check", "case"), map(mutant_row, parts["mutants"])),
            "## Right backends\n\nOne computes in float64 and rounds once, one sums in another order: nothing may be "
            "found wrong with either, on 20 seeds. One gives zeros: nothing may be found right.",
            table(("op", "backend", "found"), ((f"`{f['op']}`", f["name"], f["detail"]) for f in parts["variants"])),
            f"## Wrong backends, made from the references\n\nOne change each in a reference's syntax tree: "
            f"{len(killed)} of {len(killed) + len(spared)} die in core; the others, below, are explained.",
            table(("op", "killed"), rate),
            table(("mutant that lives", "why"), ((f"`{f['name']}`", f["detail"]) for f in spared)),
        ]
    )


def mutant_row(finding: dict[str, Any]) -> tuple[str, ...]:
    case = finding["case"].partition("/")[2]
    return f"`{finding['op']}`", f"`{finding['name']}`", finding["detail"], finding["check"], f"`{case}`"


def families() -> dict[str, list[Op[..., Any]]]:
    """Ops by family, in the order of their declaration."""
    grouped: dict[str, list[Op[..., Any]]] = {}
    for op in declared().values():
        grouped.setdefault(op.family, []).append(op)
    return dict(sorted(grouped.items()))


def family_page(family: str, ops: list[Op[..., Any]]) -> str:
    about = inspect.getdoc(inspect.getmodule(ops[0].reference)) or ""
    title = "MoE " + family.removeprefix("moe_") if family.startswith("moe_") else family.replace("_", " ").capitalize()
    return "\n\n".join([f"# {title}", about.replace("``", "`"), *map(op_section, ops)]) + "\n"


def op_section(op: Op[..., Any]) -> str:
    offered = with_twins(plugins.discover().kernels, dict(declared()))
    kernels = [k for k in (*offered, native.native_kernel(op)) if k.op == op.name]
    arguments = [(f"`{name}`", f"`[{', '.join(dims.split())}]`", dtypes(op, name)) for name, dims in op.shapes.items()]
    parts = [
        f"## {op.name}",
        fenced("python", header(op.name, op.signature)),
        fenced("text", inspect.cleandoc(op.reference.__doc__ or "")),
        f"Schema: `{op.schema}`, contract version {op.version}." + twin(op),
        table(("argument", "shape", "dtype"), arguments),
        "\n".join(f"- {meaning}: `{test}`" for test, meaning in op.where.items()),
        numbers(op),
        table(("contract", "position"), op.contracts.items()),
        table(("kernel", "rank", "needs", "declares"), map(kernel_row, kernels)),
    ]
    return "\n\n".join(parts)


def dtypes(op: Op[..., Any], name: str) -> str:
    allowed = op.dtypes.get(name, "any")
    names = [str(d).removeprefix("torch.") for d in (allowed if isinstance(allowed, tuple) else (allowed,))]
    return " or ".join(f"that of `{n}`" if n in op.shapes else n for n in names)


def twin(op: Op[..., Any]) -> str:
    return f" In-place twin of [`{op.twin_of}`](#{op.twin_of})." if op.twin_of else ""


def numbers(op: Op[..., Any]) -> str:
    accumulator = str(op.accumulates).removeprefix("torch.")
    return (
        f"Accumulates in {accumulator}, rounds {op.rounds}×; longest sum: `{op.reduces}` terms; "
        f"floating-point operations: `{op.flops}`."
    )


def kernel_row(kernel: Kernel) -> tuple[str, str, str, str]:
    needs = kernel.requires
    library = f"{needs.library.name}{needs.library.version}" if isinstance(needs.library, Library) else ""
    wants = filter(None, [needs.vendor, " or ".join(needs.arch), *sorted(needs.features), library])
    declares = [*sorted(kernel.traits), *([f"layout {kernel.layout}"] if kernel.prepare or kernel.plan else [])]
    return f"`{kernel.id}`", kernel.band.name.lower(), ", ".join(wants) or "any device", ", ".join(declares)


def api_page() -> str:
    """Every public name with its signature and docstring."""
    intro = "# Python interface\n\nEverything that `import torch_hal as hal` promises; what is not here may change."
    return "\n\n".join([intro, *(api_section(name, getattr(hal, name)) for name in sorted(hal.__all__))]) + "\n"


def api_section(name: str, value: Any) -> str:
    parts = [f"## {name}"]
    if inspect.isfunction(value):
        parts.append(fenced("python", header(name, inspect.signature(value)).replace("'", "")))  # round annotations
    parts.append(fenced("text", inspect.getdoc(value) or ""))
    if isinstance(value, type) and issubclass(value, enum.Enum):
        parts.append(table(("member", "value"), ((f"`{m.name}`", f"`{m.value!r}`") for m in value)))
    elif dataclasses.is_dataclass(value):
        fields = [(f"`{f.name}`", code(str(f.type)), default(f)) for f in dataclasses.fields(value)]
        parts.append(table(("field", "type", "default"), fields))
    return "\n\n".join(parts)


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return code(repr(field.default))
    made = field.default_factory
    return "" if made is dataclasses.MISSING else f"`{getattr(made, '__name__', 'made anew')}()`"


def header(name: str, signature: inspect.Signature) -> str:
    """A function's name, parameters and result, on one line where it fits."""
    text = f"{name}{signature}"
    if len(text) > 100:
        lines = [str(parameter) for parameter in signature.parameters.values()]
        keyword_only = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in signature.parameters.values()]
        if True in keyword_only:
            lines.insert(keyword_only.index(True), "*")
        result = inspect.formatannotation(signature.return_annotation)
        text = "\n".join([f"{name}(", *(f"    {line}," for line in lines), f") -> {result}"])
    return text.replace("torch.Tensor", "Tensor")


def code(text: str) -> str:
    """Code in a table's cell, whatever is in it: neither tags, nor the table's bars, nor its own backticks."""
    escaped = html.escape(text, quote=False).replace("|", "&#124;").replace("`", "&#96;")
    return f"<code>{escaped}</code>"


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
