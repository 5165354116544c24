"""The conformance suite of torch_hal: whether a backend's kernels mean what the ops' declarations say.

A case is an op, arguments made from a seed, and what is to be seen (`cases`). A worker process runs a backend's kernel
on it (`worker`, `judge`), compares with the op in float64 on the same bits (`oracle`, `verdict`), and sends back one
`report.schema.CaseResult`. pytest collects the cases and gathers the results (`plugin`, `test_conformance`).
"""

from __future__ import annotations

__version__ = "0.1.0"
