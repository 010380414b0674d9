# SPDX-License-Identifier: Apache-2.0
"""How a model is spread over ranks, and what of it the kernels serve.

A rank has a share of the query heads and the KV heads that these read: 8 KV heads are 4 each on 2
ranks and 1 each on 8; on 16, two ranks have a copy of the same one. Attention is the same op on
fewer heads, so nothing else changes.
"""

from specfused.sglang import compat, features

_SHARED_CONTEXT = {"dcp_size": "--dcp-size", "attn_cp_size": "--attn-cp-size"}


def check_split(runner) -> None:
    """Refuses a number of ranks that heads cannot be spread over; call it before weights load.

    SGLang stops at an assertion without a word for it, deep in the model. On the CPU it adds heads
    until they can be spread.

    Raises:
        features.UnsupportedModel: with the numbers of ranks that can serve this model.
    """
    if runner.device == "cpu":
        return
    ranks = compat.parallel_sizes().attn_tp_size
    q_heads = runner.model_config.num_attention_heads
    kv_heads = runner.model_config.get_total_num_kv_heads()
    if _splits(q_heads, kv_heads, ranks):
        return
    wrong = f"{q_heads} query heads" if q_heads % ranks else f"{kv_heads} KV heads"
    served = [str(n) for n in range(1, q_heads + 1) if _splits(q_heads, kv_heads, n)]
    features.refuse(f"{wrong} over {ranks} ranks", f"--tp-size must be one of {', '.join(served)}")


def _splits(q_heads: int, kv_heads: int, ranks: int) -> bool:
    return q_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def shared_context(settings: dict) -> str | None:
    """The flag by which several ranks hold a request's KV together, or None."""
    for name, flag in _SHARED_CONTEXT.items():
        if settings.get(name, 1) > 1:
            return f"{flag} {settings[name]}"
    return None


def check_context() -> None:
    """Refuses what would have the kernels read a part of a request's KV for all of it."""
    flag = shared_context(compat.settings())
    if flag is not None:
        features.refuse(flag)
