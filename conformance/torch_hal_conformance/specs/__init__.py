"""How to make calls of each op: one module a family, each with its ``SPECS``."""

from __future__ import annotations
