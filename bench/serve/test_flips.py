# SPDX-License-Identifier: Apache-2.0
"""The probe on a worker of plain objects and a clock of its own, and the figures of --suite flips.

tests/engine/test_flips.py runs both on a real engine.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from bench.serve import arguments, flips, probe
from bench.serve.flips import Flips, Run
from bench.serve.probe import Probe, Step, switches
from bench.serve.setups import setup, tiny
from bench.serve.suite import Failed
from specfused.policy import Mode, from_config


def steps(pattern: str, bs: int = 2, **more) -> list[Step]:
    """`1` drafts in 5 ms, `0` does not in 2 ms; a change costs 3 us, no change 1 us."""
    last, found = pattern[0], []
    for mode in pattern:
        enter = 3.0 if mode != last else 1.0
        found.append(Step(mode == "1", bs, 10.0, enter, 5.0 if mode == "1" else 2.0, **more))
        last = mode
    return found


GRAPHS = {"target_on": 2, "target_off": 2, "draft": 2, "draft_extend": 2}


def run(found: list[Step], memory=(), graphs=GRAPHS, same_graphs=True) -> Run:
    return Run(found, list(memory), graphs, same_graphs)


def test_switches_are_counted_between_neighbours():
    assert switches(steps("1010")) == 3 and switches(steps("1100")) == 1
    assert switches(steps("1")) == switches([]) == 0


def test_memory_is_compared_within_a_generation():
    assert flips.memory([run(steps("10"))]) is None
    first, second = [[5, 100], [5, 100]], [[6, 120], [6, 120], [6, 120]]
    seen = flips.memory([run([], first), run([], second)])
    assert seen == {
        "device_allocs": [5, 6, 6],
        "reserved_bytes": [100, 120, 120],
        "compared": 3,
        "changes": 0,
    }
    assert flips.memory([run([], [[5, 100], [5, 90], [5, 90]])])["changes"] == 1


def test_host_times_by_whether_the_mode_changes():
    figures = flips.host([run(steps("0011")), run(steps("1111"))])
    assert figures["switch"] == {"steps": 1, "enter": [3.0, 3.0], "choose": [10.0, 10.0]}
    assert figures["stay"]["steps"] == 5 and figures["stay"]["enter"] == [1.0, 1.0]
    assert figures["difference"] == pytest.approx(2.0)
    assert flips.shown(figures).startswith("switch 3.0 us (p99 3.0) after a choice of 10.0")
    assert flips.host([run(steps("1"))]) == {"switch": {"steps": 0}, "stay": {"steps": 0}}


def test_a_catch_up_is_that_of_the_whole_batch():
    caught = {"fewest": 4, "most": 4, "pairs": 8, "catch_up_ms": 1.0}
    runs = [
        run(
            [
                *steps("1", **caught),
                *steps("1", **{**caught, "catch_up_ms": 3.0}),
                *steps("1", **{**caught, "fewest": 3}),  # a request came later
                *steps("1", bs=1, **caught),
                *steps("0", **caught),  # of a full ring
            ]
        )
    ]
    point = flips.catch_up(runs, 2, 4, plain=2.0, on=4.5)
    assert point == {"pending": 4, "times": 2, "ms": 2.0, "of_plain": 1.0, "extra_ms": 0.5}
    nothing = flips.catch_up(runs, 2, 5, plain=2.0, on=None)
    assert (nothing["times"], nothing["ms"], nothing["extra_ms"]) == (0, None, None)
    cost = flips.ring_cost(runs, 2, 4)
    assert cost == {"ring": 4, "times": 4, "us_per_token": 187.5, "largest_ms": 3.0}
    assert flips.ring_cost([], 2, 4)["us_per_token"] is None
    assert flips.step_ms(runs, 2, True) is None
    assert flips.step_ms([run(steps("10"))], 2, True) == 5.0


def promises(runs, wanted=3, cuda=True):
    case = {
        "flips": sum(switches(r.steps) for r in runs),
        "memory": flips.memory(runs),
        "graphs": runs[-1].graphs,
        "host_us": flips.host(runs),
    }
    return flips.broken(case, runs, wanted, cuda)


def test_every_promise_can_be_broken():
    good = run(steps("1010"), [[5, 100], [5, 100]])
    assert promises([good]) == []
    assert promises([run(steps("1010"))], cuda=False) == []
    for bad, what in (
        (good._replace(steps=steps("1011")), "flips must be at least 3, got 2"),
        (good._replace(memory=[[5, 100]]), "memory was not seen"),
        (good._replace(memory=[[5, 100], [6, 100]]), "memory must stay"),
        (good._replace(same_graphs=False), "graphs must stay"),
        (good._replace(graphs={**GRAPHS, "draft": 0}), "graphs must be captured"),
        (good._replace(steps=[s._replace(enter_us=21.0) for s in good.steps]), "a switch must"),
    ):
        (found,) = promises([bad])
        assert found.startswith(what), found
    more = good._replace(graphs={**GRAPHS, "draft": 3})
    assert promises([good, more])[0].startswith("graphs must stay")


# -- the probe


class Clock:
    """Events of a stream that takes a millisecond between two of them."""

    def __init__(self):
        self.now = self.waited = self.looks = 0

    def event(self, enable_timing):
        return Event(self)

    def memory_stats(self):
        self.looks += 1
        return {"num_device_alloc": 7, "reserved_bytes.all.current": 1 << 20}


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.clock.now += 1
        self.at = self.clock.now

    def synchronize(self):
        self.clock.waited += 1

    def elapsed_time(self, end):
        return float(end.at - self.at)


class Worker:
    """What the probe touches of a `SpecFusedWorker`, with the calls of its steps."""

    device = "cpu"
    switches = True

    def __init__(self):
        graph = SimpleNamespace(backend=SimpleNamespace(_graphs={1: object(), 8: object()}))
        self.ring = SimpleNamespace(size=64)
        self.policy_log, self.forgotten, self.entered = [], 0, []
        self.switch = SimpleNamespace(
            policy=from_config("schedule:10"),
            ranks=None,
            choose=lambda reqs: self.switch.policy.decide(len(reqs), 1.0).mode,
            launched=lambda: None,
            prefill=lambda: None,
        )
        self.modes = SimpleNamespace(
            on=SimpleNamespace(graph_runner=graph),
            off=SimpleNamespace(graph_runner=copy.deepcopy(graph)),
            enter=self.entered.append,
        )
        self.catch_up = SimpleNamespace(run=lambda batch, resume: None)
        self.draft_worker = SimpleNamespace(
            cuda_graph_runner=None, cuda_graph_runner_for_draft_extend=graph
        )
        self.report = SimpleNamespace(interval=0)

    def _forget_reads_done(self):
        self.forgotten += 1

    def prefill(self):
        self.switch.prefill()
        self.modes.enter(True)
        self._forget_reads_done()

    def step(self, reqs, catches_up=False):
        mode = self.switch.choose(reqs)
        self.modes.enter(mode is Mode.ON)
        self._forget_reads_done()
        if catches_up:
            self.catch_up.run(SimpleNamespace(reqs=reqs), resume=True)
        self.switch.launched()
        return mode


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def answered(worker, tmp_path):
    """answered(**change): the probe's answer, and the probe is set up on the worker."""
    path = tmp_path / "answers.json"
    made = Probe(worker, path)

    def answer(**change):
        made.answer(**change)
        return Run.of(json.loads(path.read_text()))

    answer.probe = made
    return answer


