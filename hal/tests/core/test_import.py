"""The public surface, and what importing it costs: names, modules, typing, worker processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import torch_hal as hal

from .helpers import H200

SURFACE = set(
    """
    ArgumentError Band Contracts DeviceInfo DeviceUnavailable Explanation FallbackWarning HalError Kernel Library
    Manifest Op OpSet PluginError PluginWarning Policy PolicyError Prepared Requires Trait Unsupported
    bind devices explain hookimpl op ops refresh register unregister
    """.split()  # noqa: SIM905 (a list of names, to read)
)


def test_the_public_surface_changes_on_purpose_only() -> None:
    assert set(hal.__all__) == SURFACE and len(hal.__all__) == len(SURFACE)
    for name in hal.__all__:
        assert getattr(hal, name).__doc__, f"{name} is not documented"
    namespace: dict[str, object] = {}
    exec("from torch_hal import *", namespace)
    assert set(namespace) >= SURFACE
    with pytest.raises(AttributeError, match="module 'torch_hal' has no attribute 'Polcy'"):
        _ = hal.Polcy


def test_the_package_is_typed_and_says_its_version() -> None:
    assert (Path(hal.__file__).parent / "py.typed").exists()
    assert hal.__version__.count(".") == 2


def test_every_declared_op_is_an_attribute_of_ops() -> None:
    from torch_hal.op import declared

    for name, op in declared().items():
        if op.reference.__module__.startswith("torch_hal."):
            assert getattr(hal.ops, name) is op
            assert op.__doc__ and ("Returns" in op.__doc__ or op.mutates)


IMPORTS = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import torch_hal
took = time.perf_counter() - started
imported = set(sys.modules) - before
started = time.perf_counter()
kernels = [kernel.id for kernel in torch_hal.refresh().kernels]
devices = [str(device) for device in torch_hal.devices()]
listed = time.perf_counter() - started
ops_at_import = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torch_hal::")]
packages = sorted({name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names))
print(json.dumps({"packages": packages, "took": took, "listed": listed, "ops": ops_at_import}))
"""


def test_importing_brings_pluggy_alone_and_registers_nothing_with_torch(run_python: Callable[..., str]) -> None:
    report = json.loads(run_python(IMPORTS))
    assert set(report["packages"]) <= {"torch_hal", "torch", "pluggy"}
    assert report["ops"] == []
    assert report["took"] < 1.0 and report["listed"] < 1.0  # the targets are `nox -s bench -- dispatch`'s


def test_what_describes_a_device_and_a_choice_goes_to_worker_processes() -> None:
    device = replace(H200, versions={"torch": "2.11"})
    assert pickle.loads(pickle.dumps(device)) == device
    manifest = hal.bind("cpu").manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    policy = hal.Policy(prefer={"rms_norm": "native"})
    assert pickle.loads(pickle.dumps(policy)) == policy
