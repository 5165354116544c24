"""What a bound set chose, to log, compare and replay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class Manifest:
    """A bound set's choices, to log, compare and replay: op → kernels that may run, the chosen one first."""

    device: Mapping[str, Any]
    ops: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        """sha256 of the choices, equal wherever the same kernels would run on the same arch."""
        choices = {op: [[k["plugin"], k["kernel"]] for k in entry["chain"]] for op, entry in self.ops.items()}
        text = json.dumps([self.device["vendor"], self.device["arch"], choices], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "device": dict(self.device),
            "versions": dict(self.versions),
            "ops": dict(self.ops),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of `to_json`. Raises ValueError for other JSON, or where the digest does not fit the choices."""
        data = json.loads(text)
        try:
            manifest = cls(data["device"], data["ops"], data["versions"])
            fits = manifest.digest == data["digest"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"manifest: not one of ours: {type(error).__name__}: {error}") from None
        if not fits:
            raise ValueError(
                f"manifest: digest {data['digest'][:12]}… is not that of its choices, {manifest.digest[:12]}…: edited?"
            )
        return manifest

    def pin(self, policy: Policy | None = None) -> Policy:
        """A policy under which exactly these kernels run, or bind raises; other fields as in ``policy``."""
        from .policy import Policy

        pinned = {op: tuple(f"{k['plugin']}.{k['kernel']}" for k in entry["chain"]) for op, entry in self.ops.items()}
        base = {name: getattr(policy, name) for name in policy.model_fields_set} if policy else {}
        return Policy(**{**base, "prefer": {}, "require": {}, "deny": {}, "pinned": pinned})
