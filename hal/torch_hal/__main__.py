"""``python -m torch_hal``: the same as ``torch-hal``."""

from __future__ import annotations

from .cli import main

raise SystemExit(main())
