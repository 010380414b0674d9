# SPDX-License-Identifier: Apache-2.0
"""The switching worker's parts without an engine: ring, catch-up, limits, reports, ranks."""

import contextlib
import json
import logging
import multiprocessing
import sys
import types

import pytest
import torch

from specfused import ops
from specfused.policy import Mode, Schedule
from specfused.sglang import catch_up, commit, compat, features, limits, report, ring, switch


def test_schedule_of_a_catch_up():
    """No forward takes more than W pairs of a request, all end with the last one."""
    assert catch_up.schedule([10, 3, 0, 8], 8) == [
        [(10, 2), (3, 0), (0, 0), (8, 0)],
        [(8, 8), (3, 3), (0, 0), (8, 8)],
    ]
    for width in (1, 4):
        forwards = catch_up.schedule([9, 4, 1], width)
        assert [sum(forward[i][1] for forward in forwards) for i in range(3)] == [9, 4, 1]
        assert all(take > 0 for _, take in forwards[-1])
        assert max(take for forward in forwards for _, take in forward) == width


def test_ring_keeps_pairs_by_position():
    """Rows are apart, and a position's cell is used again a ring later."""
    pairs = ring.PendingRing((3, 64), 4, 2, torch.float32, "cpu")
    rows = torch.tensor([2, 0])
    for position in range(6):
        lens = torch.tensor([position, position + 5])
        hidden = lens[:, None] + torch.tensor([[0.25, 0.5]])
        pairs.push(rows, lens, 100 + lens, hidden)
    tokens, hidden = pairs.read(rows, torch.tensor([[2, 3, 4, 5], [7, 8, 9, 10]]))
    assert tokens.tolist() == [102, 103, 104, 105, 107, 108, 109, 110]
    assert hidden[:, 0].tolist() == [2.25, 3.25, 4.25, 5.25, 7.25, 8.25, 9.25, 10.25]
    assert pairs.tokens[4:8].tolist() == [0] * 4
    assert pairs.nbytes == 12 * 8 + 12 * 2 * 4


def test_pending_counts_follow_the_request_and_not_its_row():
    old, new = types.SimpleNamespace(), types.SimpleNamespace()
    for step in (1, 2, 3):
        ring.note_off_step([old], step)
    assert (ring.pending(old), ring.pending(new)) == (3, 0)
    # The scheduler is at step 3, or at step 2 with step 3 under way.
    assert [ring.missing_draft_kv(old, done) for done in (3, 2)] == [3, 2]
    ring.clear([old])
    assert ring.missing_draft_kv(old, 3) == 0


def worker(**overrides):
    """A worker that may switch, but for `overrides` of its model runner."""
    config = types.SimpleNamespace(is_multimodal=overrides.pop("is_multimodal", False))
    draft = types.SimpleNamespace(seed_dsa_topk_from_draft_extend=overrides.pop("seed", False))
    topk = overrides.pop("topk", 4)
    values = {"is_hybrid_swa": False, "use_mla_backend": False, **overrides}
    target = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(model_config=config, **values)
    )
    return types.SimpleNamespace(
        plan_stream=None, target_worker=target, draft_worker=draft, topk=topk
    )