def test_steps_are_recorded_without_waiting(worker, answered):
    clock = Clock()
    answered.probe.cuda = SimpleNamespace(Event=clock.event, memory_stats=clock.memory_stats)
    reqs = [SimpleNamespace(specfused_pending=n) for n in (2, 3)]
    worker.prefill()
    assert [worker.step(reqs, n == 2) for n in range(3)] == [Mode.ON, Mode.OFF, Mode.ON]
    worker.prefill()
    for _ in range(probe.MEMORY_INTERVAL):
        worker.step(reqs[:1])
    assert clock.waited == 0 and worker.forgotten == 105 and worker.entered[1:4] == [1, 0, 1]
    first, second, third, after_prefill, *_ = answered().steps
    assert (first.ms, second.ms, third.ms, after_prefill.ms) == (None, 1.0, 3.0, None)
    assert (third.fewest, third.most, third.pairs, third.catch_up_ms) == (2, 3, 5, 1.0)
    assert second.pairs == 0 and not second.on and second.bs == 2 and after_prefill.bs == 1
    assert first.choose_us > 0 and first.enter_us > 0
    assert clock.waited > 100 and clock.looks == 1


def test_an_answer_ends_what_it_tells(worker, answered):
    worker.catch_up.run(SimpleNamespace(reqs=[SimpleNamespace()]), resume=True)  # nothing pending
    worker.step([None])
    told = answered(schedule="schedule:0", ring=4)
    assert len(told.steps) == 1 and told.memory == [] and told.same_graphs
    assert told.graphs == {"target_on": 2, "target_off": 2, "draft": 0, "draft_extend": 2}
    assert worker.ring.size == 4 and worker.report.policy is worker.switch.policy
    assert worker.step([None, None]) is Mode.OFF
    worker.modes.on.graph_runner.backend._graphs[8] = object()
    told = answered()
    assert [step.bs for step in told.steps] == [2] and not told.same_graphs
    assert told.steps[0].ms >= 0 and worker.ring.size == 4
    with pytest.raises(ValueError, match="probe: ring must be at most 64, got 65"):
        answered(ring=65)


