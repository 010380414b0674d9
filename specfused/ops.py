# SPDX-License-Identifier: Apache-2.0
"""The ops of specfused, thin and typed. No op allocates: every result goes to a tensor you give.

Shapes use bs = requests, W = rows per request (num_draft_tokens, root included; 1 = non-spec),
Hq / Hkv = query / KV heads, D = head_dim, C = committed length of a request before the step.
`csrc/kv_window.h` defines where rows are, `csrc/draft_tree.h` what a tree word means.

Every op raises RuntimeError `<op>: <argument> must <requirement>, got <value>` for what the host
can see. What only the device can see never crashes: a request whose index or length cannot be right
is skipped (outputs untouched), a slot id outside the pool reads as slot 0 and is never written. The
address table of `kv_table` is trusted: it must be of live buffers.
"""

import torch
from torch import Tensor

from specfused._sizes import (
    attn_num_ctas,
    attn_workspace_bytes,
    build_info,
    commit_workspace_bytes,
    draft_workspace_bytes,
    kv_table,
    plan_numel,
)

__all__ = [
    "attn_num_ctas",
    "attn_workspace_bytes",
    "build_info",
    "commit",
    "commit_workspace_bytes",
    "compact",
    "decode_attn",
    "draft_topk",
    "draft_workspace_bytes",
    "kv_table",
    "plan",
    "plan_numel",
    "tree_words_from_links",
    "tree_words_from_mask",
    "verify_attn",
]

_ops = torch.ops.specfused


