"""Errors and warnings, written for the person who reads them: op, argument, expected, got, what to do."""

from __future__ import annotations

FATAL = (KeyboardInterrupt, GeneratorExit, MemoryError)  # the process's own, not the failure of a plugin it runs


class HalError(Exception):
    """Base of every error that torch_hal raises itself."""


class ArgumentError(HalError, ValueError):
    """A call's argument breaks the op's contract: the message names op, argument, expected and got."""


class Unsupported(HalError, RuntimeError):
    """No kernel may serve: the message lists every candidate with its reason."""


class DeviceUnavailable(HalError, RuntimeError):
    """The device asked for cannot be used: the message gives the cause and the remedy."""


class PolicyError(HalError, ValueError):
    """A policy that cannot mean anything: an unknown field, or a pattern that matches nothing."""


class PluginError(HalError):
    """A plugin or one of its kernels breaks a rule: the message names the plugin and the rule."""


class FallbackWarning(UserWarning):
    """An op runs on another kernel than the one that would have come first: from what, to what, why."""


class PluginWarning(UserWarning):
    """A plugin was left out: its name and the exception."""


def describe(error: BaseException) -> str:
    """``Type: text`` of a foreign exception, in one line. Never raises, though the exception's own ``__str__`` may."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())
    except Exception as failure:
        return f"{type(error).__name__} (whose text raised {type(failure).__name__})"