def test_ranks_are_one_account():
    first = {"memory": [[5, 100], [5, 100]], "graphs": {"target_on": 2}, "same_graphs": True}
    second = {**first, "memory": [[7, 300], [8, 320]]}
    told = probe.of_ranks([first, second])
    assert told == {**first, "memory": [[12, 400], [13, 420]]}
    assert probe.of_ranks([first]) == first
    for wrong in ({"same_graphs": False}, {"graphs": {"target_on": 3}}):
        assert not probe.of_ranks([first, second | wrong])["same_graphs"]


def test_rank_0_writes_for_all(worker, tmp_path):
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for rank in (1, 0):
            group = torch.distributed.group.WORLD
            worker.switch.ranks = SimpleNamespace(ranks=[0], cpu_group=group, rank_in_group=rank)
            path = tmp_path / f"{rank}.json"
            made = Probe(worker, path)
            worker.step([None])
            made.answer()
            assert path.exists() == (rank == 0)
    finally:
        torch.distributed.destroy_process_group()
    told = Run.of(json.loads(path.read_text()))
    assert len(told.steps) == 1 and told.same_graphs and told.graphs["target_on"] == 2


def test_the_entry_point_is_found_and_let_in(tmp_path, monkeypatch):
    from importlib.metadata import entry_points

    monkeypatch.syspath_prepend(probe.plant(tmp_path / "plugins"))
    (found,) = entry_points(group="sglang.srt.plugins", name=probe.NAME)
    assert found.load() is probe.register
    assert probe.environment(tmp_path) == {probe.FILE: str(tmp_path)}
    monkeypatch.setenv("SGLANG_PLUGINS", "specfused")
    assert probe.environment(tmp_path)["SGLANG_PLUGINS"] == f"specfused,{probe.NAME}"


# -- the suite


def test_only_engines_that_switch():
    def switching(name):
        return setup(name, tiny(cuda=False), cuda=False).switches

    assert switching("specfused-tree-auto") and switching("specfused-chain-schedule:10")
    assert not any(map(switching, ("specfused-tree", "sglang-chain-triton", "specfused-plain-on")))
    for bad in ("--setups=specfused-tree", "--resume"):
        with pytest.raises(SystemExit):
            arguments.parse(["--device", "cpu", bad], "flips")
    args = arguments.parse(["--device", "cpu"], "flips")
    assert (
        args.id == "flips" and args.flips == 100 and args.setups[0] == "specfused-tree-schedule:10"
    )


