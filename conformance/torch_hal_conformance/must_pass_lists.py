"""The must-pass lists: ``python -m torch_hal_conformance.must_pass_lists`` writes them anew.

They are checked in so that a case that comes, goes or changes its name shows in a diff; a test compares them with the
cases that there are.
"""

from __future__ import annotations

from pathlib import Path

from .cases import every_case
from .spec import PROFILES

FOLDER = Path(__file__).parent / "mustpass"


def text(profile: str) -> str:
    """The ids of one profile alone, a line each."""
    return "".join(f"{id}\n" for id, case in every_case().items() if case.profile == profile)


def main() -> None:
    for profile in PROFILES:
        (FOLDER / f"{profile}.txt").write_text(text(profile), encoding="utf-8")
        print(f"{profile}: {text(profile).count(chr(10))} cases")


if __name__ == "__main__":
    main()
