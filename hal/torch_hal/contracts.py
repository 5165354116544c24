"""The cross-cutting contracts C1–C14: what every op promises unless its declaration says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Contracts:
    """An op's position on each contract; the defaults hold for every op that does not override them.

    The texts are appended to each op's page and docstring, and each is a test in ``hal/tests/test_contracts.py``.
    """

    C1_empties: str = "Zero rows give zero rows of the right shape and dtype, without a kernel launch."
    C2_index_width: str = "Offsets are 64-bit: tensors may hold more than 2³¹ elements."
    C3_strides: str = "Outer strides are free; a kernel that needs more refuses, it never copies unseen."
    C4_mutation: str = "Functional: inputs are not modified, results never alias them, and are contiguous."
    C5_fp8_kind: str = "No fp8 involved."
    C6_fp8_cast: str = "No fp8 cast."
    C7_sentinels: str = "None: every index must be valid."
    C8_unwritten_rows: str = "Every element of every result is written."
    C9_rounding: str = "Computed in float32 and rounded once to the result's dtype."
    C10_determinism: str = (
        "Equal inputs give bitwise equal results on one device and kernel, if the kernel declares it."
    )
    C11_capture: str = "No host sync and no data-dependent shape: capturable."
    C12_scale_owner: str = "Applies no routed scaling factor."
    C13_ids: str = "Takes and gives no ids."
    C14_registration: str = (
        "Schema and mutation come from this declaration; opaque kernels register `torch_hal::<op>__<kernel>`."
    )

    def items(self) -> list[tuple[str, str]]:
        """(``C1 empties``, position) for each contract."""
        return [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
