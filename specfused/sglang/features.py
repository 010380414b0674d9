# SPDX-License-Identifier: Apache-2.0
"""Finds at start what a model needs and the kernels do not have, and says which flag to use."""

import torch

from specfused.sglang import compat

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GPU_HEAD_DIMS = (64, 128, 256)
_ALGORITHMS = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


class UnsupportedModel(ValueError):
    """The model or a flag needs a feature that specfused does not serve."""


_INSTEAD = "start with --attention-backend triton (or another stock backend) instead"


def refuse(feature: str, instead: str = _INSTEAD) -> None:
    """Raises UnsupportedModel naming the feature and what to do instead."""
    raise UnsupportedModel(f"specfused: {feature} is not supported; {instead}")


def attention_layers(model) -> list:
    """The model's attention layers, first to last."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [m for m in model.modules() if isinstance(m, RadixAttention)]


def check_runner(runner) -> None:
    """Raises UnsupportedModel for what this runner's model or flags need and no kernel has."""
    if runner.use_mla_backend:
        refuse("multi-head latent attention (MLA)")
    if runner.model_config.is_encoder_decoder:
        refuse("cross attention (encoder-decoder models)")
    algorithm = compat.spec_settings().speculative_algorithm
    if algorithm not in _ALGORITHMS:
        refuse(f"--speculative-algorithm {algorithm}")
    width = compat.num_draft_tokens()
    if width > 64:
        refuse(f"--speculative-num-draft-tokens {width} (more than 64)")
    if runner.kv_cache_dtype not in _DTYPES:
        refuse(f"--kv-cache-dtype {str(runner.kv_cache_dtype).removeprefix('torch.')} (fp8 KV)")
    if runner.kv_cache_dtype != runner.dtype:
        refuse(f"a KV cache of {runner.kv_cache_dtype} beside a model of {runner.dtype}")
    for layer in attention_layers(runner.model):
        check_layer(layer, torch.device(runner.device).type)
    check_pool(runner)


def check_layer(layer, device_type: str) -> None:
    """The same for one attention layer."""
    where = f"layer {layer.layer_id}"
    if layer.is_cross_attention:
        refuse(f"cross attention ({where})")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        refuse(f"sliding window attention ({where}, window {layer.sliding_window_size})")
    if layer.logit_cap:
        refuse(f"logit soft cap ({where}, softcap {layer.logit_cap})")
    if layer.attn_type.value != "decoder":
        refuse(f"attention of type {layer.attn_type.value} ({where})")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        refuse(f"attention temperature ({where})")
    if layer.v_head_dim != layer.qk_head_dim:
        refuse(f"a value head_dim {layer.v_head_dim} beside {layer.qk_head_dim} ({where})")
    if layer.tp_q_head_num % layer.tp_k_head_num:
        refuse(f"{layer.tp_q_head_num} query heads over {layer.tp_k_head_num} KV heads ({where})")
    if device_type == "cuda" and layer.qk_head_dim not in _GPU_HEAD_DIMS:
        refuse(f"head_dim {layer.qk_head_dim} ({where}; the kernels have 64, 128 and 256)")


def check_pool(runner) -> None:
    """KV pools whose rows are not [slot, head, dim] (HND, sliding-window or unified pools)."""
    layers = attention_layers(runner.model)
    if not layers:
        return
    pool = runner.token_to_kv_pool
    layer = layers[0]
    shape = tuple(pool.get_key_buffer(layer.layer_id).shape)
    if len(shape) != 3 or shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        refuse(f"the KV pool {type(pool).__name__} with buffers of shape {shape}")


def check_call(layer, kwargs: dict) -> None:
    """Features that only a layer's call reveals."""
    if kwargs.get("sinks") is not None:
        refuse(f"attention sinks (layer {layer.layer_id})")


def kv_buffers(runner) -> list[torch.Tensor]:
    """K and V buffers of all attention layers of the runner's model."""
    pool = runner.token_to_kv_pool
    ids = sorted({layer.layer_id for layer in attention_layers(runner.model)})
    buffers = [(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in ids]
    return [buffer for pair in buffers for buffer in pair]
