"""Wrong caches."""

from __future__ import annotations

from . import Mutant, edit

MHA = "core/T17-pages3-page16-H2-Dk192-Dv128/bfloat16/contiguous"
MLA = "core/T17-pages2-page64-L512-R64/bfloat16/contiguous"
GATHER = "core/N17-pages2-page64-L512-R64/bfloat16/contiguous"
FP8 = "core/T17-pages2-page64-L512-R64-ds_mla/bfloat16/contiguous"
FLAT = "core/T17-pages2-page64-L512-R64-flat/bfloat16/contiguous"
GATHER8 = "core/N17-pages2-page64-L512-R64-ds_mla/bfloat16/contiguous"
VALID = "return (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])"


def stores(op: str, base: str, check: str) -> tuple[Mutant, ...]:
    """What goes wrong with writing into slots."""
    return (
        edit(
            op,
            "next_slot",
            "writes one slot further",
            "slot = slots.to(torch.int64).clamp",
            "slot = (slots.to(torch.int64) + 1).clamp",
            f"{base}/unit/0",
            check,
        ),
        edit(
            op,
            "page_and_row_swapped",
            "takes the row for the page",
            "return slot // page_size, slot % page_size",
            "return slot % page_size % pages, slot // page_size % page_size",
            f"{base}/unit/0",
            check,
        ),
        edit(
            op,
            "negative_wraps",
            "counts negative slots from the end",
            VALID,
            "return slots < cache.shape[0] * cache.shape[1]",
            f"{base}/b32_sentinels/0",
            check,
        ),
        edit(
            op,
            "beyond_is_clamped",
            "writes what lies beyond into the last slot",
            VALID,
            "return slots >= 0",
            f"{base}/b32_sentinels/0",
            check,
        ),
    )


MUTANTS = (
    *stores("mha_kv_store", MHA, "copy"),
    *stores("mla_kv_store", MLA, "copy"),
    *stores("mla_kv_store_fp8", FP8, "slots"),
    edit(
        "mha_kv_store",
        "values_are_keys",
        "writes keys into both caches",
        "_write(v_cache, slots, v)",
        "_write(v_cache, slots, k[..., : v.shape[-1]])",
        f"{MHA}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_store",
        "rope_stays",
        "leaves out the rotated part",
        "torch.cat([c_kv, k_pe], -1))",
        "torch.cat([c_kv, 0 * k_pe], -1))",
        f"{MLA}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "negative_wraps",
        "counts negative slots from the end",
        VALID,
        "return slots < cache.shape[0] * cache.shape[1]",
        f"{GATHER}/b32_sentinels/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "stale_rows",
        "gives what lies there for slots to skip",
        "return c_kv.masked_fill(skipped, 0), k_pe",
        "return c_kv.contiguous(), k_pe",
        f"{GATHER}/b32_sentinels/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "next_slot",
        "reads one slot further",
        "slot = slots.to(torch.int64).clamp",
        "slot = (slots.to(torch.int64) + 1).clamp",
        f"{GATHER}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_gather_fp8",
        "no_scale",
        "forgets the scales",
        ".view(torch.float32).to(dtype)[..., None]",
        ".view(torch.float32).to(dtype)[..., None] ** 0",
        f"{GATHER8}/unit/0",
    ),
    edit(
        "mla_kv_gather_fp8",
        "next_tile",
        "a tile takes its neighbour's scale",
        ".view(torch.float32).to(dtype)[..., None]",
        ".view(torch.float32).to(dtype).roll(1, -1)[..., None]",
        f"{GATHER8}/b27_scales/0",
    ),
    edit(
        "mla_kv_gather_fp8",
        "stale_rows",
        "gives what lies there for slots to skip",
        "(part.masked_fill(skipped, 0).to(out_dtype) for part in parts)",
        "(part.to(out_dtype) for part in parts)",
        f"{GATHER8}/b32_sentinels/0",
        "nonfinite",
    ),
    edit(
        "mla_kv_gather_fp8",
        "fn_for_fnuz",
        "reads fnuz codes as fn",
        "codes.view(fp8)",
        "codes.view(torch.float8_e4m3fn)",
        f"{GATHER8}/b29_fnuz/0",
    ),
    edit(
        "mla_kv_store_fp8",
        "scale_inverted",
        "stores what it multiplied by, not what multiplies",
        "scales.to(torch.float32)]",
        "1 / scales.to(torch.float32)]",
        f"{FP8}/unit/0",
        "scales",
    ),
    edit(
        "mla_kv_store_fp8",
        "one_scale",
        "stores the first tile's scale for all",
        "latent = [codes, scales.to(torch.float32)]",
        "latent = [codes, scales[:, :1].expand_as(scales).to(torch.float32)]",
        f"{FP8}/b27_scales/0",
        "scales",
    ),
    edit(
        "mla_kv_store_fp8",
        "rope_in_fp8",
        "rounds the rotated part to 8 bits",
        "else k_pe.to(torch.bfloat16)",
        "else to_fp8(wide(k_pe), FP8_KINDS[name]).to(torch.bfloat16)",
        f"{FP8}/unit/0",
        "rotated",
    ),
    edit(
        "mla_kv_store_fp8",
        "zero_scale",
        "a tile of zeros has scale 0",
        '"row_f32", eps)',
        '"row_f32", 1e-30)',
        f"{FP8}/b28_zero_groups/0",
        "scales",
    ),
    edit(
        "mla_kv_store_fp8",
        "overflows",
        "does not clamp",
        "y = x.clamp(-kind.quant_max, kind.quant_max)",
        "y = torch.where(x.abs() > kind.quant_max, torch.nan, x)",
        f"{FLAT}/saturating/0",
        "codes",
        module="formats",
    ),
)
