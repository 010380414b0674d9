# SPDX-License-Identifier: Apache-2.0
"""What the checks of csrc/torch refuse: per call of op_args, changed arguments and the sentence."""

import torch


def other(dtype):
    return lambda t: t.to(dtype)


def flat(t):
    return t.reshape(-1)


def deeper(t):
    return t.unsqueeze(0)


def strided(t):
    """The same sizes, every second element of each row."""
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    return wide[..., ::2]


def expanded(t):
    """The same sizes, all rows the same one."""
    return t[:1].expand(t.shape)


def shorter(dim):
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1).contiguous()


def sized(*shape):
    return lambda t: t.new_zeros(shape)


def value(of):
    return lambda t: of


F64, F32, F16, I32, I64 = torch.float64, torch.float32, torch.float16, torch.int32, torch.int64

DTYPE = "{} must be {}, got {}"
RANK = "{} must have {} dimensions, got {}"
LAST = "{} must be contiguous in its last dimension, got stride 2"
CONTIGUOUS = "{} must be contiguous, got a strided tensor"
EXPANDED = "{} must have memory for each element, got stride 0 in dimension 0"
SIZE = "{}.size({}) must be {} ({}, set by {}), got {}"


def array_rows(name, dtype, rank, *, last_only=False, bad=None):
    """Dtype, rank and stride checks that most arguments have."""
    names = {I64: "int64", I32: "int32", torch.uint8: "uint8", F32: "float32", F64: "float64"}
    wrong = bad or (I32 if dtype == I64 else I64)
    return [
        ({name: other(wrong)}, DTYPE.format(name, names[dtype], names[wrong])),
        ({name: deeper}, RANK.format(name, rank, rank + 1)),
        ({name: strided}, (LAST if last_only else CONTIGUOUS).format(name)),
    ]


def row_tensor(name, dtype="bfloat16"):
    """The same of a [rows, heads, D] tensor of q's dtype."""
    return [
        ({name: other(F32)}, DTYPE.format(name, dtype, "float32")),
        ({name: flat}, RANK.format(name, 3, 1)),
        ({name: strided}, LAST.format(name)),
    ]


REFUSED = [
    ({"sinks": value(torch.zeros(4))}, "sinks must be None (attention sinks), got a tensor"),
    ({"window": value(128)}, "window must be -1 (sliding window attention), got 128"),
    ({"window": value(0)}, "window must be -1 (sliding window attention), got 0"),
    ({"window": value(-2)}, "window must be -1 (sliding window attention), got -2"),
    ({"softcap": value(30.5)}, "softcap must be 0 (logit soft cap), got 30.5"),
    ({"k_scale": value(0.5)}, "k_scale must be None or 1 (scaled fp8 KV), got 0.5"),
    ({"v_scale": value(2.0)}, "v_scale must be None or 1 (scaled fp8 KV), got 2"),
]

OFFSETS = [
    ({"seq_lens_offset": value(far)}, f"seq_lens_offset must be a small number of rows, got {far}")
    for far in (-(1 << 62), (1 << 23) + 1)
]

