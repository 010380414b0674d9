# SPDX-License-Identifier: Apache-2.0
"""What commit refuses; see message_tables.py."""

import torch
from message_tables import (
    CONTIGUOUS,
    DTYPE,
    EXPANDED,
    F32,
    F64,
    I32,
    I64,
    LAST,
    RANK,
    SIZE,
    array_rows,
    expanded,
    flat,
    other,
    shorter,
    sized,
    strided,
    value,
)

FLOATS = "float32 or bfloat16 or float16"
INTS = "int64 or int32"
NODES = "bs x num_draft_tokens"

TABLES = {
    "commit": [
        *array_rows("draft_tokens", I64, 2),
        *array_rows("seq_lens", I64, 1),
        *array_rows("accept_index", I32, 2),
        *array_rows("accept_tokens", I32, 2),
        *array_rows("num_correct_drafts", I32, 1),
        *array_rows("accept_lens", I32, 1),
        *array_rows("bonus_tokens", I32, 1),
        *array_rows("new_seq_lens", I64, 1),
        *array_rows("targets", I64, 2),
        *array_rows("retrieve_next_token", I64, 2),
        *array_rows("retrieve_next_sibling", I64, 2),
        *(
            ({name: shorter(0)}, SIZE.format(name, 0, 2, "bs", "draft_tokens", 1))
            for name in (
                "seq_lens",
                "accept_index",
                "accept_tokens",
                "num_correct_drafts",
                "accept_lens",
                "bonus_tokens",
                "new_seq_lens",
                "targets",
                "retrieve_next_token",
                "retrieve_next_sibling",
            )
        ),
        *(
            ({name: shorter(1)}, SIZE.format(name, 1, 4, "num_draft_tokens", "draft_tokens", 3))
            for name in ("targets", "retrieve_next_token", "retrieve_next_sibling")
        ),
        (
            {"draft_tokens": sized(2, 65)},
            "draft_tokens must have 1 to 64 nodes per request, got 65",
        ),
        ({"draft_tokens": sized(2, 0)}, "draft_tokens must have 1 to 64 nodes per request, got 0"),
        ({"accept_index": sized(2, 0)}, "accept_index must have room for the root, got 0 columns"),
        (
            {"accept_tokens": sized(2, 3)},
            SIZE.format("accept_tokens", 1, 4, "longest path", "accept_index", 3),
        ),
        (
            {"targets": value(None)},
            "targets must be given if and only if logits are not, got neither",
        ),
        (
            {"logits": value(torch.zeros(8, 5))},
            "targets must be given if and only if logits are not, got both",
        ),
        (
            {"retrieve_next_token": value(None)},
            "retrieve_next_sibling must be given with retrieve_next_token, got one of them",
        ),
        (
            {"retrieve_next_sibling": value(None)},
            "retrieve_next_sibling must be given with retrieve_next_token, got one of them",
        ),
        ({"workspace": value(torch.zeros(9))}, DTYPE.format("workspace", "uint8", "float32")),
        ({"workspace": value(torch.zeros(9, 1).byte())}, RANK.format("workspace", 1, 2)),
        ({"workspace": value(torch.zeros(9).byte()[::2])}, CONTIGUOUS.format("workspace")),
    ],
    "commit_with_logits": [
        ({"logits": other(F64)}, "logits must be float32 or bfloat16 or float16, got float64"),
        ({"logits": flat}, RANK.format("logits", 2, 1)),
        ({"logits": strided}, LAST.format("logits")),
        (
            {"logits": shorter(0)},
            SIZE.format("logits", 0, 8, "bs x num_draft_tokens", "draft_tokens", 7),
        ),
        (
            {"logits": sized(8, 0)},
            "logits must have a vocabulary of 1 to 2^31 - 1 entries, got 0",
        ),
    ],
    "commit_with_kv": [
        (
            {"kv_ptrs": value(None)},
            "kv_row_bytes must be given with kv_ptrs, got kv_row_bytes alone",
        ),
        ({"kv_row_bytes": value(None)}, "kv_row_bytes must be given with kv_ptrs, got None"),
        *array_rows("kv_ptrs", I64, 1),
        *array_rows("kv_row_bytes", I64, 1),
        (
            {"kv_row_bytes": sized(3)},
            SIZE.format("kv_row_bytes", 0, 2, "K and V buffers", "kv_ptrs", 3),
        ),
        ({"num_slots": value(0)}, "num_slots must be the slots of every buffer, got 0"),
        ({"out_cache_loc": value(None)}, "out_cache_loc must be given with kv_ptrs, got None"),
        *array_rows("out_cache_loc", I64, 1),
        (
            {"out_cache_loc": shorter(0)},
            SIZE.format("out_cache_loc", 0, 8, "bs x num_draft_tokens", "draft_tokens", 7),
        ),
    ],
    "commit_with_outputs": [
        ({"hidden_states": other(I32)}, DTYPE.format("hidden_states", FLOATS, "int32")),
        ({"hidden_states": flat}, RANK.format("hidden_states", 2, 1)),
        ({"hidden_states": strided}, LAST.format("hidden_states")),
        ({"hidden_states": expanded}, EXPANDED.format("hidden_states")),
        ({"next_token_ids": other(F32)}, DTYPE.format("next_token_ids", INTS, "float32")),
        *array_rows("next_token_ids", I64, 1)[1:],
        *array_rows("select_index", I64, 1),
        *array_rows("positions", I64, 1),
        *array_rows("window_ends", I64, 1),
        *array_rows("invalid_logits", I32, 1),
        *(
            ({name: shorter(0)}, SIZE.format(name, 0, 8, NODES, "draft_tokens", 7))
            for name in ("hidden_states", "next_token_ids", "positions")
        ),
        *(
            ({name: shorter(0)}, SIZE.format(name, 0, 2, "bs", "draft_tokens", 1))
            for name in ("select_index", "window_ends", "invalid_logits")
        ),
        (
            {"coins_final": value(torch.zeros(2))},
            "coins_final must be given with coins, got coins_final alone",
        ),
        (
            {"draft_probs": value(torch.zeros(2, 4, 11))},
            "coins must be given with draft_probs, got None",
        ),
        (
            {"temperatures": value(torch.ones(2))},
            "temperatures must be given if and only if logits and coins are, "
            "got temperatures without one of them",
        ),
    ],
    "commit_sampled": [
        *array_rows("temperatures", F32, 1, bad=F64),
        *array_rows("coins", F32, 2, bad=F64),
        *array_rows("coins_final", F32, 1, bad=F64),
        *(
            ({name: shorter(0)}, SIZE.format(name, 0, 2, "bs", "draft_tokens", 1))
            for name in ("temperatures", "coins", "coins_final")
        ),
        ({"coins": shorter(1)}, SIZE.format("coins", 1, 4, "num_draft_tokens", "draft_tokens", 3)),
        ({"coins_final": value(None)}, "coins_final must be given with coins, got None"),
        (
            {"temperatures": value(None)},
            "temperatures must be given if and only if logits and coins are, got None",
        ),
        (
            {
                "targets": value(torch.zeros(2, 4, dtype=I64)),
                "logits": value(None),
                "temperatures": value(None),
            },
            "targets must be None with coins, got a tensor",
        ),
        *(
            ({name: value(bad)}, f"{name} must be at least 0, got {said}")
            for name in ("threshold_single", "threshold_acc")
            for bad, said in ((-0.5, "-0.500000"), (float("nan"), "nan"))
        ),
        (
            {"draft_probs": value(torch.zeros(2, 4, 10))},
            SIZE.format("draft_probs", 2, 11, "vocab", "logits", 10),
        ),
    ],
    "commit_with_probs": [
        ({"target_probs": other(F64)}, DTYPE.format("target_probs", "float32", "float64")),
        ({"target_probs": flat}, RANK.format("target_probs", 2, 1)),
        ({"target_probs": strided}, LAST.format("target_probs")),
        (
            {"target_probs": shorter(0)},
            SIZE.format("target_probs", 0, 8, NODES, "draft_tokens", 7),
        ),
        (
            {"target_probs": sized(8, 0)},
            "target_probs must have a vocabulary of 1 to 2^31 - 1 entries, got 0",
        ),
        (
            {"targets": value(torch.zeros(2, 4, dtype=I64))},
            "target_probs must be given without logits and targets, got targets",
        ),
        (
            {"logits": value(torch.zeros(8, 11))},
            "target_probs must be given without logits and targets, got logits",
        ),
        ({"coins": value(None)}, "coins_final must be given with coins, got coins_final alone"),
        (
            {"coins": value(None), "coins_final": value(None)},
            "coins must be given with target_probs, got None",
        ),
        (
            {"temperatures": value(torch.ones(2))},
            "temperatures must be given if and only if logits and coins are, "
            "got temperatures without one of them",
        ),
        ({"draft_probs": other(F64)}, DTYPE.format("draft_probs", "float32", "float64")),
        ({"draft_probs": flat}, RANK.format("draft_probs", 3, 1)),
        ({"draft_probs": strided}, LAST.format("draft_probs")),
        ({"draft_probs": shorter(0)}, SIZE.format("draft_probs", 0, 2, "bs", "draft_tokens", 1)),
        (
            {"draft_probs": shorter(1)},
            "draft_probs must have a row for each node but the last (3), got 2",
        ),
        (
            {"draft_probs": shorter(2)},
            SIZE.format("draft_probs", 2, 11, "vocab", "target_probs", 10),
        ),
    ],
}
