"""Wrong caches of 8 bits. Wrong slots are in `kv_cache`."""

from __future__ import annotations

from . import Mutant, edit, kernel
from .kv_cache import BASES, packed_cache

STORE = f"{BASES['mla_kv_store_fp8']}/contiguous"
FLAT = STORE.replace("ds_mla", "flat")
GATHER = f"{BASES['mla_kv_gather_fp8']}/contiguous"
FLAT_GATHER = GATHER.replace("ds_mla", "flat")
SCALES = ".view(torch.float32).to(dtype)[..., None]"
SLICES = "rows[..., :kv_lora_rank], rows[..., kv_lora_rank:end], rows[..., end:]"
LATENT = "latent = [codes, scales.to(torch.float32)]"
CAST = "    return y.to(kind.dtype)\n"
CLAMP = "y = x.clamp(-kind.quant_max, kind.quant_max)"
QUANTISE = "per_token_group_quant_fp8.reference(c_kv, layout.tile, "
ROPE = "else k_pe.to(torch.bfloat16)"
SCALED = "scaled = (groups / scale.unsqueeze(-1)).flatten(-2)"
NEGATIVE_ZERO = """\
    codes = y.to(kind.dtype).view(torch.uint8)
    return torch.where((x < 0) & (codes == 0), 0x80, codes).view(kind.dtype)
"""
PARTS = "(part.masked_fill(skipped, 0).to(out_dtype) for part in parts)"
AWAY = "    return (y * (1 + 2**-12)).to(kind.dtype)\n"  # from zero, where it is a tie
TOWARDS = "    return (y * (1 - 2**-4.5)).to(kind.dtype)\n"  # zero, for most of what should go away from it


def read(name: str, why: str, old: str, new: str, case: str, check: str = "bound") -> Mutant:
    return edit("mla_kv_gather_fp8", name, why, old, new, case, check)


def stored(name: str, why: str, old: str, new: str, case: str, check: str, module: str | None = None) -> Mutant:
    return edit("mla_kv_store_fp8", name, why, old, new, case, check, module)