BOTH = [
    *REFUSED,
    *(
        ({"sm_scale": value(bad)}, f"sm_scale must be positive and finite, got {said}")
        for bad, said in ((0.0, "0.000000"), (-0.2, "-0.200000"), (float("inf"), "inf"))
    ),
    ({"q": other(F64)}, "q must be bfloat16 or float16 or float32, got float64"),
    ({"q": other(I32)}, "q must be bfloat16 or float16 or float32, got int32"),
    ({"q": flat}, RANK.format("q", 3, 1)),
    ({"q": strided}, LAST.format("q")),
    *row_tensor("k_cache"),
    *row_tensor("v_cache"),
    *row_tensor("out"),
    *row_tensor("k_new"),
    *row_tensor("v_new"),
    *(({name: expanded}, EXPANDED.format(name)) for name in ("out", "k_cache", "v_cache")),
    ({"k_cache": shorter(2)}, SIZE.format("k_cache", 2, 64, "head_dim", "q", 63)),
    ({"v_cache": shorter(0)}, SIZE.format("v_cache", 0, 32, "num_slots", "k_cache", 31)),
    ({"v_cache": shorter(1)}, SIZE.format("v_cache", 1, 2, "num_kv_heads", "k_cache", 1)),
    ({"v_cache": shorter(2)}, SIZE.format("v_cache", 2, 64, "head_dim", "q", 63)),
    ({"q": shorter(1)}, "q must have a multiple of num_kv_heads = 2 heads, got 3"),
    (
        {"k_cache": sized(32, 0, 64), "v_cache": sized(32, 0, 64)},
        "q must have a multiple of num_kv_heads = 0 heads, got 4",
    ),
    (
        {"q": sized(8, 4, 0), "k_cache": sized(32, 2, 0), "v_cache": sized(32, 2, 0)},
        "q must have a head_dim of at least 1, got 0",
    ),
    (
        {"k_cache": sized(0, 2, 64), "v_cache": sized(0, 2, 64)},
        "k_cache must have at least one slot, got 0",
    ),
    *array_rows("req_pool_indices", I64, 1),
    *array_rows("seq_lens", I64, 1),
    *array_rows("req_to_token", I32, 2, last_only=True),
    ({"seq_lens": sized(3)}, SIZE.format("seq_lens", 0, 2, "bs", "req_pool_indices", 3)),
    (
        {"req_to_token": lambda t: t.new_empty(2, (1 << 23) + 1)},
        "req_to_token must have at most 2^23 columns (context length), got 8388609",
    ),
    *OFFSETS,
    *array_rows("lse", F32, 2, bad=I64),
    ({"v_new": value(None)}, "v_new must be given with k_new, got k_new alone"),
    ({"k_new": value(None)}, "v_new must be given with k_new, got v_new alone"),
    ({"out_cache_loc": value(None)}, "out_cache_loc must be given with k_new, got None"),
    *array_rows("out_cache_loc", I64, 1)[:2],
    ({"out": shorter(1)}, SIZE.format("out", 1, 4, "num_q_heads", "q", 3)),
    ({"out": shorter(2)}, SIZE.format("out", 2, 64, "head_dim", "q", 63)),
    ({"lse": shorter(1)}, SIZE.format("lse", 1, 4, "num_q_heads", "q", 3)),
    ({"k_new": shorter(1)}, SIZE.format("k_new", 1, 2, "num_kv_heads", "k_cache", 1)),
    ({"k_new": shorter(2)}, SIZE.format("k_new", 2, 64, "head_dim", "q", 63)),
    ({"v_new": shorter(1)}, SIZE.format("v_new", 1, 2, "num_kv_heads", "k_cache", 1)),
    ({"v_new": shorter(2)}, SIZE.format("v_new", 2, 64, "head_dim", "q", 63)),
    ({"plan": value(torch.zeros(9, dtype=I64))}, DTYPE.format("plan", "int32", "int64")),
    ({"plan": value(torch.zeros(9, 1, dtype=I32))}, RANK.format("plan", 1, 2)),
    ({"plan": value(torch.zeros(18, dtype=I32)[::2])}, CONTIGUOUS.format("plan")),
    (
        {"plan": value(torch.zeros(7, dtype=I32))},
        "plan must have more than 7 entries (plan_numel(bs, num_ctas)), got 7",
    ),
    ({"workspace": value(torch.zeros(9))}, DTYPE.format("workspace", "uint8", "float32")),
    ({"workspace": value(torch.zeros(9, 1).byte())}, RANK.format("workspace", 1, 2)),
    ({"workspace": value(torch.zeros(9).byte()[::2])}, CONTIGUOUS.format("workspace")),
]


def rows_of(rows):
    """What is checked against the rows of q, which differ between the ops."""
    return [
        ({name: shorter(0)}, SIZE.format(name, 0, rows, "rows of q", "q", rows - 1))
        for name in ("out", "lse", "k_new", "v_new", "out_cache_loc")
    ]


