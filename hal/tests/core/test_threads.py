"""Threads bind, call, register and compile at once; a forked child finds what its parent had."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import torch_hal as hal
from torch_hal import plugins

from .helpers import Offer, collected, messages, refuse_long, rms_norm_arguments, rms_norm_kernel, write_acme

THREADS = 8


def together(work: Callable[[int], Any]) -> list[Any]:
    """``work(i)`` in every thread, begun at the same moment."""
    barrier = threading.Barrier(THREADS)

    def begin(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def test_threads_that_bind_at_once_discover_probe_and_register_once(site: Path) -> None:
    write_acme(site)
    source = (site / "acme_hal.py").read_text()
    (site / "acme_hal.py").write_text("import time\ntime.sleep(0.05)\n" + source)
    probes: list[str] = []

    def probe(device: hal.DeviceInfo) -> None:
        time.sleep(0.05)
        probes.append(str(device))

    kernel = rms_norm_kernel("at_once", requires=hal.Requires(library=hal.Library("torch", probe=probe)))
    hal.register(Offer(kernel), "globex")
    plugins._current = None  # as in a process that has discovered nothing yet
    policy = hal.Policy(prefer={"rms_norm": "at_once"})
    sets = together(lambda i: hal.bind("cpu", policy))
    assert len({ops.manifest.digest for ops in sets}) == 1
    assert {ops.rms_norm.kernel.name for ops in sets} == {"at_once"}
    assert probes == ["cpu"]
    assert all((ops.rms_norm(*rms_norm_arguments()) == 7).all() for ops in sets)


def test_a_broken_plugin_is_tried_once_by_many_threads(site: Path) -> None:
    write_acme(site)
    (site / "acme_hal.py").write_text("import time\ntime.sleep(0.05)\nraise OSError('gone')")
    plugins._current = None  # as in a process that has discovered nothing yet
    with collected() as caught:
        together(lambda i: hal.bind("cpu"))
    assert len(messages(caught, hal.PluginWarning)) == 1


def test_threads_that_call_one_set_at_once_get_their_own_results_and_one_warning() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(trace=True))

    def work(i: int) -> int:
        right = 0
        for n in range(50):
            rows = 1 + (i + n) % 8
            x, weight, eps = torch.full((rows, 8), float(i + 1)), torch.ones(8), 0.0
            y = ops.rms_norm(x, weight, eps)
            expected = 7.0 if rows <= 4 else 1.0
            right += bool(torch.allclose(y, torch.full_like(y, expected)))
        return right

    with collected() as caught:
        assert together(work) == [50] * THREADS
    assert 1 <= len(messages(caught, hal.FallbackWarning)) <= 2  # no lock at a call: two may meet at the first
    assert ops.trace is not None and sum(ops.trace.counts().values()) == 50 * THREADS


def test_threads_may_register_plugins_while_others_bind() -> None:
    def work(i: int) -> str:
        hal.register(Offer(rms_norm_kernel(f"by_{i}", value=float(i), band=hal.Band.PORTABLE)), f"thread_{i}")
        ops = hal.bind("cpu", hal.Policy(require={"rms_norm": f"by_{i}"}))
        assert (ops.rms_norm(*rms_norm_arguments()) == i).all()
        return str(ops.rms_norm.kernel.plugin)

    assert together(work) == [f"thread_{i}" for i in range(THREADS)]
    assert len([p for p in plugins.discover().loaded if p.name.startswith("thread_")]) == THREADS


def test_import_and_listing_survive_a_fork(run_python: Callable[..., str]) -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch_hal as hal
before = [k.id for k in hal.plugins.discover().kernels], [str(d) for d in hal.devices()]
child = os.fork()
if child == 0:
    same = before == ([k.id for k in hal.refresh().kernels], [str(d) for d in hal.devices()])
    x = __import__("torch").ones(2, 4)
    ones = bool((hal.bind("cpu").rms_norm(x, x[0], 0.0) == 1).all())
    os._exit(0 if same and ones else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code).strip() == "0"


def test_a_child_forked_while_other_threads_bind_and_probe_hangs_on_no_lock(run_python: Callable[..., str]) -> None:
    code = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
import torch_hal as hal
from torch_hal.lock import LOCK, no_return

class Acme:
    @hal.hookimpl
    def torch_hal_devices(self):
        return [hal.DeviceInfo("acme", "xpu")]

    @hal.hookimpl
    def torch_hal_probe(self, device):
        return device

    @hal.hookimpl
    def torch_hal_kernels(self):
        library = hal.Library("torch", probe=lambda device: None)
        run = lambda x, weight, eps: x
        return [hal.Kernel("rms_norm", "forked", run, requires=hal.Requires(library=library))]

hal.register(Acme(), "acme")
held, done = threading.Event(), threading.Event()

def hold():
    with LOCK, no_return("discovery", "busy"):
        held.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    hal.refresh()
    hal.devices()
    names = [hal.bind(device).rms_norm.kernel.name for device in ("cpu", "xpu")]
    os._exit(0 if names == ["forked", "forked"] else 1)
print(os.waitpid(child, 0)[1])
done.set()
with LOCK:  # the parent's still works, and a child that holds it keeps it
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        hal.refresh()
if child == 0:
    with LOCK:
        os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code).split() == ["0", "0"]


def test_no_module_has_a_lock_of_its_own() -> None:
    """It would hang a forked child, and could be taken in the other order."""
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
    modules = {name: module for name, module in sys.modules.items() if name.startswith("torch_hal.")}
    assert [
        (m, n) for m, module in modules.items() for n, value in vars(module).items() if isinstance(value, kinds)
    ] == []
