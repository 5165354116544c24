"""What every rank process needs, done once in the server that they are forked from: it takes seconds.

Nothing here may look for devices or load plugins: a device that was used before a fork is of no use after it.
"""

from __future__ import annotations

import torch._dynamo.repro.after_dynamo  # noqa: F401  (brings most of what a first compilation imports)

from torch_hal.op import declared

from . import ranks_worker  # noqa: F401
from .spec import specs

specs()
for op in declared().values():
    _ = op.checker, op.schema
