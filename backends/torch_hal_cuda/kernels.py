"""The kernels on offer: which library each needs, on which hardware, and what it promises."""

from __future__ import annotations

from torch_hal.kernel import Band, Kernel, Library, Requires, Trait
from torch_hal.op import PLAIN

from .device import VENDOR

_DETERMINISTIC = frozenset({Trait.GRAPH_SAFE, Trait.PIECEWISE_SAFE, Trait.DETERMINISTIC})
_ROW_WISE = _DETERMINISTIC | {Trait.BATCH_INVARIANT}

_SGL = Library("sgl_kernel", distribution="sglang-kernel", probe="torch_hal_cuda.libraries:sgl_kernel")
_FLASH_MLA = Library("sgl_kernel", distribution="sglang-kernel", probe="torch_hal_cuda.libraries:flash_mla")
_DEEP_GEMM = Library("deep_gemm", distribution="sgl-deep-gemm", probe="torch_hal_cuda.libraries:deep_gemm")

KERNELS = (
    Kernel(
        "fused_add_rms_norm_",
        "sgl_kernel",
        run="torch_hal_cuda.norm:fused_add_rms_norm_",
        static="torch_hal_cuda.limits:fused_add_rms_norm_static",
        dynamic="torch_hal_cuda.limits:fused_add_rms_norm_dynamic",
        requires=Requires(VENDOR, ("sm_80+",), library=_SGL),
        traits=_ROW_WISE,
    ),
    Kernel(
        "per_token_group_quant_fp8",
        "sgl_kernel",
        run="torch_hal_cuda.quant:per_token_group_quant_fp8",
        static="torch_hal_cuda.limits:group_quant_static",
        dynamic="torch_hal_cuda.limits:group_quant_dynamic",
        requires=Requires(VENDOR, ("sm_89+",), frozenset({"fp8"}), _SGL),
        traits=_ROW_WISE,
    ),
    Kernel(
        "fp8_block_linear",
        "deep_gemm",
        run="torch_hal_cuda.linear:fp8_block_linear",
        static="torch_hal_cuda.limits:fp8_block_linear_static",
        dynamic="torch_hal_cuda.limits:fp8_block_linear_dynamic",
        prepare="torch_hal_cuda.linear:prepare_fp8_block_linear",
        keeps_plain=True,  # it only makes storage dense
        # sm_100 wants power-of-two scales, packed: another layout of weights, and weights requantised for it.
        requires=Requires(VENDOR, ("sm_90",), library=_DEEP_GEMM),
        formats=(("x_scale_layout", "mn_f32_tma"),),
        traits=_ROW_WISE,
        band=Band.TUNED,
    ),
    Kernel(
        "mla_decode",
        "flash_mla",
        run="torch_hal_cuda.attention:mla_decode",
        static="torch_hal_cuda.limits:mla_decode_static",
        dynamic="torch_hal_cuda.limits:mla_decode_dynamic",
        plan="torch_hal_cuda.attention:plan_mla_decode",
        layout="flash_mla",
        reads=frozenset({PLAIN}),  # without a plan it makes its own
        requires=Requires(VENDOR, ("sm_90",), library=_FLASH_MLA),
        traits=_DETERMINISTIC,
        band=Band.TUNED,
    ),
    Kernel(
        "all_reduce",
        "nccl",
        run="torch_hal_cuda.collectives:all_reduce",
        static="torch_hal_cuda.limits:all_reduce_static",
        requires=Requires(VENDOR),
        traits=_DETERMINISTIC,
    ),
)
