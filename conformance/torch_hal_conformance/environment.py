"""The record of everything that a result depends on."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import torch_hal

from . import __version__
from .report.schema import Environment, Evidence
from .subjects import Subject

SOURCES = (".py", ".txt", ".html", ".css", ".js", ".json", ".toml", ".ini", ".jinja", ".tmpl")


@functools.cache
def source_digest() -> str:
    """SHA-256 of all that judges: the suite's own files and torch_hal's, which declares what is right."""
    digest = hashlib.sha256()
    for root in (Path(__file__).parent, Path(torch_hal.__file__).parent):
        names = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in SOURCES}
        for name, path in sorted(names.items()):
            if any(part.startswith(".") for part in name.split("/")) or not path.is_file():  # what tools leave
                continue
            digest.update(f"{root.name}/{name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def environment(subject: Subject, command: str) -> Environment:
    info = subject.device
    distribution, version = subject.distribution
    host = info.type == "cpu"
    return Environment(
        suite_version=__version__,
        source_digest=source_digest(),
        torch_hal=torch_hal.__version__,
        backend=subject.backend,
        backend_version=version,
        backend_distribution=distribution,
        device=_cpu() if host else info.name,
        device_type=info.type,
        arch=info.arch or (platform.machine() if host else ""),
        driver=info.versions.get("driver", "none" if host else ""),
        evidence=_evidence(subject),
        torch=torch.__version__,
        python=platform.python_version(),
        libraries={**dict(info.versions), **_installed("numpy", "triton", "pydantic")},
        os=platform.platform(),
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_gib=subject.memory_gib,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        settings={k: v for k, v in sorted(os.environ.items()) if k.startswith("TORCH_HAL_")},
    )


def _evidence(subject: Subject) -> Evidence:
    """How much a run says of hardware."""
    if "emulated" in subject.device.features:
        return "emulated"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    return "host" if subject.device.type == "cpu" else "device"


def _installed(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _cpu() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware", "CPU part"))
    )
    return next((model for model in models if model), platform.processor() or platform.machine())
