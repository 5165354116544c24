"""The contracts, one module a family: ``torch_hal.ops.<op>`` is the declared `Op`; calling it runs the reference."""

from __future__ import annotations

from ..op import declared as declared
from .activation import silu_and_mul as silu_and_mul
from .attention import concat_mla_absorb_q as concat_mla_absorb_q
from .attention import concat_mla_k as concat_mla_k
from .attention import merge_state as merge_state
from .attention import mha_varlen as mha_varlen
from .attention import mla_decode as mla_decode
from .collectives import all_gather as all_gather
from .collectives import all_reduce as all_reduce
from .collectives import all_to_all as all_to_all
from .collectives import reduce_scatter as reduce_scatter
from .kv_cache import mla_kv_gather as mla_kv_gather
from .kv_cache import mla_kv_store as mla_kv_store
from .linear import absorbed_bmm as absorbed_bmm
from .linear import fp8_block_linear as fp8_block_linear
from .linear import linear as linear
from .linear import router_gemm as router_gemm
from .moe_experts import fused_experts as fused_experts
from .moe_experts import moe_sum_reduce as moe_sum_reduce
from .moe_experts import shared_expert_add as shared_expert_add
from .moe_routing import biased_grouped_topk as biased_grouped_topk
from .moe_routing import grouped_topk as grouped_topk
from .moe_routing import topk_softmax as topk_softmax
from .norm import fused_add_rms_norm as fused_add_rms_norm
from .norm import fused_add_rms_norm_ as fused_add_rms_norm_
from .norm import rms_norm as rms_norm
from .quant import per_token_group_quant_fp8 as per_token_group_quant_fp8
from .rope import YarnScaling as YarnScaling
from .rope import mla_softmax_scale as mla_softmax_scale
from .rope import rope as rope
from .rope import rope_cos_sin_cache as rope_cos_sin_cache
from .rope import rope_inv_freq as rope_inv_freq
from .rope import yarn_mscale as yarn_mscale
from .sampling import min_p_renorm as min_p_renorm
from .sampling import sample as sample
from .sampling import top_k_renorm as top_k_renorm
from .sampling import top_p_renorm as top_p_renorm