SLOTS = "window_slots"
TABLES = {
    "verify_attn": [
        *BOTH,
        *rows_of(8),
        ({"q": sized(7, 4, 64)}, "q must have a multiple of bs = 2 rows, got 7"),
        ({"q": sized(0, 4, 64)}, "q must have a multiple of bs = 2 rows, got 0"),
        (
            {"req_pool_indices": sized(0), "seq_lens": sized(0)},
            "q must have 0 rows (bs x rows per request), got 8",
        ),
        ({"q": sized(130, 4, 64)}, "q must have at most 64 rows per request, got 65"),
        *array_rows("tree_words", I64, 2, last_only=True),
        ({"tree_words": shorter(0)}, SIZE.format("tree_words", 0, 2, "bs", "req_pool_indices", 1)),
        ({"tree_words": shorter(1)}, SIZE.format("tree_words", 1, 4, "rows per request", "q", 3)),
        ({SLOTS: value(torch.zeros(2, 5, dtype=I32))}, DTYPE.format(SLOTS, "int64", "int32")),
        ({SLOTS: value(torch.zeros(2, dtype=I64))}, RANK.format(SLOTS, 2, 1)),
        ({SLOTS: value(torch.zeros(2, 10, dtype=I64)[:, ::2])}, LAST.format(SLOTS)),
        (
            {SLOTS: value(torch.zeros(3, 5, dtype=I64))},
            SIZE.format(SLOTS, 0, 2, "bs", "req_pool_indices", 3),
        ),
        (
            {SLOTS: value(torch.zeros(2, 0, dtype=I64))},
            "window_slots must have 1 to 64 columns, got 0",
        ),
        (
            {SLOTS: value(torch.zeros(2, 65, dtype=I64))},
            "window_slots must have 1 to 64 columns, got 65",
        ),
        (
            {SLOTS: value(torch.zeros(2, 3, dtype=I64)), "tree_words": value(None)},
            "window_slots must have a column for each row when tree_words is None, got 3 columns",
        ),
    ],
    "decode_attn": [
        *BOTH,
        *rows_of(2),
        ({"q": sized(3, 4, 64)}, "q must have 2 rows (bs x rows per request), got 3"),
    ],
    "draft_topk": [
        *array_rows("topk_index", I64, 2),
        *array_rows("topk_p", F32, 2),
        *array_rows("rows", I64, 1),
        *array_rows("token_map", I64, 1),
        (
            {"logits": other(F64)},
            DTYPE.format("logits", "float32 or bfloat16 or float16", "float64"),
        ),
        ({"logits": flat}, RANK.format("logits", 2, 1)),
        ({"logits": strided}, LAST.format("logits")),
        ({"logits": sized(3, 0)}, "logits must have a vocabulary of 1 to 2^31 - 1, got 0"),
        ({"topk_index": sized(3, 3)}, SIZE.format("topk_index", 0, 2, "rows", "rows", 3)),
        (
            {"topk_index": sized(2, 0), "topk_p": value(None)},
            "topk_index must have 1 to 11 columns, got 0",
        ),
        (
            {"topk_index": sized(2, 12), "topk_p": value(None)},
            "topk_index must have 1 to 11 columns, got 12",
        ),
        ({"topk_p": sized(2, 4)}, SIZE.format("topk_p", 1, 3, "topk", "topk_index", 4)),
        ({"token_map": sized(10)}, SIZE.format("token_map", 0, 11, "vocab", "logits", 10)),
    ],
    "compact": [
        *array_rows("accept_index", I32, 2),
        *array_rows("accept_lens", I32, 1),
        *array_rows("out_cache_loc", I64, 2),
        *array_rows("kv_ptrs", I64, 1),
        *array_rows("kv_row_bytes", I64, 1),
        ({"accept_lens": sized(3)}, SIZE.format("accept_lens", 0, 2, "bs", "accept_index", 3)),
        (
            {"out_cache_loc": shorter(0)},
            SIZE.format("out_cache_loc", 0, 2, "bs", "accept_index", 1),
        ),
        (
            {"out_cache_loc": sized(2, 65)},
            "out_cache_loc must have 1 to 64 slots per request, got 65",
        ),
        (
            {"out_cache_loc": sized(2, 0)},
            "out_cache_loc must have 1 to 64 slots per request, got 0",
        ),
        ({"num_slots": value(-1)}, "num_slots must be the slots of every buffer, got -1"),
        (
            {"kv_row_bytes": sized(3)},
            SIZE.format("kv_row_bytes", 0, 2, "K and V buffers", "kv_ptrs", 3),
        ),
    ],
    "plan": [
        *OFFSETS,
        *array_rows("seq_lens", I64, 1),
        *array_rows("out", I32, 1),
        ({"num_kv_heads": value(0)}, "num_kv_heads must be 1 to 2^31 - 1, got 0"),
        ({"num_ctas": value(0)}, "num_ctas must be 1 to 2^31 - 1, got 0"),
        ({"num_ctas": value(-4)}, "num_ctas must be 1 to 2^31 - 1, got -4"),
        ({"out": shorter(0)}, SIZE.format("out", 0, 10, "plan_numel(bs, num_ctas)", "num_ctas", 9)),
    ],
    "tree_words_from_links": [
        *array_rows("words", I64, 2),
        *array_rows("retrieve_next_token", I64, 2),
        *array_rows("retrieve_next_sibling", I64, 2),
        *(
            ({name: shorter(dim)}, SIZE.format(name, dim, size, of, "words", size - 1))
            for name in ("retrieve_next_token", "retrieve_next_sibling")
            for dim, size, of in ((0, 2, "bs"), (1, 4, "num_draft_tokens"))
        ),
        (
            dict.fromkeys(("words", "retrieve_next_token", "retrieve_next_sibling"), sized(2, 65)),
            "words must have 1 to 64 columns, got 65",
        ),
    ],
    "tree_words_from_mask": [
        *array_rows("words", I64, 2),
        ({"words": sized(2, 65)}, "words must have 1 to 64 columns, got 65"),
        ({"words": sized(2, 0)}, "words must have 1 to 64 columns, got 0"),
        ({"custom_mask": other(F32)}, DTYPE.format("custom_mask", "bool or uint8", "float32")),
        ({"custom_mask": deeper}, RANK.format("custom_mask", 1, 2)),
        ({"custom_mask": strided}, CONTIGUOUS.format("custom_mask")),
        (
            {"custom_mask": sized(31)},
            "custom_mask must have at least 32 cells (bs x W x W), got 31",
        ),
    ],
    "full_mask": [
        *array_rows("seq_lens", I64, 1),
        ({"seq_lens": shorter(0)}, SIZE.format("seq_lens", 0, 2, "bs", "words", 1)),
    ],
}
