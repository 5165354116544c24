"""How an 8-bit MLA cache stores a token. Its fp8 kind is the cache's dtype; the rest of the format has a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class KvFormat:
    """One row of the cache, byte after byte: L latent codes, the float32 scales of their tiles, the rotated part.

    A code decodes to code · scale; without tiles, to the code itself: then the latent is cast as it is.
    """

    name: str
    tile: int = 0  # consecutive latent elements that share a scale; 0: no scales
    rope_bytes: int = 1  # of an element of the rotated part: 1, a code without scale, or 2, a bfloat16

    def scale_bytes(self, kv_lora_rank: int) -> int:
        """Bytes of a row's scales."""
        return 4 * kv_lora_rank // self.tile if self.tile else 0

    def row_bytes(self, kv_lora_rank: int, rope_dim: int) -> int:
        """Bytes of a row: the last dimension of the cache."""
        return kv_lora_rank + self.scale_bytes(kv_lora_rank) + self.rope_bytes * rope_dim

    def rope_dim(self, row_bytes: int, kv_lora_rank: int) -> int:
        """Elements of the rotated part in a row of so many bytes."""
        return (row_bytes - self.row_bytes(kv_lora_rank, 0)) // self.rope_bytes

    def fits(self, row_bytes: int, kv_lora_rank: int) -> bool:
        """Whether a row of so many bytes can have a latent of this rank."""
        whole_tiles = self.tile == 0 or kv_lora_rank % self.tile == 0
        rest = row_bytes - self.row_bytes(kv_lora_rank, 0)
        return kv_lora_rank > 0 and whole_tiles and rest >= 0 and rest % self.rope_bytes == 0


KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType(
    {
        # L + R codes, cast without scale: 576 bytes. SGLang's MLA cache, FlashMLA's dense fp8 decoding
        "flat": KvFormat("flat"),
        # L codes, a scale for each 128 of them, R bfloat16: 656 bytes. vLLM's fp8_ds_mla, FlashMLA's sparse decoding
        "ds_mla": KvFormat("ds_mla", tile=128, rope_bytes=2),
    }
)
