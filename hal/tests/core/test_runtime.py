"""Runtime services on the host, and on a stand-in device module for what the host has not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_hal as hal
from torch_hal.runtime import Runtime, group_name

from .helpers import H200

SECOND = replace(H200, index=1)


@pytest.fixture
def host() -> Runtime:
    return Runtime(hal.bind("cpu").device)


def test_the_host_synchronises_and_has_one_stream(host: Runtime) -> None:
    host.synchronize()
    with host.side_stream() as join:
        x = torch.ones(3) * 2
    join()
    assert x.tolist() == [2.0] * 3


def test_the_host_has_no_graphs_and_says_so(host: Runtime) -> None:
    with pytest.raises(hal.Unsupported, match="device cpu: has no graph capture; call the function instead"):
        host.capture(lambda: None)


def test_memory_is_what_is_free_and_all_there_is(host: Runtime) -> None:
    memory = host.memory()
    assert 0 < memory.free <= memory.total
    assert memory.total == hal.devices()[0].memory_total


def test_generators_repeat_by_seed(host: Runtime) -> None:
    a, b, c = (torch.rand(4, generator=host.generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_asking_for_the_name_of_no_group_says_what_is_missing() -> None:
    with pytest.raises(hal.Unsupported, match="init_process_group first"):
        group_name()


def test_a_process_group_is_known_to_ops_by_its_name(host: Runtime, tmp_path: Path) -> None:
    name = host.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert name == group_name()
        other = host.new_group([0])
        assert other and other != name
        ops = hal.bind("cpu")
        for group in (name, other):
            assert ops.all_reduce(torch.full((2,), 3.0), group).tolist() == [3.0, 3.0]
        with pytest.raises(hal.ArgumentError, match=r"argument 'group'.*'no_such_group'"):
            ops.all_reduce(torch.ones(2), "no_such_group")
    finally:
        dist.destroy_process_group()


class Recorder:
    """A device module that writes down what it is asked for, in order; every question names the device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = self.stream_of("main")

    def stream_of(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def current_stream(self, device: torch.device) -> Any:
        assert device == torch.device("cuda:1")
        return self.main

    def Stream(self, device: torch.device) -> Any:
        assert device == torch.device("cuda:1")
        return self.stream_of("side")

    def block(self, name: str) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            self.log.append(f"enter {name}")
            yield
            self.log.append(f"leave {name}")

        return entered()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.block(f"stream {stream.name}")

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return self.block(str(device))

    def graph(self, graph: Any, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.block(f"graph on {stream.name}")

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"synchronise {device}")

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10 + index, 100


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_capture_warms_up_on_a_side_stream_then_records_and_replays(recorder: Recorder) -> None:
    def work() -> str:
        recorder.log.append("work")
        return "results"

    graph = Runtime(SECOND).capture(work)
    graph.replay()
    assert graph.results == "results"
    log = recorder.log
    assert log[:5] == ["side waits for main", "enter stream side", "work", "work", "leave stream side"]
    assert log[5:7] == ["main waits for side", "synchronise cuda:1"]
    assert log[7:] == ["enter cuda:1", "enter graph on side", "work", "leave graph on side", "leave cuda:1", "replay"]


def test_a_device_says_what_memory_it_has_itself_and_the_host_where_they_share(recorder: Recorder) -> None:
    assert Runtime(SECOND).memory() == (11, 100)
    shared = Runtime(replace(H200, integrated=True)).memory()
    assert shared.total > 1 << 20
