"""What a model needs of a device beside ops: streams, graph capture, memory, random state, process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .device import DeviceInfo
from .errors import Unsupported


class Memory(NamedTuple):
    """Bytes that a device has free and in all."""

    free: int
    total: int


@dataclass(frozen=True)
class Graph:
    """A captured piece of work: `replay` runs it again on what its input tensors hold now, filling ``results``."""

    replay: Callable[[], None]
    results: Any


class Runtime:
    """Services of one device, by what its `DeviceInfo` says; no vendor is named here."""

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device.type)

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        self._module.synchronize(self.device.torch_device)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[Callable[[], None]]:
        """Run the block on another stream that starts after the current one's work.

        Yields ``join``: calling it makes the stream that was current wait for the block. On a device without
        streams (the host) the block simply runs.
        """
        if self.device.type == "cpu":
            yield lambda: None
            return
        current = self._module.current_stream(self.device.torch_device)
        side = self._module.Stream(self.device.torch_device)
        side.wait_stream(current)
        with self._module.stream(side):
            yield lambda: current.wait_stream(side)

    def capture(self, function: Callable[[], Any], warmups: int = 2) -> Graph:
        """Record ``function`` as a device graph after running it ``warmups`` times on a side stream.

        Raises Unsupported where the device has no graphs. ``function`` reads its inputs from tensors that the caller
        keeps and overwrites between replays.
        """
        if self.device.graph_class is None:
            raise Unsupported(f"device {self.device}: has no graph capture; call the function instead")
        with self.side_stream() as join:
            for _ in range(warmups):
                function()
        join()
        self.synchronize()
        graph = getattr(self._module, self.device.graph_class)()
        # A stream of this device: the default one belongs to whichever device was current when it was first used.
        stream = self._module.Stream(self.device.torch_device)
        with self._module.device(self.device.torch_device), self._module.graph(graph, stream=stream):
            results = function()
        return Graph(graph.replay, results)

    def memory(self) -> Memory:
        """Free and total bytes; for a device that shares the host's memory, both are the host's."""
        if self.device.type == "cpu" or self.device.integrated:
            return _host_memory()
        free, total = self._module.mem_get_info(self.device.index)
        return Memory(free, total)

    def generator(self, seed: int) -> torch.Generator:
        """A random generator on the device, seeded."""
        return torch.Generator(self.device.torch_device).manual_seed(seed)

    def init_process_group(self, **options: Any) -> str:
        """Join the default process group with the device's backend; returns its name, which ops take."""
        dist.init_process_group(backend=self.device.dist_backend, **options)
        return group_name()

    def new_group(self, ranks: Sequence[int]) -> str:
        """A process group of these ranks, by name. Every rank of the default group must call it."""
        group = dist.new_group(list(ranks), backend=self.device.dist_backend)
        return str(getattr(group, "group_name", ""))


def group_name(group: dist.ProcessGroup | None = None) -> str:
    """The name by which ops know a process group; None means the default one."""
    known = group or dist.group.WORLD
    if known is None:
        raise Unsupported("there is no process group yet: call Runtime.init_process_group first")
    return str(known.group_name)


def _host_memory() -> Memory:
    with open("/proc/meminfo") as lines:
        fields = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return Memory(fields["MemAvailable"], fields["MemTotal"])
