"""What can be wrong with a checkpoint or a request, in words that name it."""

from __future__ import annotations

from torch_hal import HalError


class ConfigError(HalError, ValueError):
    """A config that lacks a field, contradicts itself or asks for something that is not supported; named."""


class CheckpointError(HalError, ValueError):
    """A checkpoint that cannot be loaded; the message names each tensor at fault and its file."""


class CacheFull(HalError, RuntimeError):
    """The KV cache has too few free pages for what was asked."""


class ParallelError(HalError, ValueError):
    """A model that cannot be spread over processes as asked; what does not divide is named."""
