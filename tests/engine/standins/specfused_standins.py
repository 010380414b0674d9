# SPDX-License-Identifier: Apache-2.0
"""Test-only SGLang plugin: lets a CPU engine run a backend that SGLang does not know by name.

specfused itself uses SGLang's official hooks only. This folder is the one exception: besides
hooks it sets a few attributes of SGLang modules, because on a CPU SGLang would launch Triton
kernels for any backend name that it does not know. It stands in for hardware, never for logic that
a GPU server runs differently, and it refuses to be imported where a GPU is visible.

Being on PYTHONPATH is enough: SGLang finds the dist-info folder beside this file. Environment:

    STANDINS_OVERLAP=1   keep the overlap schedule with speculation (SGLang: off on a CPU)
    STANDINS_SAMPLING=1  verify by sampling at temperature > 0 (SGLang: always greedy on a CPU)
"""

import os

from cpu_only import require_cpu_engine

require_cpu_engine("specfused_standins")


def register():
    """Entry point, run by SGLang in the main process and in the scheduler."""
    _no_triton_launches()
    _triton_name_serves_prefill()
    _grammar_masks()
    if os.environ.get("STANDINS_OVERLAP") == "1":
        _keep_overlap()
    if os.environ.get("STANDINS_SAMPLING") == "1":
        _sample_in_verify()


def _hook(target, function, around=False):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kind = HookType.AROUND if around else HookType.REPLACE
    HookRegistry.register(f"sglang.{target}", function, kind)


class _Kernel:
    """A plain function behind Triton's `kernel[grid](...)`."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


def _padded(free_pages, out):
    """SGLang launches before it checks that the pages suffice, and then drops the result."""
    import torch

    return torch.cat((free_pages, free_pages.new_zeros(out.numel() + 1)))


def _alloc_extend(prefix_lens, seq_lens, last_loc, free_pages, out, bs_upper, page_size, *rest):
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    pages = _padded(free_pages, out)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, out, page_size, out.device)


def _alloc_decode(seq_lens, last_loc, free_pages, out, bs_upper, page_size, *rest):
    import torch

    opens_page = (seq_lens - 1) % page_size == 0
    page = (torch.cumsum(opens_page, 0) - 1).clamp(min=0)
    first_slot = _padded(free_pages, out)[page] * page_size
    out.copy_(torch.where(opens_page, first_slot, last_loc + 1))


def _no_triton_launches():
    """0.5.17 tells by the backend's name alone where Triton may run; 0.5.23 nearly everywhere
    asks the platform, except in get_last_loc."""
    import sglang.srt.mem_cache.allocation as allocation
    import sglang.srt.mem_cache.allocator.paged as paged

    _hook("srt.utils.common.support_triton", lambda backend: False)
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel = _Kernel(_alloc_extend)
        paged.alloc_decode_kernel = _Kernel(_alloc_decode)


def _triton_name_serves_prefill():
    """`attention_backend=triton` on a CPU: SGLang's torch_native under Triton's name.

    The hybrid form of trees on pages (`--attention-backend triton --decode-attention-backend
    specfused --speculative-attention-mode decode`) then takes the same path through SGLang's
    arguments, HybridAttnBackend and the draft factory as on a GPU; only the prefill kernel differs.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["triton"] = ATTENTION_BACKENDS["torch_native"]


def _pageable_bitmask(vocab_size, batch_size):
    import torch
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def _apply_bitmask(grammar, logits, vocab_mask):
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def _grammar_masks():
    """0.5.17 pins a grammar's mask and applies it on a GPU only; 0.5.23 does what stands here."""
    import sglang.srt.constrained.xgrammar_backend as xgrammar_backend

    if not hasattr(xgrammar_backend, "is_pin_memory_available"):
        module = "srt.constrained.xgrammar_backend"
        _hook(f"{module}._allocate_token_bitmask", _pageable_bitmask)
        _hook(f"{module}.XGrammarGrammar.apply_vocab_mask", _apply_bitmask)


def _gather_spec_extras(indices, topk_p, topk_index, output_tokens, hidden_states=None):
    rows = indices.long()
    hidden = None if hidden_states is None else hidden_states[rows]
    return topk_p[rows], topk_index[rows], output_tokens[rows], hidden


def _keep_overlap():
    import torch

    _hook("srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", lambda args: None)
    _hook("kernels.ops.speculative.gather_spec_extras.gather_spec_extras", _gather_spec_extras)
    # torch.cpu.Stream is no torch.Stream, and one CPU thread needs no stream marks.
    torch.Tensor.record_stream = lambda tensor, stream: None


def _sample_in_verify():
    import sgl_kernel
    import sglang.srt.speculative.eagle_utils as eagle_utils

    if hasattr(eagle_utils, "_verify_uses_greedy"):
        _hook(
            "srt.speculative.eagle_utils._verify_uses_greedy",
            lambda *, is_all_greedy, **platform: is_all_greedy,
        )
        for name in (
            "top_k_renorm_prob",
            "top_p_renorm_prob",
            "tree_speculative_sampling_target_only",
        ):
            setattr(eagle_utils, name, getattr(sgl_kernel, name))
        return

    def eagle_sample(original, verify_input, batch, *args, **kwargs):
        # 0.5.17 asks its module flag _is_cpu; in the sampled branch nothing else reads it.
        eagle_utils._is_cpu = batch.sampling_info.is_all_greedy
        try:
            return original(verify_input, batch, *args, **kwargs)
        finally:
            eagle_utils._is_cpu = True

    _hook("srt.speculative.eagle_utils.eagle_sample", eagle_sample, around=True)