@pytest.mark.parametrize(
    ("settings", "overrides", "reason"),
    [
        ({"enable_hierarchical_cache": True}, {}, "--enable-hierarchical-cache (HiCache)"),
        ({"enable_lora": True}, {}, "--enable-lora"),
        ({"enable_dp_attention": True}, {}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, {}, "--disaggregation-mode decode"),
        ({"pp_size": 2}, {}, "--pp-size 2"),
        ({"dcp_size": 2}, {}, "--dcp-size 2"),
        ({"speculative_adaptive": True}, {}, "--speculative-adaptive"),
        ({}, {"is_multimodal": True}, "a multimodal model"),
        ({}, {"watermark_state": object()}, "watermarks"),
        ({}, {"is_hybrid_swa": True}, "a sliding window KV pool"),
        ({}, {"use_mla_backend": True}, "trees over multi-head latent attention (MLA)"),
        ({}, {"topk": 17}, "trees of more than 16 branches"),
        ({}, {"seed": True}, "a draft that hands indexer choices from step to step"),
    ],
)
def test_what_cannot_switch_is_named(settings, overrides, reason, monkeypatch, caplog):
    """Refused if SPECFUSED_MODE asks for it, else SGLang's own steps and a line in the log."""
    monkeypatch.setattr(compat, "settings", lambda: settings)
    monkeypatch.setattr(compat, "has_recurrent_state", lambda runner: False)
    monkeypatch.setenv("SPECFUSED_MODE", "auto")
    with pytest.raises(features.UnsupportedModel) as error:
        limits.may_switch(worker(**overrides))
    assert str(error.value) == (
        f"specfused: switching (SPECFUSED_MODE) with {reason} is not supported; "
        "set SPECFUSED_MODE=stock or leave it unset"
    )
    monkeypatch.delenv("SPECFUSED_MODE")
    assert not limits.may_switch(worker(**overrides))
    assert reason in caplog.text
    monkeypatch.setattr(compat, "settings", lambda: {})
    assert limits.may_switch(worker())


def test_end_of_reads_is_an_event_on_the_runner():
    runner = types.SimpleNamespace(device="cpu", war_fastpath_read_done_event=None)
    compat.publish_reads_done(runner)
    assert runner.war_fastpath_read_done_event is not None
    compat.forget_reads_done(runner)
    assert runner.war_fastpath_read_done_event is None


class FakeCounter:
    """prometheus_client.Counter: values by name and labels."""

    values: dict = {}

    def __init__(self, name, text, labels=()):
        self.key = (name,)

    def labels(self, mode):
        child = FakeCounter(self.key[0], "")
        child.key = (self.key[0], mode)
        return child

    def inc(self, amount):
        self.values[self.key] = self.values.get(self.key, 0) + amount


def test_report(monkeypatch, caplog):
    """Every interval a line with what happened since the last one, and the same in counters."""
    monkeypatch.setattr(FakeCounter, "values", {})
    module = types.SimpleNamespace(Counter=FakeCounter)
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    policy = Schedule("1100")
    reports = report.Report(policy, 4, metrics=True)
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            mode = policy.decide(2, 100.0).mode
            policy.observe_accept(mode, [3, 2] if mode is Mode.ON else [1, 1])
            reports.step(mode, 5)
    lines = [line for line in caplog.messages if line.startswith("specfused: drafting")]
    assert lines[0].startswith(
        "specfused: drafting off, 2 steps on, accept len 2.50, 2 steps off, accept len 1.00, "
        "1 switches, 5 tokens caught up; schedule: off"
    )
    assert "2 switches, 0 tokens caught up" in lines[1]
    assert len(lines) == 2
    assert FakeCounter.values == {
        ("specfused_steps", "on"): 4,
        ("specfused_steps", "off"): 4,
        ("specfused_requests", "on"): 8,
        ("specfused_requests", "off"): 8,
        ("specfused_tokens", "on"): 20,
        ("specfused_tokens", "off"): 8,
        ("specfused_switches",): 3,
        ("specfused_caught_up",): 5,
    }


