# SPDX-License-Identifier: Apache-2.0
"""Our draft stage: SGLang's own drafts on the same state; the oracle's rounds through graphs."""

import copy
import json

import pytest
import torch
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE, Setting
from graphs import emulate
from harness import run_engine, speculation, wrap
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
        stage.nodes.mask.fill_(True)
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
    assert sizes == {2, 4, 8}
    assert modes == {"DECODE", "DRAFT_EXTEND_V2"}
