# SPDX-License-Identifier: Apache-2.0
"""A small correct call of every op, as keyword arguments: what contract tests start from."""

import torch

from specfused import ops

BS, WIDTH, Q_HEADS, KV_HEADS, DIM, SLOTS, CONTEXT, VOCAB = 2, 4, 4, 2, 64, 32, 16, 11


def attn(device="cpu", bs=BS, width=WIDTH, optional=True):
    """decode_attn's arguments; with width rows per request and tree words, verify_attn's."""
    rows = bs * width
    num_slots = bs * CONTEXT  # every request has slots of its own: two writers of one would race
    slots = torch.arange(num_slots, dtype=torch.int32, device=device).view(bs, CONTEXT)

    def rand(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    args = {
        "q": rand(rows, Q_HEADS, DIM),
        "k_cache": rand(num_slots, KV_HEADS, DIM),
        "v_cache": rand(num_slots, KV_HEADS, DIM),
        "req_to_token": slots,
        "req_pool_indices": torch.arange(bs, device=device),
        "seq_lens": torch.full((bs,), 5, dtype=torch.int64, device=device),
        "out": torch.zeros(rows, Q_HEADS, DIM, dtype=torch.bfloat16, device=device),
    }
    if optional:
        args |= {
            "lse": torch.zeros(rows, Q_HEADS, device=device),
            "k_new": rand(rows, KV_HEADS, DIM),
            "v_new": rand(rows, KV_HEADS, DIM),
            "out_cache_loc": slots[:, 5 : 5 + width].long().reshape(-1),
        }
    if device == "cuda":
        ctas = ops.attn_num_ctas(0, DIM)
        size = ops.attn_workspace_bytes(ctas, width * Q_HEADS // KV_HEADS, DIM)
        args["plan"] = torch.zeros(ops.plan_numel(bs, ctas), dtype=torch.int32, device=device)
        args["workspace"] = torch.zeros(size, dtype=torch.uint8, device=device)
        ops.plan(args["seq_lens"], KV_HEADS, ctas, args["plan"])
    return args


def verify_attn(device="cpu", bs=BS, width=WIDTH, optional=True):
    args = attn(device, bs, width, optional)
    words = torch.tensor([(2 << i) - 1 for i in range(width)], device=device)
    args["tree_words"] = words.repeat(bs, 1) if optional else None
    return args


def decode_attn(device="cpu", bs=BS, optional=True):
    return attn(device, bs, 1, optional)


def commit(device="cpu", bs=BS, width=WIDTH, logits=False):
    def ints(*shape, dtype=torch.int32, fill=0):
        return torch.full(shape, fill, dtype=dtype, device=device)

    args = {
        "draft_tokens": ints(bs, width, dtype=torch.int64),
        "seq_lens": ints(bs, dtype=torch.int64, fill=5),
        "accept_index": ints(bs, width),
        "num_correct_drafts": ints(bs),
        "accept_lens": ints(bs),
        "accept_tokens": ints(bs, width),
        "bonus_tokens": ints(bs),
        "new_seq_lens": ints(bs, dtype=torch.int64),
        "retrieve_next_token": ints(bs, width, dtype=torch.int64, fill=-1),
        "retrieve_next_sibling": ints(bs, width, dtype=torch.int64, fill=-1),
    }
    if logits:
        size = ops.commit_workspace_bytes(bs, width, VOCAB)
        args["logits"] = torch.randn(bs * width, VOCAB, device=device)
        args["workspace"] = torch.zeros(size, dtype=torch.uint8, device=device)
    else:
        args["targets"] = ints(bs, width, dtype=torch.int64)
    return args


KEPT_ALIVE = []  # a table holds addresses, no tensors


def kv(device="cpu", bs=BS, width=WIDTH):
    """What commit needs to move KV rows."""
    buffers = [torch.zeros(SLOTS, 8, device=device) for _ in range(2)]
    KEPT_ALIVE.extend(buffers)
    ptrs, row_bytes, num_slots = ops.kv_table(buffers)
    loc = torch.arange(bs * width, device=device)
    return {
        "kv_ptrs": ptrs,
        "kv_row_bytes": row_bytes,
        "num_slots": num_slots,
        "out_cache_loc": loc,
    }


def commit_with_kv(device="cpu"):
    return commit(device) | kv(device)


def commit_with_logits(device="cpu"):
    return commit(device, logits=True)


def commit_with_outputs(device="cpu", logits=True):
    """Every optional output, and hidden rows."""
    args = commit(device, logits=logits)
    rows = BS * WIDTH
    return args | {
        "hidden_states": torch.randn(rows, 24, dtype=torch.bfloat16, device=device),
        "next_token_ids": torch.zeros(rows, dtype=torch.int64, device=device),
        "select_index": torch.zeros(BS, dtype=torch.int64, device=device),
        "positions": torch.zeros(rows, dtype=torch.int64, device=device),
        "window_ends": torch.zeros(BS, dtype=torch.int64, device=device),
        "invalid_logits": torch.zeros(BS, dtype=torch.int32, device=device),
    }


def commit_sampled(device="cpu"):
    return commit_with_outputs(device) | {
        "temperatures": torch.ones(BS, device=device),
        "coins": torch.rand(BS, WIDTH, device=device),
        "coins_final": torch.rand(BS, device=device),
    }


def commit_with_probs(device="cpu"):
    args = commit_sampled(device)
    del args["temperatures"]
    args["target_probs"] = args.pop("logits").softmax(1)
    args["draft_probs"] = torch.rand(BS, WIDTH - 1, VOCAB, device=device).softmax(2)
    return args


def compact(device="cpu", bs=BS, width=WIDTH):
    args = kv(device, bs, width)
    args["out_cache_loc"] = args["out_cache_loc"].view(bs, width)
    args["accept_index"] = torch.full((bs, width), -1, dtype=torch.int32, device=device)
    args["accept_lens"] = torch.ones(bs, dtype=torch.int32, device=device)
    return args


def draft_topk(device="cpu", bs=BS, optional=True):
    args = {
        "logits": torch.randn(3, VOCAB, device=device),
        "topk_index": torch.zeros(bs, 3, dtype=torch.int64, device=device),
        "rows": torch.arange(bs, device=device),
    }
    if optional:
        args["topk_p"] = torch.zeros(bs, 3, device=device)
        args["token_map"] = torch.arange(VOCAB, device=device) + 100
    if device == "cuda":
        size = ops.draft_workspace_bytes(bs, VOCAB, 3)
        args["workspace"] = torch.zeros(size, dtype=torch.uint8, device=device)
    return args


def plan(device="cpu", bs=BS):
    return {
        "seq_lens": torch.full((bs,), 500, dtype=torch.int64, device=device),
        "num_kv_heads": KV_HEADS,
        "num_ctas": 3,
        "out": torch.zeros(ops.plan_numel(bs, 3), dtype=torch.int32, device=device),
    }


def tree_words_from_links(device="cpu", bs=BS, width=WIDTH):
    links = torch.full((2, bs, width), -1, dtype=torch.int64, device=device)
    return {
        "retrieve_next_token": links[0],
        "retrieve_next_sibling": links[1],
        "words": torch.zeros(bs, width, dtype=torch.int64, device=device),
    }


def tree_words_from_mask(device="cpu", bs=BS, width=WIDTH, full=False):
    args = {
        "custom_mask": torch.ones(bs * width * (width + 5), dtype=torch.bool, device=device),
        "words": torch.zeros(bs, width, dtype=torch.int64, device=device),
    }
    if full:
        args["seq_lens"] = torch.full((bs,), 5, dtype=torch.int64, device=device)
    return args


def full_mask(device="cpu"):
    return tree_words_from_mask(device, full=True)


CALLS = {  # id -> (op, arguments)
    "verify_attn": ("verify_attn", verify_attn),
    "verify_attn, bare": ("verify_attn", lambda device: verify_attn(device, optional=False)),
    "decode_attn": ("decode_attn", decode_attn),
    "decode_attn, bare": ("decode_attn", lambda device: decode_attn(device, optional=False)),
    "commit": ("commit", commit),
    "commit with logits": ("commit", commit_with_logits),
    "commit with kv": ("commit", commit_with_kv),
    "commit with outputs": ("commit", commit_with_outputs),
    "commit sampled": ("commit", commit_sampled),
    "commit with probs": ("commit", commit_with_probs),
    "compact": ("compact", compact),
    "draft_topk": ("draft_topk", draft_topk),
    "draft_topk, bare": ("draft_topk", lambda device: draft_topk(device, optional=False)),
    "plan": ("plan", plan),
    "tree_words_from_links": ("tree_words_from_links", tree_words_from_links),
    "tree_words_from_mask": ("tree_words_from_mask", tree_words_from_mask),
    "tree_words_from_mask, full": ("tree_words_from_mask", full_mask),
}