class Engine:
    """Stands in for a child process: one step a token, as the schedule says."""

    def __init__(self, fails_at: str = ""):
        self.setup = setup("specfused-tree-schedule:10", tiny(cuda=False), cuda=False)
        self.fails_at, self.alive, self.asked = fails_at, True, []

    def ask(self, seconds, bs, n_in, n_out, probe):
        pattern, ring = probe["schedule"].removeprefix("schedule:"), probe["ring"]
        self.asked.append((pattern, ring))
        if pattern == self.fails_at:
            raise Failed("the engine ended")
        found, pending = [], 0
        for n in range(n_out):
            on = pattern[n % len(pattern)] == "1"
            caught = {}
            if pending and (on or pending == ring):
                caught = {"fewest": pending, "most": pending, "pairs": bs * pending}
                caught["catch_up_ms"], pending = 1.0, 0
            found.append(Step(on, bs, 9.0, 2.0, 4.0 if on else 2.0, **caught))
            pending += not on
        graphs = dict.fromkeys(GRAPHS, 0)
        return {"steps": found, "memory": [], "graphs": graphs, "same_graphs": True}

    def close(self):
        self.alive = False


@pytest.fixture
def suite(tmp_path):
    argv = ["--device", "cpu", "--json", str(tmp_path / "r.json"), "--pending", "1,8"]
    argv += ["--concurrency", "2,4", "--flips", "50", "--setups", "specfused-tree-schedule:10"]
    suite = Flips(arguments.parse(argv, "flips"), "test")
    suite.cases_written = lambda: json.loads((tmp_path / "r.json").read_text())["cases"]
    return suite


def test_a_run_has_a_case_for_every_batch_size(suite, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(suite, "start", lambda names: [engine])
    assert suite.run() == 0 and not engine.alive
    first, second = suite.cases_written()
    assert (first["id"], second["id"]) == ("flips/c2", "flips/c4") and first["flips"] >= 50
    assert [p["pending"] for p in first["catch_up"]] == [1, 8]
    assert all(p["times"] >= 6 and p["of_plain"] == 0.5 for p in first["catch_up"])
    assert (first["plain_ms"], first["on_ms"], first["memory"]) == (2.0, 4.0, None)
    small, whole = first["ring"]
    assert (small["ring"], small["us_per_token"]) == (4, 125.0)  # 1 ms for 4 pairs of 2 requests
    assert (whole["ring"], whole["us_per_token"]) == (32, 62.5)
    assert ("0" * 8 + "1", 4) in engine.asked and ("1", 32) in engine.asked


def test_what_an_engine_did_before_it_failed_is_kept(suite, monkeypatch):
    engine = Engine(fails_at="01")
    monkeypatch.setattr(suite, "start", lambda names: [engine])
    assert suite.run() == 1 and not engine.alive
    (case,) = suite.cases_written()
    assert case["flips"] >= 50 and "catch_up" not in case
    assert suite.problems == ["specfused-tree-schedule:10: the engine ended"]


def test_nothing_starts_when_time_is_up(suite, monkeypatch):
    monkeypatch.setattr(suite, "late", lambda: True)
    assert suite.run() == 1
    assert suite.problems == ["time is up: specfused-tree-schedule:10 not run"]


def test_no_other_point_starts_when_time_is_up(suite, monkeypatch):
    answers = iter([False, False, True])  # before the engine and before each of its two points
    monkeypatch.setattr(suite, "late", lambda: next(answers))
    monkeypatch.setattr(suite, "start", lambda names: [Engine()])
    assert suite.run() == 1 and len(suite.cases_written()) == 1
    assert suite.problems == ["time is up: c4 of specfused-tree-schedule:10 not run"]


def test_a_broken_promise_is_the_exit_status(suite, monkeypatch):
    monkeypatch.setattr(suite, "start", lambda names: [Engine()])
    monkeypatch.setattr(suite, "catch_ups", lambda child, bs, case: [])
    monkeypatch.setattr(suite, "flip", lambda child, bs, case: short(case))
    assert suite.run() == 1
    expected = "specfused-tree-schedule:10 c{}: flips must be at least 50, got 1"
    assert suite.problems == [expected.format(2), expected.format(4)]


def short(case: dict) -> list[Run]:
    """Too few flips."""
    case |= {"flips": 1, "memory": None, "graphs": GRAPHS}
    return [run(steps("10"))]
