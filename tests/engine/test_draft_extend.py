# SPDX-License-Identifier: Apache-2.0
"""The draft extend after a verify: no torch op before it, and SGLang's own result."""

import copy
import json

import pytest
import torch
from cases import CHAIN, MAX_NEW_TOKENS, PROMPTS, TREE
from harness import run_engine, speculation, wrap
from switching import EAGLE3_TREE, EAGLE_CHAIN, OVERLAP
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.engine

MIXED = "schedule:1101000000111"


class Recorder(TorchDispatchMode):
    """Names of the torch ops that run; a view is none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class OpsBeforeExtend:
    """Logs per step what runs from the end of `commit` to the draft extend's forward.

    With ours=False the draft's attention is taken for another's.
    """

    def __init__(self, write, ours=True):
        self.write = write
        self.ours = ours
        self.recorder = None

    def install(self):
        if not self.ours:
            wrap("specfused.sglang.worker:ours", lambda original, backend: None)
        wrap("specfused.ops:commit", self._commit)
        wrap("sglang.srt.model_executor.model_runner.ModelRunner:forward", self._forward)

    def _commit(self, original, *args, **kwargs):
        original(*args, **kwargs)
        self.recorder = Recorder()
        self.recorder.__enter__()

    def _forward(self, original, runner, forward_batch, *args, **kwargs):
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
            assert forward_batch.forward_mode.is_draft_extend_v2()
            self.write(self.recorder.names)
            self.recorder = None
        return original(runner, forward_batch, *args, **kwargs)


class BothExtends:
    """Runs SGLang's draft extend before ours and compares all that they leave behind."""

    def __init__(self, write):
        self.write = write

    def install(self):
        wrap("specfused.sglang.worker.DraftExtend:run", self._run)

    def _run(self, original, extend, batch, verify_input, result, committed):
        from specfused.sglang import compat, features

        theirs = copy.copy(result)
        theirs.next_draft_input = copy.copy(result.next_draft_input)
        buffers = features.kv_buffers(extend.worker.draft_runner)
        slots = batch.out_cache_loc
        compat.extend_after_verify(extend.worker, copy.copy(batch), verify_input, theirs, committed)
        left = self._left(theirs, buffers, slots)
        for buffer in buffers:
            buffer[slots] = torch.nan
        original(extend, batch, verify_input, result, committed)
        (p, *left), (q, *right) = left, self._left(result, buffers, slots)
        pairs = zip(left, right, strict=True)
        same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
        # Sums of a softmax have no order that all keep.
        self.write([extend.ours, same and p.dtype == q.dtype and torch.allclose(p, q, rtol=1e-6)])

    def _left(self, result, buffers, slots):
        following = result.next_draft_input
        left = [following.topk_p, following.topk_index, following.hidden_states]
        # A STANDALONE draft hands on no hidden states.
        return [t for t in left if t is not None] + [buffer[slots] for buffer in buffers]


@pytest.fixture
def steps(models, tmp_path):
    """steps(probe, setting, env, ...) -> what the probe wrote in the steps that drafted."""

    def generate(probe, setting, env, *args, mode="on", **options):
        path = tmp_path / "steps"

        def write(entry):
            with open(path, "a") as f:
                f.write(json.dumps(entry) + "\n")

        run_engine(
            models,
            PROMPTS,
            MAX_NEW_TOKENS,
            env={"SPECFUSED_MODE": mode, **env},
            prepare=probe(write, *args).install,
            **{**speculation(models, *setting), **options},
        )
        return [json.loads(line) for line in path.read_text().splitlines()]

    return generate


@pytest.mark.parametrize("setting", [CHAIN, EAGLE_CHAIN, TREE], ids=str)
def test_no_op_between_commit_and_extend(setting, steps):
    found = steps(OpsBeforeExtend, setting, {})
    assert len(found) > 5
    assert found == [[]] * len(found)


@pytest.mark.parametrize("setting", [EAGLE_CHAIN, EAGLE3_TREE], ids=str)
def test_only_sglang_publishes_lengths_with_overlap(setting, steps):
    """The scheduler prepares the next step by them; it is SGLang's own op."""
    found = steps(OpsBeforeExtend, setting, OVERLAP)
    assert len(found) > 5
    assert found == [["index_put_"]] * len(found)


def test_sglangs_own_extend_runs_where_attention_is_anothers(steps):
    """What the tests above would see of it."""
    found = steps(OpsBeforeExtend, TREE, OVERLAP, False)
    assert len(found) > 5
    for names in found:
        assert {"clamp", "full", "arange", "cumsum", "add"} < set(names)


HIDDEN_STATES = {"return_hidden_states": True, "enable_return_hidden_states": True}
SAME = {
    "standalone": (CHAIN, {}, {}),
    "chain, overlap": (EAGLE_CHAIN, OVERLAP, {}),
    "chain on pages": (EAGLE_CHAIN, OVERLAP, {"page_size": 16}),
    "tree": (TREE, {}, {}),
    "eagle3 tree, overlap": (EAGLE3_TREE, OVERLAP, {}),
    "mixed with off steps": (TREE, OVERLAP, {"mode": MIXED}),
    "sampled": (TREE, {"STANDINS_SAMPLING": "1"}, {"temperature": 0.8}),
    "hidden states": (EAGLE_CHAIN, {}, {**HIDDEN_STATES, "return_logprob": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_result_is_sglangs(name, steps):
    """Bit for bit: candidates, hidden states, and K and V of the window in each layer."""
    setting, env, options = SAME[name]
    found = steps(BothExtends, setting, env, **options)
    assert len(found) > 5
    assert found == [[True, True]] * len(found)
