# SPDX-License-Identifier: Apache-2.0
"""The part of `sgl_kernel` that SGLang's CPU engine calls for a dense Llama, in plain torch.

SGLang keeps a CPU path through its speculative worker (`SGLANG_USE_CPU_ENGINE=1`), but the compiled
package behind it is not published. Names, argument order and the historical spelling `retrive_*`
are those of the calls in SGLang 0.5.17 and 0.5.23. Everything works in place and returns None
unless said otherwise. Slow and exact: for tests only.
"""

from cpu_only import require_cpu_engine

require_cpu_engine("sgl_kernel")

from .sampling import (  # noqa: E402
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
)
from .slots import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from .trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu  # noqa: E402


def rotate_input_ids_cpu(*args, **kwargs):
    """Imported with the EAGLE worker, called by the multi-layer one only."""
    raise NotImplementedError("rotate_input_ids_cpu: not part of the test stand-in")


__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy_cpu",
]
