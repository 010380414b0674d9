# SPDX-License-Identifier: Apache-2.0
"""The plugin's own decisions: versions, refused features, prefill choice, draft trees, hooks."""

import contextlib
import types

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from specfused import ops
from specfused.sglang import buffers, compat, draft, features, plugin, prefill
from specfused.sglang import ranks as spread


def test_buffers_ask_the_device_of_the_rank(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(ops, "attn_num_ctas", lambda *args: asked.append(args) or 1)
    for device in ("cuda", "cuda:1"):
        step = buffers.StepBuffers.__new__(buffers.StepBuffers)
        step.device, step._heads, step.max_bs = torch.device(device), (8, 2, 64), 4
        with contextlib.suppress(Exception):  # no GPU to allocate on
            step._make(4)
    assert asked == [(3, 64), (1, 64)]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23", "0.5.17+local"])
def test_tested_versions_are_accepted(version):
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.6.0", "0.5.23rc1", "1.0"])
def test_other_versions_are_refused_by_name(version, monkeypatch):
    monkeypatch.delenv(compat.ALLOW_UNTESTED, raising=False)
    with pytest.raises(compat.UnsupportedVersion, match=f"0.5.17 and 0.5.23.*got {version}"):
        compat.check_version(version)
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    compat.check_version(version)


def layer(**overrides):
    """A decoder layer that is served, but for `overrides`."""
    values = {"num_heads": 4, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2, "layer_id": 3}
    return RadixAttention(**{**values, **overrides})


REFUSED = {
    "sliding window attention (layer 3, window 128)": {"sliding_window_size": 128},
    "logit soft cap (layer 3, softcap 50.0)": {"logit_cap": 50.0},
    "cross attention (layer 3)": {"is_cross_attention": True},
    "attention of type encoder_only (layer 3)": {"attn_type": AttentionType.ENCODER_ONLY},
    "a value head_dim 128 beside 64 (layer 3)": {"v_head_dim": 128},
    "5 query heads over 2 KV heads (layer 3)": {"num_heads": 5},
}


@pytest.mark.parametrize("feature", REFUSED)
def test_a_layer_that_is_not_served_is_named_with_a_way_out(feature):
    with pytest.raises(features.UnsupportedModel) as error:
        features.check_layer(layer(**REFUSED[feature]), "cpu")
    assert str(error.value) == (
        f"specfused: {feature} is not supported; "
        "start with --attention-backend triton (or another stock backend) instead"
    )


def test_head_dims_of_the_gpu_kernels():
    features.check_layer(layer(), "cuda")
    features.check_layer(layer(head_dim=80), "cpu")
    with pytest.raises(features.UnsupportedModel, match="head_dim 80 .*64, 128 and 256"):
        features.check_layer(layer(head_dim=80), "cuda")


def runner(**overrides):
    """A model runner with one served layer, but for `overrides`."""
    pool = types.SimpleNamespace(get_key_buffer=lambda layer_id: torch.zeros(9, 2, 64))
    values = {
        "use_mla_backend": False,
        "model_config": types.SimpleNamespace(is_encoder_decoder=False),
        "kv_cache_dtype": torch.bfloat16,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "model": torch.nn.ModuleList([layer()]),
        "token_to_kv_pool": pool,
    }
    return types.SimpleNamespace(**{**values, **overrides})


def spec(algorithm=None, width=None):
    return types.SimpleNamespace(
        speculative_algorithm=algorithm, speculative_num_draft_tokens=width
    )


REFUSED_RUNNERS = {
    "multi-head latent attention": (runner(use_mla_backend=True), spec()),
    "encoder-decoder": (
        runner(model_config=types.SimpleNamespace(is_encoder_decoder=True)),
        spec(),
    ),
    "--kv-cache-dtype float8_e4m3fn": (runner(kv_cache_dtype=torch.float8_e4m3fn), spec()),
    "a KV cache of torch.float16": (runner(kv_cache_dtype=torch.float16), spec()),
    "--speculative-algorithm NGRAM": (runner(), spec("NGRAM", 8)),
    "more than 64": (runner(), spec("EAGLE", 65)),
    "the KV pool SimpleNamespace": (
        runner(
            token_to_kv_pool=types.SimpleNamespace(
                get_key_buffer=lambda layer_id: torch.zeros(9, 1, 2, 64)
            )
        ),
        spec(),
    ),
}


@pytest.mark.parametrize("feature", REFUSED_RUNNERS)
def test_a_runner_that_is_not_served_is_refused_at_start(feature, monkeypatch):
    refused, settings = REFUSED_RUNNERS[feature]
    monkeypatch.setattr(compat, "spec_settings", lambda: settings)
    with pytest.raises(features.UnsupportedModel) as error:
        features.check_runner(refused)
    assert feature in str(error.value)
    assert "--attention-backend triton" in str(error.value)


def test_a_served_runner_passes(monkeypatch):
    monkeypatch.setattr(compat, "spec_settings", lambda: spec("EAGLE3", 64))
    features.check_runner(runner())


def split(ranks, q_heads=32, kv_heads=8, device="cuda"):
    """check_split of a model on so many ranks."""
    config = types.SimpleNamespace(
        num_attention_heads=q_heads, get_total_num_kv_heads=lambda: kv_heads
    )
    with pytest.MonkeyPatch.context() as patch:
        sizes = types.SimpleNamespace(attn_tp_size=ranks)
        patch.setattr(compat, "parallel_sizes", lambda: sizes)
        spread.check_split(types.SimpleNamespace(model_config=config, device=device))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_heads_are_split_or_copied(ranks):
    split(ranks)


@pytest.mark.parametrize(
    ("ranks", "q_heads", "kv_heads", "wrong", "served"),
    [
        (4, 12, 6, "6 KV heads over 4", "1, 2, 3, 6, 12"),
        (3, 32, 8, "32 query heads over 3", "1, 2, 4, 8, 16, 32"),
        (64, 32, 8, "32 query heads over 64", "1, 2, 4, 8, 16, 32"),
    ],
)
def test_ranks_that_heads_cannot_be_spread_over(ranks, q_heads, kv_heads, wrong, served):
    with pytest.raises(features.UnsupportedModel) as error:
        split(ranks, q_heads, kv_heads)
    assert str(error.value) == (
        f"specfused: {wrong} ranks is not supported; --tp-size must be one of {served}"
    )
    split(ranks, q_heads, kv_heads, device="cpu")


@pytest.mark.parametrize(("backends", "asked"), [(("triton", "specfused"), 1), (("fa3",) * 2, 0)])
def test_heads_are_only_checked_where_attention_is_ours(backends, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(spread, "check_split", seen.append)
    monkeypatch.setattr(compat, "prefill_backend_name", lambda runner: backends[0])
    monkeypatch.setattr(compat, "decode_backend_name", lambda server_args: backends[1])
    plugin._check_split(types.SimpleNamespace())
    assert len(seen) == asked


@pytest.mark.parametrize(
    ("name", "flag"), [("dcp_size", "--dcp-size 2"), ("attn_cp_size", "--attn-cp-size 2")]
)
def test_context_over_several_ranks_is_refused(name, flag, monkeypatch):
    monkeypatch.setattr(compat, "settings", lambda: {"dcp_size": 1, "attn_cp_size": 1})
    spread.check_context()
    monkeypatch.setattr(compat, "settings", lambda: {name: 2})
    with pytest.raises(features.UnsupportedModel, match=f"^specfused: {flag} is not supported"):
        spread.check_context()


def test_sinks_are_refused_when_a_layer_brings_them():
    features.check_call(layer(), {})
    with pytest.raises(features.UnsupportedModel, match="attention sinks"):
        features.check_call(layer(), {"sinks": torch.zeros(4)})


def test_prefill_choice(monkeypatch):
    monkeypatch.delenv(prefill.VARIABLE, raising=False)
    assert prefill.choose("specfused") == "torch_native"
    assert prefill.choose("triton") == "triton"  # what the command line says
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compat, "fa3_present", lambda: True)
    assert prefill.choose("specfused") == "fa3"
    monkeypatch.setattr(compat, "fa3_present", lambda: False)
    monkeypatch.setattr(compat, "flashinfer_present", lambda: True)
    assert prefill.choose("specfused") == "flashinfer"
    monkeypatch.setattr(compat, "flashinfer_present", lambda: False)
    assert prefill.choose("specfused") == "triton"
    monkeypatch.setenv(prefill.VARIABLE, "torch_native")
    assert prefill.choose("triton") == "torch_native"
    monkeypatch.setenv(prefill.VARIABLE, " ")  # as good as none
    assert prefill.choose("specfused") == "triton"
    monkeypatch.setenv(prefill.VARIABLE, "fa4")
    with pytest.raises(ValueError, match="must be auto or one of fa3, .*got fa4"):
        prefill.choose("specfused")


def test_draft_branches_see_their_own_slots_only():
    """Branch t of a 4-step draft at step 1 sees columns 4t and 4t + 1."""
    assert draft.branch_words(3, 4, 1) == [0b11, 0b11 << 4, 0b11 << 8]
    words = draft.branch_words(8, 8, 7)
    assert [w & (1 << 64) - 1 for w in words] == [0xFF << 8 * t for t in range(8)]
    assert words[7] < 0  # bit 63 of a signed word


def test_a_draft_wider_than_a_word_is_refused():
    with pytest.raises(features.UnsupportedModel, match="--speculative-draft-attention-backend"):
        draft.SpecFusedMultiStepDraftBackend(None, topk=8, speculative_num_steps=9)


def test_registration_is_idempotent_and_only_adds():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    before = list(ATTENTION_BACKEND_CHOICES)
    plugin.register()
    plugin.register()
    assert ATTENTION_BACKEND_CHOICES.count("specfused") == 1
    assert set(before) <= set(ATTENTION_BACKEND_CHOICES)
    assert ATTENTION_BACKENDS["specfused"] is plugin._create
    assert ATTENTION_BACKENDS["triton"] is not plugin._create


def test_stock_names_still_reach_the_stock_draft_backends():
    """The hook adds a name; it must not answer for others."""
    seen = {}

    def original(factory, backend_name, backend_map, template):
        seen.update(backend_map)
        return backend_map["triton"]()

    factory = types.SimpleNamespace(_create_triton_decode_backend=lambda: "stock")
    table = {"triton": factory._create_triton_decode_backend}
    assert plugin._create_draft_backend(original, factory, "decode", table, "") == "stock"
    assert set(seen) == {"triton", "specfused"} and set(table) == {"triton"}
