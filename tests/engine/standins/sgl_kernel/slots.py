# SPDX-License-Identifier: Apache-2.0
"""Moves between `req_to_token` rows and flat slot lists, and KV rows between slots."""

import ctypes

import torch


def _segments(req_pool_indices, start, end):
    """Yield (flat slice, table row, first column, end column) per request."""
    at = 0
    for row, lo, hi in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        size = max(hi - lo, 0)
        yield slice(at, at + size), row, lo, lo + size
        at += size


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """req_to_token[r, start:end] = the request's share of out_cache_loc."""
    for flat, row, lo, hi in _segments(req_pool_indices, start_offset, end_offset):
        req_to_token[row, lo:hi] = out_cache_loc[flat].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The request's share of out_cache_loc = req_to_token[r, start:end]."""
    for flat, row, lo, hi in _segments(req_pool_indices, start_offset, end_offset):
        out_cache_loc[flat] = req_to_token[row, lo:hi].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """out_cache_loc [bs * topk * num_steps] = that many columns after each committed length."""
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """bonus_tokens[i] = the last of request i's accept_lens[i] accepted tokens."""
    last = accept_lens.long().unsqueeze(1) - 1
    picked = accept_tokens.view(-1, accept_stride).gather(1, last)
    bonus_tokens.copy_(picked.squeeze(1).to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The slots of the accepted nodes, packed to the front."""
    slots = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Row tgt[j] = row src[j] in every buffer, given as address (uint64) and row bytes.

    All sources are read before any target is written.
    """
    if tgt_loc.numel() == 0:
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.view(torch.int64).tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[tgt_loc] = buffer[src_loc]
