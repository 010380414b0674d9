# SPDX-License-Identifier: Apache-2.0
"""Keeps committed slots without draft KV out of the prefix cache.

A request that ends while drafting is off has positions that only the target has seen. Its slots of
those are freed with the rest of its reserve instead of being cached: a later request that matches
the prefix computes them again, for both models. Nothing has to run at the end of a request.
"""

from specfused.sglang import compat

worker = None  # the Switching worker of this process, once there is one


def around_release(original, req, *args, **kwargs):
    """AROUND hook of sglang.srt.mem_cache.common.release_kv_cache."""
    if worker is not None:
        missing = worker.missing_draft_kv(req)
        if missing:
            record = compat.kv_record(req)
            committed = record.kv_committed_len - missing
            record.kv_committed_len = max(committed, record.cache_protected_len)
    return original(req, *args, **kwargs)
