"""Tests of the core: discovery, selection, call frames, compilers, commands."""

from __future__ import annotations
