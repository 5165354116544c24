"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1).

A token's keys and values for all heads are expanded from one latent vector c of width L, and one rotary key of width
R that all heads share. Only these L + R numbers are cached. There are two ways to attend, equal in exact arithmetic:

* *expanded*: compute keys and values of every head from the latents (W_UK·c, W_UV·c), then ordinary multi-head
  attention. Least work when many queries share the keys: prefill.
* *absorbed*: since q·(W_UK·c) = (W_UKᵀ·q)·c, move W_UK to the query and W_UV behind the softmax. All heads then
  attend to the cached latents themselves, as to one shared key-value head. Least memory traffic: decode.

Shapes, as suffixes: T tokens · B sequences · S new tokens of each sequence · D hidden · H heads ·
N key width without position · R rotary width · P = N + R · V value width · L latent width
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Decode, Prefill
from .layers import Build, Linear, Norm, linear
from .parallel import Span, share
from .weights import Targets

LATENT_NORM_EPS = 1e-6  # of q_a and kv_a norms: the released code takes its default there, whatever the config says


class MLA:
    """One layer's attention, in the heads that this rank holds. Sum it over ranks."""

    def __init__(self, build: Build, prefix: str, rope_table: Tensor) -> None:
        c = build.config
        self.ops, self.rope_table, self.interleaved = build.ops, rope_table, c.rope_interleave
        self.nope, self.rotary, self.value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.latent, self.scale = c.kv_lora_rank, c.softmax_scale
        heads = share(f"{prefix}: num_attention_heads", c.num_attention_heads, build.ranks.tp)
        self.heads, query = heads.size, heads.times(c.qk_head_dim)
        hidden, latent, kv_a = Span.all(c.hidden_size), Span.all(c.kv_lora_rank), Span.all(c.kv_width)
        # Everything that reads x, in one product: [query, or its latent | c | rotary key].
        self.q_b: Linear | None = None
        self.q_a_norm: Norm | None = None
        if c.q_lora_rank is None:
            first = (f"{prefix}.q_proj", query)
        else:
            first = (f"{prefix}.q_a_proj", Span.all(c.q_lora_rank))
            self.q_a_norm = Norm(build, f"{prefix}.q_a_layernorm", c.q_lora_rank, LATENT_NORM_EPS)
            self.q_b = linear(build, Span.all(c.q_lora_rank), (f"{prefix}.q_b_proj", query))
        self.qkv_a = linear(build, hidden, first, (f"{prefix}.kv_a_proj_with_mqa", kv_a))
        self.kv_a_norm = Norm(build, f"{prefix}.kv_a_layernorm", c.kv_lora_rank, LATENT_NORM_EPS)
        # Never FP8: both ways to attend read this one weight, and agree. What is stored as FP8 is dequantised.
        self.kv_b = Linear(build, latent, (f"{prefix}.kv_b_proj", heads.times(self.nope + self.value)))
        # Both halves of kv_b by head, as decode multiplies by them: views, not copies.
        kv_b_HXL = self.kv_b.weight.view(self.heads, self.nope + self.value, self.latent)
        self.w_kc_HNL = kv_b_HXL[:, : self.nope]
        self.w_vc_HLV = kv_b_HXL[:, self.nope :].transpose(1, 2)
        self.o = linear(build, heads.times(self.value), (f"{prefix}.o_proj", hidden))

    def targets(self) -> Targets:
        for part in (self.qkv_a, self.q_a_norm, self.q_b, self.kv_a_norm, self.kv_b, self.o):
            if part is not None:
                yield from part.targets()

    def prepare(self) -> None:
        for part in (self.qkv_a, self.q_b, self.kv_b, self.o):
            if part is not None:
                part.prepare()

    def __call__(self, x_TD: Tensor, batch: Prefill | Decode, cache: Tensor) -> Tensor:
        """x_TD -> [T, D]. cache: this layer's pool [pages, page_size, L + R], which the new tokens are written to."""
        q_THP, c_TL, k_pe_TR = self._project(x_TD, batch.positions)
        self.ops.mla_kv_store(cache, batch.slots, c_TL, k_pe_TR)
        if isinstance(batch, Prefill):
            out_THV = self._expanded(q_THP, c_TL, k_pe_TR, batch, cache)
        else:
            out_THV = self._absorbed(q_THP, batch, cache)
        return self.o(out_THV.flatten(1))

    def _project(self, x_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, latents and rotary keys, the rotary parts rotated to their positions."""
        q, kv_a = self.qkv_a.split(self.qkv_a(x_TD))
        c_TL, k_pe_TR = torch.split(kv_a, [self.latent, self.rotary], dim=-1)
        if self.q_b is not None and self.q_a_norm is not None:
            q = self.q_b(self.q_a_norm(q))
        q_THP = torch.unflatten(q, -1, (self.heads, self.nope + self.rotary))
        q_pe_THR, k_pe_T1R = self.ops.rope(
            q_THP[..., self.nope :], k_pe_TR.unsqueeze(1), positions_T, self.rope_table, self.interleaved
        )
        q_THP[..., self.nope :] = q_pe_THR  # into place: cheaper than joining anew what is joined already
        return q_THP, self.kv_a_norm(c_TL), k_pe_T1R.squeeze(1)

    def _expanded(self, q_THP: Tensor, c_TL: Tensor, k_pe_TR: Tensor, batch: Prefill, cache: Tensor) -> Tensor:
        """The new tokens attend to themselves, then to what is cached before them, a bounded chunk at a time.

        Each attention leaves its softmax's logarithmic normaliser (lse), by which the results are merged.
        """
        k_THP, v_THV = self._expand(c_TL, k_pe_TR)
        cu_q, max_q = batch.cu_q, batch.max_q
        out_THV, lse_TH = self.ops.mha_varlen(q_THP, k_THP, v_THV, cu_q, cu_q, max_q, max_q, self.scale, True)
        for chunk in batch.prefix:
            k_KHP, v_KHV = self._expand(*self.ops.mla_kv_gather(cache, chunk.slots, self.latent))
            before_THV, before_lse_TH = self.ops.mha_varlen(
                q_THP, k_KHP, v_KHV, cu_q, chunk.cu_k, max_q, chunk.max_k, self.scale, False
            )
            out_THV, lse_TH = self.ops.merge_state(out_THV, lse_TH, before_THV, before_lse_TH)
        return out_THV  # type: ignore[no-any-return]

    def _expand(self, c_TL: Tensor, k_pe_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Every head's keys and values from the latents."""
        kv_THX = torch.unflatten(self.kv_b(c_TL), -1, (self.heads, self.nope + self.value))
        k_nope_THN, v_THV = torch.split(kv_THX, [self.nope, self.value], dim=-1)
        return self.ops.concat_mla_k(k_nope_THN, k_pe_TR.unsqueeze(1)), v_THV

    def _absorbed(self, q_THP: Tensor, batch: Decode, cache: Tensor) -> Tensor:
        q_nope_THN, q_pe_THR = torch.split(q_THP, [self.nope, self.rotary], dim=-1)
        q_nope_THL = self.ops.absorbed_bmm(q_nope_THN, self.w_kc_HNL)
        out_BSHL, _ = self.ops.mla_decode(
            torch.unflatten(q_nope_THL, 0, (-1, batch.queries)),
            torch.unflatten(q_pe_THR, 0, (-1, batch.queries)),
            cache,
            batch.page_table,
            batch.seq_lens,
            self.scale,
            batch.plan,
            batch.plan_layout,
        )
        return self.ops.absorbed_bmm(out_BSHL.flatten(0, 1), self.w_vc_HLV)  # type: ignore[no-any-return]
