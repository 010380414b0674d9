# SPDX-License-Identifier: Apache-2.0
"""Our draft stage: SGLang's own drafts on the same state; the oracle's rounds through graphs."""

import copy
import json
import types

import pytest
import torch
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE, Setting
from graphs import emulate
from harness import run_engine, speculation, wrap
from sglang.srt.layers.logits_processor import LogitsProcessor
from switching import EAGLE3_TREE, EAGLE_CHAIN, OVERLAP, RUNS, Rounds, run

pytestmark = pytest.mark.engine

STANDALONE_TREE = TREE._replace(algorithm="STANDALONE")
EAGLE3_CHAIN = EAGLE_CHAIN._replace(algorithm="EAGLE3")
# Requests come to their ends one after another.
ENDING = [{"max_new_tokens": 4 * n} for n in range(1, 1 + len(PROMPTS))]


class Log:
    """Lines that a scheduler writes, each a value."""

    def __init__(self, path):
        self.path = path

    def write(self, value):
        with open(self.path, "a") as f:
            f.write(json.dumps(value) + "\n")

    def read(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class BothDrafts(Log):
    """Drafts with SGLang's own draft stage before ours, and logs in what they differ."""

    def install(self):
        wrap("specfused.sglang.draft_stage.DraftStage:draft", self._draft)

    def _draft(self, original, stage, batch):
        from specfused.sglang import features

        worker, table = stage.worker, batch.req_to_token_pool.req_to_token
        columns = torch.arange(stage.topk * stage.num_steps).view(stage.topk, -1)[:, :-1].flatten()
        where = batch.seq_lens[:, None] + columns  # what is drafted last is not written
        slots = table[batch.req_pool_indices[:, None], where].flatten()
        buffers = features.kv_buffers(worker.draft_runner)
        theirs = copy.copy(batch)
        theirs.spec_info = copy.copy(batch.spec_info)
        del worker.draft_forward
        theirs = self._nodes(type(worker).draft(worker, theirs), len(batch.seq_lens))
        written = [buffer[slots].clone() for buffer in buffers]
        for buffer in buffers:
            buffer[slots] = torch.nan
        if stage.topk > 1:  # nobody reads a chain's
            stage.mask.fill_(True)
        worker.draft_forward = stage.forward
        verify_input = original(stage, batch)
        mine = self._nodes(verify_input, len(batch.seq_lens))
        different = [name for name in theirs if not torch.equal(theirs[name], mine[name])]
        different += ["KV"] * (not all(map(torch.equal, written, (b[slots] for b in buffers))))
        self.write(different)
        return verify_input

    def _nodes(self, verify_input, bs):
        width = verify_input.draft_token_num
        names = ("draft_token", "positions", "retrieve_index", "retrieve_next_token")
        names += ("retrieve_next_sibling", "custom_mask")
        nodes = {name: getattr(verify_input, name).clone() for name in names}
        nodes["custom_mask"] = nodes["custom_mask"][: bs * width * width]
        return nodes


SAME = {
    "standalone": (CHAIN, {}, {}),
    "standalone, no decode step": (Setting("STANDALONE", 1, 1, 2), {}, {}),
    "chain, overlap": (EAGLE_CHAIN, OVERLAP, {}),
    "chain on pages": (EAGLE_CHAIN, OVERLAP, {"page_size": 16}),
    "chain, token map": (EAGLE3_CHAIN, {}, {}),
    "tree": (TREE, {}, {}),
    "tree, token map": (EAGLE3_TREE, OVERLAP, {}),
    "wide tree": (Setting("STANDALONE", 5, 8, 32), {}, {}),
    "two branches": (Setting("EAGLE", 2, 2, 5), {}, {}),
    "mixed with off steps": (STANDALONE_TREE, {**OVERLAP, "SPECFUSED_MODE": RUNS}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_drafts_are_sglangs(name, models, tmp_path):
    """Tokens, links, positions and masks of all nodes, and the draft's KV."""
    setting, env, options = SAME[name]
    log = BothDrafts(tmp_path / "log")
    run_engine(
        models,
        PROMPTS,
        MAX_NEW_TOKENS,
        env={"SPECFUSED_MODE": "on", **env},
        prepare=log.install,
        sampling=ENDING,
        **{**speculation(models, *setting), **options},
    )
    found = log.read()
    assert len(found) > 5
    assert found == [[]] * len(found)


class Replays(Log):
    """Emulated graphs; logs a replay's bucket and forward mode."""

    def install(self):
        emulate()
        wrap("graphs.Rerun:replay", self._replay)

    def _replay(self, original, backend, key, forward_batch):
        self.write([key.size, forward_batch.forward_mode.name])
        return original(backend, key, forward_batch)


@pytest.mark.parametrize("mode", ["on", RUNS], ids=["on", "runs"])
@pytest.mark.parametrize("setting", [EAGLE_CHAIN, TREE, EAGLE3_TREE, STANDALONE_TREE], ids=str)
def test_rounds_through_graphs(setting, mode, models, rounds, tmp_path):
    replays = Replays(tmp_path / "log")
    (outcome,) = run(models, setting, mode, env=OVERLAP, prepare=replays.install, sampling=ENDING)
    found = Rounds(outcome, rounds(*setting))
    assert found.on > 20 and found.wrong == []
    sizes, modes = map(set, zip(*replays.read(), strict=True))
    assert 8 in sizes and len(sizes) > 1
    assert modes == {"DECODE", "DRAFT_EXTEND_V2"}


def a_worker(**overrides):
    """A speculative worker whose drafts are ours, but for `overrides`."""
    from specfused.sglang import backend, draft

    attn = backend.SpecFusedDecode.__new__(backend.SpecFusedDecode)
    steps = draft.SpecFusedMultiStepDraftBackend.__new__(draft.SpecFusedMultiStepDraftBackend)
    names = overrides.pop("architectures", ["LlamaForCausalLMEagle"])
    runner = {
        "attn_backend": attn,
        "canary_manager": overrides.pop("canary", None),
        "server_args": None,
        "model_config": types.SimpleNamespace(
            model_is_mrope=overrides.pop("mrope", False),
            hf_config=types.SimpleNamespace(architectures=names),
        ),
    }
    draft_worker = {
        "draft_runner": types.SimpleNamespace(**runner),
        "draft_attn_backend": overrides.pop("draft_attn", steps),
        "draft_extend_attn_backend": overrides.pop("extend_attn", attn),
        "index_share_for_mtp_iteration": overrides.pop("index_share", False),
    }
    target = types.SimpleNamespace(attn_backend=overrides.pop("target_attn", attn))
    return types.SimpleNamespace(
        draft_worker=types.SimpleNamespace(**draft_worker),
        target_worker=types.SimpleNamespace(model_runner=target),
        **{"topk": 4, "page_size": 1, **overrides},
    )


NOT_SERVED = {
    "another backend's attention in the draft": {"draft_attn": object()},
    "another backend's attention in the draft extend": {"extend_attn": object()},
    "another backend's attention in the target": {"target_attn": object()},
    "a tree on pages of more than one token": {"page_size": 16},
    "a KV canary": {"canary": object()},
    "multi-dimensional positions in the draft": {"mrope": True},
    "a draft that shares indexer choices between steps": {"index_share": True},
    "a draft that needs contiguous slots": {"architectures": ["Qwen3MoeForCausalLMMTP"]},
    "ranks that gather their tokens": {"gathers": True},
    None: {},
}


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_what_keeps_sglangs_own_stage(reason, monkeypatch, caplog):
    from specfused.sglang import compat_draft, draft_stage

    overrides = dict(NOT_SERVED[reason])
    gathers = overrides.pop("gathers", False)
    monkeypatch.setattr(compat_draft, "gathers_buffers", lambda runner: gathers)
    worker = a_worker(**overrides)
    assert draft_stage.not_served(worker) == reason
    if reason is not None:
        with caplog.at_level("INFO"):
            assert draft_stage.install(worker, None) is None
        assert f"SGLang's own draft stage, for {reason}" in caplog.text


def test_a_chain_on_pages_is_served(monkeypatch):
    from specfused.sglang import compat_draft, draft_stage

    monkeypatch.setattr(compat_draft, "gathers_buffers", lambda runner: False)
    assert draft_stage.not_served(a_worker(topk=1, page_size=16)) is None


@pytest.mark.parametrize("cap", [None, 30.0])
def test_raw_logits(cap):
    """Without the conversion to float32, which is back afterwards; not where logits are capped."""
    from specfused.sglang.candidates import raw_logits

    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.vocab_size, processor.final_logit_softcapping = 3, cap
    logits = torch.ones(2, 4, dtype=torch.bfloat16)
    metadata = types.SimpleNamespace(next_token_logits_buffer=None)
    with raw_logits(types.SimpleNamespace(logits_processor=processor)):
        found = processor._copy_logits_to_buffer(logits, metadata)
    assert found.shape == (2, 3)
    assert found.dtype == (torch.bfloat16 if cap is None else torch.float32)
    assert processor._copy_logits_to_buffer(logits, metadata).dtype == torch.float32