def verify_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    tree_words: Tensor | None,
    out: Tensor,
    *,
    lse: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    window_slots: Tensor | None = None,
    plan: Tensor | None = None,
    workspace: Tensor | None = None,
    seq_lens_offset: int = 0,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """Attention of W rows per request over the committed KV and the visible part of the window.

    Stores the step's K/V rows first, if given. Row i of a request sees its committed positions
    0..C-1 and the window columns whose bit is set in its tree word. A row that sees nothing gets 0
    and LSE -inf.

    Args:
        q: [bs*W, Hq, D] bfloat16, float16 or float32.
        k_cache, v_cache: [slots, Hkv, D] of q's dtype; the pool. Mutated where rows are stored.
        req_to_token: [requests, context] int32; row r lists the slots of request r by position.
        req_pool_indices: [bs] int64; each request's row of req_to_token.
        seq_lens: [bs] int64; C = seq_lens + seq_lens_offset.
        tree_words: [bs, W] int64, one 64-bit word per row; None: a chain (row i sees 0..i).
        out: [bs*W, Hq, D] of q's dtype.
        lse: [bs*W, Hq] float32; natural logarithm of the softmax sum. Optional.
        k_new, v_new: [bs*W, Hkv, D]; rows to store before attending. Optional.
        out_cache_loc: [bs*W] int64; the slot of each new row.
        window_slots: [bs, columns] int64; slots of the window columns, where they are not the
            next ones of req_to_token (draft branches). columns <= 64.
        plan: from `plan`; needed on CUDA, ignored on the CPU.
        workspace: [attn_workspace_bytes(...)] uint8, zero before its first use; needed on CUDA.
        seq_lens_offset: 0 when seq_lens excludes the step's rows, -W when it includes them.
        sm_scale: scale of q k; default 1/sqrt(D).
        sinks, window, softcap, k_scale, v_scale: not supported yet, refused by name.

    Method: FlashAttention (arXiv 2205.14135) with split KV; tree masks as one word per row follow
    SpecInfer (arXiv 2305.09781).
    """
    _ops.verify_attn.default(
        q,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        tree_words,
        out,
        lse=lse,
        k_new=k_new,
        v_new=v_new,
        out_cache_loc=out_cache_loc,
        window_slots=window_slots,
        plan=plan,
        workspace=workspace,
        seq_lens_offset=seq_lens_offset,
        sm_scale=sm_scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def decode_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    lse: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    plan: Tensor | None = None,
    workspace: Tensor | None = None,
    seq_lens_offset: int = 0,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """The non-spec step: `verify_attn` with one row per request, which sees 0..C-1 and itself.

    Arguments as in `verify_attn` with W = 1; seq_lens_offset is -1 where seq_lens already counts
    the new row (a plain server's decode).
    """
    _ops.decode_attn.default(
        q,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        out,
        lse=lse,
        k_new=k_new,
        v_new=v_new,
        out_cache_loc=out_cache_loc,
        plan=plan,
        workspace=workspace,
        seq_lens_offset=seq_lens_offset,
        sm_scale=sm_scale,
        sinks=sinks,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def commit(
    draft_tokens: Tensor,
    seq_lens: Tensor,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    bonus_tokens: Tensor,
    new_seq_lens: Tensor,
    *,
    logits: Tensor | None = None,
    targets: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    kv_ptrs: Tensor | None = None,
    kv_row_bytes: Tensor | None = None,
    num_slots: int = 0,
    workspace: Tensor | None = None,
    hidden_states: Tensor | None = None,
    next_token_ids: Tensor | None = None,
    select_index: Tensor | None = None,
    positions: Tensor | None = None,
    invalid_logits: Tensor | None = None,
    temperatures: Tensor | None = None,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    coins: Tensor | None = None,
    coins_final: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    window_ends: Tensor | None = None,
) -> None:
    """Ends a step: target choice, tree walk, bookkeeping, accepted KV and hidden rows to the front.

    Without coins the walk takes the child whose token is the target's choice at the current node;
    of equal siblings the first counts. With coins siblings are asked in order, the probabilities of
    their distinct tokens add up, and one with p > 0 is taken if coins[parent] < sum / threshold_acc
    or p >= threshold_single; the bonus token is drawn by coins_final from the last row without the
    rejected tokens. With draft_probs the first child alone is asked, taken if 0 < q <= 1 and
    coins[parent] * q < p; after a rejection the bonus token is of max(p - q, 0). Equal inputs give
    equal decisions, and every emitted token is in the vocabulary, whatever the coins are.

    Accepted row j moves from the slot of its node to that of window column j, in every buffer.

    Args:
        draft_tokens: [bs, W] int64; column 0 is the root (the last emitted token).
        seq_lens: [bs] int64 committed lengths before the step.
        accept_index: [bs, P] int32 out; flat node ids (request*W + node) in path order, -1 behind.
            P = longest path = draft steps + 1.
        num_correct_drafts: [bs] int32 out; without the bonus token.
        accept_lens: [bs] int32 out; with it = rows kept = tokens emitted.
        accept_tokens: [bs, P] int32 out; the emitted tokens in path order, -1 behind.
        bonus_tokens: [bs] int32 out; the last emitted token, root of the next step.
        new_seq_lens: [bs] int64 out; seq_lens + accept_lens.
        logits: [bs*W, vocab] float32, bfloat16 or float16; the greedy choice is argmax, ties to the
            lowest id, NaN counts as largest (torch.argmax).
        targets: [bs, W] int64 greedy choices, instead of logits.
        retrieve_next_token, retrieve_next_sibling: [bs, W] int64 links, -1 = none; None: chain.
        out_cache_loc: [bs*W] int64, slots that the verify step wrote. Needed with kv_ptrs.
        kv_ptrs, kv_row_bytes, num_slots: from `kv_table`; without them no KV moves.
        workspace: [commit_workspace_bytes(bs, W, vocab)] uint8; needed on CUDA without targets.
        hidden_states: [bs*W, H] float32, bfloat16 or float16, mutated: row r*W + j becomes row
            accept_index[r, j] for j < accept_lens[r]; rows behind stay.
        next_token_ids: [bs*W] int64 or int32 out; emitted token j of request r at r*W + j, then 0.
        select_index: [bs] int64 out; r*W + accept_lens[r] - 1, the last accepted row.
        positions, window_ends: [bs*W] and [bs] int64 out; seq_lens[r] + j and seq_lens + W.
        invalid_logits: [bs] int32 out; 1 if the largest logit of a visited row is NaN or infinite
            (a sampled walk ends there, with the argmax) or a probability that was read is NaN,
            infinite or negative (it counts as 0; read are drafted tokens, and all of the last row).
        temperatures: [bs] float32 above 0; softmax(logits / temperature) is the target's
            distribution. Needed with logits and coins.
        target_probs: [bs*W, vocab] float32, instead of logits, with coins.
        draft_probs: [bs, W-1 or more, vocab] float32; row i is what the child of node i was drawn
            from. Chains (topk 1) only.
        coins, coins_final: [bs, W] and [bs] float32 in [0, 1); they make the step a sampled one.
        threshold_single, threshold_acc: 1 keeps the target's distribution; less accepts more.

    Method: tree verification of EAGLE (arXiv 2401.15077) and SpecInfer (arXiv 2305.09781);
    speculative sampling (arXiv 2211.17192) for draft_probs; thresholds are SGLang's.
    """
    _ops.commit.default(
        draft_tokens,
        seq_lens,
        accept_index,
        num_correct_drafts,
        accept_lens,
        accept_tokens,
        bonus_tokens,
        new_seq_lens,
        logits=logits,
        targets=targets,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
        out_cache_loc=out_cache_loc,
        kv_ptrs=kv_ptrs,
        kv_row_bytes=kv_row_bytes,
        num_slots=num_slots,
        workspace=workspace,
        hidden_states=hidden_states,
        next_token_ids=next_token_ids,
        select_index=select_index,
        positions=positions,
        invalid_logits=invalid_logits,
        temperatures=temperatures,
        target_probs=target_probs,
        draft_probs=draft_probs,
        coins=coins,
        coins_final=coins_final,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
        window_ends=window_ends,
    )


def compact(
    kv_ptrs: Tensor,
    kv_row_bytes: Tensor,
    num_slots: int,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    accept_lens: Tensor,
) -> None:
    """The KV part of `commit` alone: applies an earlier decision.

    Args:
        kv_ptrs, kv_row_bytes, num_slots: from `kv_table`.
        out_cache_loc: [bs, W] int64 slots of the verify step itself (a table row may have been
            recycled since).
        accept_index: [bs, P] int32, accept_lens: [bs] int32, as `commit` wrote them.
    """
    _ops.compact.default(kv_ptrs, kv_row_bytes, num_slots, out_cache_loc, accept_index, accept_lens)


def draft_topk(
    logits: Tensor,
    topk_index: Tensor,
    *,
    topk_p: Tensor | None = None,
    rows: Tensor | None = None,
    token_map: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """The draft model's likeliest tokens of each row, the likeliest first, and their probabilities.

    Of equal logits the lower index comes first. NaN counts as -inf, and a row that is not there as
    one of -inf alone: its tokens are 0, 1, ... with probability 0. Of a row with +inf the first
    token has probability 1, the others 0.

    Args:
        logits: [n, vocab] float32, bfloat16 or float16.
        topk_index: [rows, topk] int64, written; 1 <= topk <= 16 and <= vocab.
        topk_p: [rows, topk] float32, written: softmax over the whole row. Optional.
        rows: [rows] int64, the row of logits that each result is of; None: all, in order.
        token_map: [vocab] int64, what topk_index shall hold instead of places in the vocabulary
            (a draft vocabulary that is a part of the target's). Optional.
        workspace: [draft_workspace_bytes(...)] uint8, zero before its first use; needed on CUDA.

    Method: the candidates of EAGLE-2's trees (arXiv 2406.16858).
    """
    _ops.draft_topk.default(
        logits, topk_index, topk_p=topk_p, rows=rows, token_map=token_map, workspace=workspace
    )


def plan(
    seq_lens: Tensor,
    num_kv_heads: int,
    num_ctas: int,
    out: Tensor,
    *,
    seq_lens_offset: int = 0,
) -> None:
    """Split plan of a batch, once per step for all layers: which CTA attends which KV tiles.

    From lengths only, never from W, so that both modes split the same lengths alike.

    Args:
        seq_lens: [bs] int64; C = seq_lens + seq_lens_offset.
        num_kv_heads: Hkv of this rank.
        num_ctas: from `attn_num_ctas`.
        out: [plan_numel(bs, num_ctas)] int32.

    Method: stream-K (arXiv 2301.03598) over KV tiles of 64 positions.
    """
    _ops.plan.default(seq_lens, num_kv_heads, num_ctas, out, seq_lens_offset=seq_lens_offset)


def tree_words_from_links(
    retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, words: Tensor
) -> None:
    """Tree words from first-child and next-sibling links.

    Args:
        retrieve_next_token, retrieve_next_sibling: [bs, W] int64, -1 = none; children have larger
            indices than their parents. A node that no link reaches sees only itself.
        words: [bs, W] int64 out.
    """
    _ops.tree_words_from_links.default(retrieve_next_token, retrieve_next_sibling, words)


def tree_words_from_mask(
    custom_mask: Tensor, words: Tensor, *, seq_lens: Tensor | None = None
) -> None:
    """Tree words from a flat boolean mask.

    Args:
        custom_mask: flat bool or uint8. Without seq_lens [bs, W, W] (QLEN_ONLY); with seq_lens each
            request has W rows of C + W cells (FULL_MASK). May be longer than needed.
        words: [bs, W] int64 out. Exactly the mask's bits: an empty row stays empty.
        seq_lens: [bs] int64 committed lengths, for FULL_MASK. Cells outside the mask read as false.
    """
    _ops.tree_words_from_mask.default(custom_mask, words, seq_lens=seq_lens)