def _rank(rank, folder, answers):
    """One of two ranks whose clocks disagree; then one whose policy went astray."""
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = types.SimpleNamespace(ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
    mine = [((Mode.ON, 4, 100.5), 0.001 * (rank + 1)), ((Mode.OFF, 8, 7.0), 0.5)][: 2 - rank]
    shared = switch._from_first(group, mine)
    ours = switch.Switch("schedule:10", "cpu", group)
    ours.policy.decide(1 + rank, 10.0)
    ours.policy.decide(1, 10.0 * (1 + rank))
    try:
        ours._compare_ranks(Mode.OFF)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    answers.put((shared, said))


def test_ranks_share_times_and_notice_a_difference(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, tmp_path, answers)) for r in range(2)]
    for process in ranks:
        process.start()
    both = [answers.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join()
    for shared, said in both:
        assert shared == [((Mode.ON, 4, 100.5), 0.001), ((Mode.OFF, 8, 7.0), 0.5)]
        assert said.startswith("specfused: the policy must be in one state on all ranks, got [")


@pytest.mark.parametrize(
    ("topk", "length", "path"), [(4, 3, [0, 6, 7]), (4, 1, [0]), (1, 3, [0, 1, 2])]
)
def test_simulated_acceptance_moves_what_it_accepts(topk, length, path, monkeypatch):
    """A tree's nodes that are in place already would make its commit cheaper than a real one."""
    monkeypatch.setattr(compat, "simulated_accept_len", lambda most: min(length, most))
    verifier = commit.Verifier.__new__(commit.Verifier)
    verifier.topk, verifier._simulated = topk, {}
    bs, width, depth = 2, 8, 4
    tree = verifier._simulated_tree(torch.zeros((bs, width), dtype=torch.int64), depth)
    done = commit._empty(bs, width, depth, "cpu")
    ops.commit(
        tree.pop("draft_tokens"),
        torch.tensor([5, 9]),
        done.accept_index,
        done.num_correct_drafts,
        done.accept_lens,
        done.accept_tokens,
        done.bonus_tokens,
        done.new_seq_lens,
        targets=torch.full((bs, width), commit.SIMULATED_TOKEN),
        **tree,
    )
    assert done.accept_lens.tolist() == [length] * bs
    first, second = done.accept_index[:, :length].tolist()
    assert first == path and second == [width + node for node in path]
    assert done.accept_tokens[:, :length].unique().tolist() == [commit.SIMULATED_TOKEN]


def test_ring_size_is_checked(monkeypatch):
    monkeypatch.delenv("SPECFUSED_RING", raising=False)
    assert ring.configured_size() == 32
    monkeypatch.setenv("SPECFUSED_RING", "0")
    with pytest.raises(ValueError, match="SPECFUSED_RING must be an integer of 1 to 999999, got 0"):
        ring.configured_size()
    monkeypatch.setenv("SPECFUSED_RING", "16")
    assert switch.Switch("auto", "cpu").policy.settings.ring_tokens == 16


def test_graphs_that_sglang_captures_again(monkeypatch):
    """The new ones are those that draft, and the others are made anew."""
    from specfused.sglang import modes

    made = iter(["off 1", "off 2"])
    monkeypatch.setattr(compat, "spec_width", lambda width: contextlib.nullcontext())
    monkeypatch.setattr(compat, "new_attn_backend", lambda runner: "second")
    monkeypatch.setattr(compat, "decode_graphs", lambda *args, **kwargs: next(made))
    runner = types.SimpleNamespace(
        attn_backend="first", decode_cuda_graph_runner="on 1", device="cpu"
    )
    both = modes.Modes(runner)
    both.capture_off()
    seen = []
    for drafting in (False, True, False):
        both.enter(drafting)
        seen.append((runner.attn_backend, runner.decode_cuda_graph_runner))
    assert seen == [("second", "off 1"), ("first", "on 1"), ("second", "off 1")]
    runner.decode_cuda_graph_runner = "on 2"
    both.enter(False)
    assert runner.decode_cuda_graph_runner == "off 2"
    both.enter(True)
    # Captured on the backend that was in place then.
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("second", "on 2")


def test_no_event_of_an_earlier_phase_is_left():
    """After a decode step and before a prefill: the scheduler would take it for the prefill's."""
    from specfused.sglang.worker import EAGLEWorkerV2, SpecFusedWorker

    made = SpecFusedWorker.__new__(SpecFusedWorker)
    target = types.SimpleNamespace(war_fastpath_read_done_event="old", shared_read_done_event="old")
    draft = types.SimpleNamespace(war_fastpath_read_done_event="old")
    made._target_worker = types.SimpleNamespace(model_runner=target)
    made._draft_worker = types.SimpleNamespace(draft_runner=draft)
    entered = []
    made.modes = types.SimpleNamespace(enter=entered.append)
    made._drafted = False
    asks = hasattr(EAGLEWorkerV2, "last_shared_read_runner")  # 0.5.23
    assert not asks or made.last_shared_read_runner is target
    made._leave_decode()
    assert not asks or made.last_shared_read_runner is draft
    assert entered == [True]
    assert target.war_fastpath_read_done_event is target.shared_read_done_event is None
    assert draft.war_fastpath_read_done_event is None


def test_a_server_starts_without_step_times(monkeypatch, caplog):
    """Whatever goes wrong while step times are measured, the policy then learns in service."""
    from specfused.policy import Mode
    from specfused.sglang import calibrate
    from specfused.sglang.switch import Switch

    def fail(worker):
        raise RuntimeError("a kernel that no one expected to fail")

    monkeypatch.setattr(calibrate, "points", fail)
    switch = Switch("auto", "cpu")
    switch.calibrate(worker=None)
    assert "no step times at start" in caplog.text
    assert "no one expected" in caplog.text
    assert switch.policy.decide(4, 100.0).mode in Mode
    monkeypatch.setattr(calibrate, "points", lambda worker: [])  # no room for any batch
    switch.calibrate(worker=None)
    assert switch.policy.decide(4, 100.0).mode in Mode


@pytest.mark.parametrize("text", ["onn", "Stock", "table:1=on,01=off", '{"policy": "autos"}'])
def test_a_wrong_mode_is_named(text):
    from specfused.sglang.switch import policy_of

    with pytest.raises(ValueError, match="SPECFUSED_MODE must be stock or a policy: "):
        policy_of(text)


def test_auto_knows_the_ring_in_every_spelling(monkeypatch):
    from specfused.sglang import switch

    monkeypatch.setenv("SPECFUSED_RING", " 8 ")
    monkeypatch.setenv("SPECFUSED_MODE", " auto ")
    assert switch.configured() == "auto"
    assert switch.policy_of("auto").settings.ring_tokens == 8
    assert switch.policy_of('{"policy": "auto"}').settings.ring_tokens == 8
    assert switch.policy_of('{"policy": "auto", "ring_tokens": 5}').settings.ring_tokens == 5
    monkeypatch.setenv("SPECFUSED_MODE", " ")
    assert switch.configured() is None


def test_points_that_were_given_are_not_measured(monkeypatch):
    from specfused.sglang import calibrate
    from specfused.sglang.switch import Switch

    monkeypatch.setattr(calibrate, "points", lambda worker: pytest.fail("measured"))
    points = [["on", 1, 256, 0.02], ["off", 1, 256, 0.01]]
    text = json.dumps({"policy": "auto", "calibration": points})
    Switch(text, "cpu").calibrate(None)


@pytest.mark.parametrize("rank", [0, 1])
def test_stats_are_those_of_rank_0(rank, tmp_path, monkeypatch):
    from specfused.sglang import stats

    path = tmp_path / "stats.json"
    monkeypatch.setattr(compat, "tp_rank", lambda: rank)
    monkeypatch.setenv("SPECFUSED_STATS", str(path))
    stats.count("target", "DECODE")
    stats.write()
    assert path.exists() == (rank == 0)
    stats._calls.clear()


def test_stats_that_cannot_be_written_end_no_server(monkeypatch, caplog):
    from specfused.sglang import stats

    monkeypatch.setattr(compat, "tp_rank", lambda: 0)
    monkeypatch.setenv("SPECFUSED_STATS", "/nonexistent/stats.json")
    stats.count("target", "DECODE")
    assert "cannot be written" in caplog.text
    monkeypatch.setenv("SPECFUSED_STATS", "")
    stats.count("target", "DECODE")