MUTANTS = (
    read("no_scale", "forgets the scales", SCALES, f"{SCALES} ** 0", f"{GATHER}/unit/0"),
    read("divides", "divides by the scales", SCALES, f"{SCALES} ** -1", f"{GATHER}/unit/0"),
    read(
        "first_tile", "all tiles take the first one's scale", SCALES, f"{SCALES}[..., :1, :]", f"{GATHER}/b27_scales/0"
    ),
    read(
        "next_tile",
        "a tile takes its neighbour's scale",
        SCALES,
        ".view(torch.float32).to(dtype).roll(1, -1)[..., None]",
        f"{GATHER}/b27_scales/0",
    ),
    read(
        "scales_in_bf16",
        "rounds the scales",
        SCALES,
        SCALES.replace("float32)", "float32).bfloat16()"),
        f"{GATHER}/unit/0",
    ),
    read(
        "scales_in_8_bits",
        "takes the scales' exponents alone",
        SCALES,
        SCALES.replace("view(torch.float32)", "view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)"),
        f"{GATHER}/unit/0",
    ),
    read(
        "scales_first",
        "looks for the scales before the codes",
        SLICES,
        "rows[..., end - kv_lora_rank : end], rows[..., : end - kv_lora_rank], rows[..., end:]",
        f"{GATHER}/unit/0",
        "nonfinite",
    ),
    read(
        "fn_for_fnuz",
        "reads fnuz codes as fn",
        "codes.view(fp8)",
        "codes.view(torch.float8_e4m3fn)",
        f"{GATHER}/b29_fnuz/0",
    ),
    read(
        "fn_for_fnuz_rope",
        "reads fnuz codes of the rotated part as fn",
        "rope.view(fp8)",
        "rope.view(torch.float8_e4m3fn)",
        f"{FLAT_GATHER}/b29_fnuz/0",
    ),
    read(
        "nan_is_a_number",
        "gives the largest number for codes that mean NaN",
        "c_kv = codes.view(fp8).to(dtype)",
        "c_kv = codes.view(fp8).to(dtype).nan_to_num(448.0)",
        f"{GATHER}/every_code/0",
        "nonfinite",
    ),
    read(
        "rope_in_fp8",
        "rounds the rotated part to 8 bits",
        "return c_kv, k_pe.to(dtype)",
        "return c_kv, k_pe.to(torch.float8_e4m3fn).to(dtype)",
        f"{GATHER}/unit/0",
    ),
    read(
        "stale_rows",
        "gives what lies there for slots to skip",
        PARTS,
        "(part.to(out_dtype) for part in parts)",
        f"{GATHER}/b32_sentinels/0",
        "nonfinite",
    ),
    read(
        "masks_by_multiplying",
        "multiplies what is to be skipped by 0",
        PARTS,
        "((part * ~skipped).to(out_dtype) for part in parts)",
        f"{GATHER}/b32_sentinels/0",
        "nonfinite",
    ),
    read(
        "always_bf16",
        "gives bfloat16 whatever is asked for",
        PARTS,
        PARTS.replace("out_dtype", "torch.bfloat16"),
        f"{GATHER}/unit/0".replace("bfloat16", "float32"),
        "dtype",
    ),
    read(
        "rounds_to_bf16",
        "rounds to bfloat16 on the way to float32",
        PARTS,
        PARTS.replace(".to(", ".bfloat16().to("),
        f"{GATHER}/unit/0".replace("bfloat16", "float32"),
    ),
    kernel(
        "mla_kv_gather_fp8",
        "packed_cache",
        "takes the cache for contiguous",
        f"{BASES['mla_kv_gather_fp8']}/rows/b25_strides/0",
        "nonfinite",
    )(packed_cache),
    stored(
        "scale_inverted",
        "stores what it multiplied by, not what multiplies",
        LATENT,
        LATENT.replace("scales.to", "1 / scales.to"),
        f"{STORE}/unit/0",
        "scales",
    ),
    stored(
        "one_scale",
        "stores the first tile's scale for all",
        LATENT,
        LATENT.replace("scales.to", "scales[:, :1].expand_as(scales).to"),
        f"{STORE}/b27_scales/0",
        "scales",
    ),
    stored(
        "next_tile",
        "stores a tile's scale for its neighbour",
        LATENT,
        LATENT.replace("scales.to", "scales.roll(1, -1).to"),
        f"{STORE}/unit/0",
        "scales",
    ),
    stored(
        "scales_in_bf16",
        "rounds the scales",
        LATENT,
        LATENT.replace("scales.to", "scales.bfloat16().to"),
        f"{STORE}/unit/0",
        "scales",
    ),
    stored(
        "scales_of_two",
        "rounds scales up to a power of two",
        '"row_f32", eps)',
        '"row_f32", eps, True)',
        f"{STORE}/unit/0",
        "scales",
    ),
    stored(
        "scales_first",
        "writes the scales before the codes",
        LATENT,
        "latent = [scales.to(torch.float32), codes]",
        f"{STORE}/unit/0",
        "scales",
    ),
    stored(
        "zero_scale",
        "a tile of zeros has scale 0",
        '"row_f32", eps)',
        '"row_f32", 1e-30)',
        f"{STORE}/b28_zero_groups/0",
        "scales",
    ),
    stored(
        "eps_added",
        "adds eps to a tile's largest value",
        QUANTISE,
        QUANTISE.replace("(c_kv", "(c_kv + eps * c_kv.sign()"),
        f"{STORE}/eps/0",
        "scales",
    ),
    stored(
        "quantises_in_bf16",
        "divides in bfloat16",
        SCALED,
        SCALED.replace("(groups / scale.unsqueeze(-1))", "(groups / scale.unsqueeze(-1)).bfloat16().to(groups.dtype)"),
        f"{STORE}/unit/0",
        "codes",
        "quant",
    ),
    stored(
        "rope_in_fp8",
        "rounds the rotated part to 8 bits",
        ROPE,
        "else to_fp8(wide(k_pe), FP8_KINDS[name]).to(torch.bfloat16)",
        f"{STORE}/unit/0",
        "rotated",
    ),
    stored(
        "rope_as_float16",
        "stores the rotated part as float16",
        ROPE,
        "else k_pe.to(torch.float16)",
        f"{STORE}/unit/0",
        "rotated",
    ),
    stored(
        "rope_truncated",
        "truncates the rotated part",
        ROPE,
        "else (k_pe.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)",
        f"{STORE}/unit/0".replace("bfloat16", "float32"),
        "rotated",
    ),
    stored("truncates", "rounds codes towards zero", CAST, TOWARDS, f"{STORE}/unit/0", "codes", "formats"),
    stored("ties_away", "rounds ties away from zero", CAST, AWAY, f"{STORE}/ties/0", "codes", "formats"),
    stored(
        "overflows",
        "does not clamp",
        CLAMP,
        "y = torch.where(x.abs() > kind.quant_max, torch.nan, x)",
        f"{FLAT}/saturating/0",
        "codes",
        "formats",
    ),
    stored(
        "loses_nan",
        "clamps NaN to the largest number",
        CLAMP,
        CLAMP.replace("x.clamp", "x.nan_to_num(448.0).clamp"),
        f"{FLAT}/nan/0",
        "codes",
        "formats",
    ),
    stored(
        "fn_for_fnuz",
        "takes fnuz for fn",
        "latent = [to_fp8(wide(c_kv), FP8_KINDS[name])]",
        'latent = [to_fp8(wide(c_kv), FP8_KINDS["e4m3fn"])]',
        f"{FLAT}/b29_fnuz/0",
        "codes",
    ),
    stored(
        "largest_of_fnuz",
        "quantises to fnuz's largest number, 240",
        "224.0, 240.0",
        "240.0, 240.0",
        f"{STORE}/b29_fnuz/0",
        "scales",
        "formats",
    ),
    stored(
        "negative_zero",
        "casts to fnuz what becomes -0, which is NaN there",
        CAST,
        NEGATIVE_ZERO,
        f"{FLAT}/b29_fnuz/0",
        "codes",
        "formats",
    ),
    stored(
        "flat_is_scaled",
        "scales what is cast as it is",
        "latent = [to_fp8(wide(c_kv), FP8_KINDS[name])]",
        "latent = [to_fp8(wide(c_kv) * 448 / wide(c_kv).abs().amax(-1, True), FP8_KINDS[name])]",
        f"{FLAT}/unit/0",
        "codes",
    ),
)
