# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the serving suite, and what its names mean. CPU only, no engine."""

import json
import math
import tempfile
from types import SimpleNamespace

import pytest
import torch

from bench.run import serving_arguments
from bench.serve import arguments
from bench.serve.child import prompt
from bench.serve.probe import Step
from bench.serve.rescore import Rescore, prompts, verdict
from bench.serve.results import earlier_cases, summary
from bench.serve.setups import llama_8b, setup, tiny
from bench.serve.suite import Child, Failed, Suite


def test_names_become_engines(tmp_path):
    model = llama_8b(tmp_path)
    plain = setup("sglang-plain-triton", model, cuda=True)
    assert plain.engine["attention_backend"] == "triton" and plain.accept == 1.0
    assert not plain.env and "speculative_algorithm" not in plain.engine
    tree = setup("specfused-tree-auto", model, cuda=True)
    assert tree.engine["attention_backend"] == "specfused"
    assert tree.engine["speculative_eagle_topk"] == 4 and tree.accept == 3.0
    assert tree.engine["speculative_num_draft_tokens"] == 16
    assert tree.env["SPECFUSED_MODE"] == "auto" and tree.env["SGLANG_SIMULATE_ACC_LEN"] == "3.0"
    chain = setup("specfused-chain", model, cuda=True)
    assert chain.env["SPECFUSED_MODE"] == "stock" and chain.accept == 2.5
    assert setup("specfused-chain-on", model, cuda=True).accept == 2.5
    real = setup("specfused-chain-on", model, cuda=True, acceptance="real")
    assert real.accept is None and "SGLANG_SIMULATE_ACC_LEN" not in real.env


def test_a_stock_backend_under_our_worker(tmp_path):
    model = llama_8b(tmp_path)
    tree = setup("specfused-tree-auto@triton", model, cuda=True)
    assert tree.engine["attention_backend"] == "triton" and tree.accept == 3.0
    assert tree.env == {"SPECFUSED_MODE": "auto", "SGLANG_SIMULATE_ACC_LEN": "3.0"}
    chain = setup("specfused-chain-off@flashinfer", model, cuda=True)
    assert chain.engine["attention_backend"] == "flashinfer" and chain.accept == 2.5


def test_sglang_adaptive_speculation(tmp_path):
    model = llama_8b(tmp_path)
    chain = setup("sglang-chain-adaptive", model, cuda=True)
    assert chain.engine["speculative_adaptive"] is True and chain.accept is None
    assert chain.engine["attention_backend"] == "triton"
    assert chain.env == {"SGLANG_SIMULATE_ACC_LEN": "2.5"}
    other = setup("sglang-chain-adaptive@flashinfer", model, cuda=True)
    assert other.engine == {**chain.engine, "attention_backend": "flashinfer"}
    assert "speculative_adaptive" not in setup("sglang-chain-triton", model, cuda=True).engine


@pytest.mark.parametrize(
    "name, why",
    [
        ("sglang-tree-adaptive", "adaptive must go with a chain"),
        ("sglang-plain-adaptive", "adaptive must go with a chain"),
        ("sglang-chain@triton", "it is sglang-chain-triton"),
        ("specfused-tree@triton", "it is sglang-tree-triton"),
        ("specfused-tree-stock@triton", "it is sglang-tree-triton"),
        ("specfused-plain-on@triton", "it is sglang-plain-triton"),
        ("specfused-tree-on@", "setup must be"),
    ],
)
def test_names_that_mean_something_else(name, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        setup(name, llama_8b(tmp_path), cuda=True)


def test_a_trained_model_has_real_acceptance():
    chain = setup("specfused-chain", tiny(cuda=False), cuda=False)
    assert chain.accept is None and "SGLANG_SIMULATE_ACC_LEN" not in chain.env


@pytest.mark.parametrize("name", ["vllm-plain", "sglang", "specfused-graph", ""])
def test_unknown_names_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="setup must be"):
        setup(name, llama_8b(tmp_path), cuda=True)


def test_summary_states_the_nominal_accept_length(tmp_path):
    s = setup("sglang-chain-triton", llama_8b(tmp_path), cuda=True)
    # 8 requests, 100 steps, 2.4 tokens a step; the middle repeat decides
    repeats = [{"seconds": t, "steps": 100, "tokens": 1920, "alone": 0} for t in (1.1, 1.0, 1.3)]
    case = summary(s, 8, repeats)
    assert case["ms_per_step"] == pytest.approx(11.0)
    assert case["accept_len"] == pytest.approx(2.4)
    assert case["tok_s"] == pytest.approx(8 * 2.4 / 11e-3, rel=1e-3)
    assert case["tok_s_nominal"] == pytest.approx(8 * 2.5 / 11e-3, rel=1e-3)
    assert case["spread"] == pytest.approx(0.3 / 1.1, rel=1e-2)
    assert case["decode_s"] == pytest.approx(3.4)
    # a quarter of the steps was plain
    half = [{**r, "alone": alone} for r, alone in zip(repeats, (0.25, 0.5, 0), strict=True)]
    case = summary(s, 8, half)
    assert case["nominal_accept_len"] == pytest.approx(0.25 + 0.75 * 2.5)
    # repeats in other modes are other rates: 8 * 100 * (2.125 / 1.1, 1.75 / 1.0, 2.5 / 1.3)
    assert case["tok_s_nominal"] == pytest.approx(800 * 2.5 / 1.3, rel=1e-3)


def test_a_trained_model_states_what_it_accepted():
    s = setup("specfused-chain", tiny(cuda=False), cuda=False)
    case = summary(s, 2, [{"seconds": 1.0, "steps": 10, "tokens": 64, "alone": 0.1}])
    assert case["accept_len"] == pytest.approx(3.2)
    assert case["tok_s_nominal"] == case["tok_s"] == pytest.approx(64.0)


def test_the_suite_has_its_own_arguments():
    assert serving_arguments(["--suite", "attn", "--list"]) is None
    suite, rest = serving_arguments(["--suite", "serve", "--concurrency", "1,30", "--device=cpu"])
    assert suite == "serve"
    args = arguments.parse(rest)
    assert args.concurrency == [1, 30] and args.device == "cpu" and args.model == "tiny"
    for bad in ("--concurrency=0", "--repeats=0", "--decode-seconds=0", "--tokens-in=-5",
                "--setups=sglang-plain,nonsense", "--setups=", "--conc=1", "--tp=0",
                "--engine=[1]", "--engine={", "--id"):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            arguments.parse([bad])
        assert error.value.code == 2, bad


def test_ranks_need_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert arguments.parse(["--device=cuda", "--tp=2"]).tp == 2
    with pytest.raises(SystemExit):
        arguments.parse(["--device=cuda", "--tp=4"])
    assert "--tp must be at most 2, the GPUs here, got 4" in capsys.readouterr().err
    assert arguments.parse(["--device=cpu"]).tp == 1


@pytest.mark.parametrize("suite", arguments.SUITES)
def test_every_suite_passes_the_ranks_on(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    setups = "--setups=specfused-tree-schedule:10"
    argv = ["--device=cpu", setups, "--tp=2", '--engine={"page_size": 4, "tp_size": 8}']
    made = arguments.SUITES[suite](arguments.parse(argv, suite), "test")
    assert made.common["page_size"] == 4 and made.common["tp_size"] == 2 == made.meta["tp"]


@pytest.mark.parametrize(
    ("common", "name", "value"),
    [
        ({"device": "cpu", "tp_size": 2}, "SGLANG_CPU_OMP_THREADS_BIND", "0|1"),
        ({"tp_size": 2}, "SGLANG_SKIP_P2P_CHECK", "1"),
        ({"tp_size": 1}, "SGLANG_SKIP_P2P_CHECK", None),
    ],
)
def test_engines_of_several_ranks_may_start_together(common, name, value, tmp_path, monkeypatch):
    started = {}
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("subprocess.Popen", lambda command, **kwargs: started.update(kwargs))
    monkeypatch.setattr(Child, "_read", lambda child: None)
    Child(setup("specfused-plain", tiny(False), False), common, 256, tmp_path / "log")
    assert started["env"].get(name) == value


def test_losses_become_a_verdict():
    case = verdict("rescore", "x", 2.0, [[0.0, 0.01], [0.2, 0.0, 0.0]])
    assert (case["tokens"], case["not_argmax"], case["beyond_limit"]) == (5, 2, 1)
    assert case["largest_loss"] == pytest.approx(0.2)
    bad = verdict("rescore", "x", 2.0, [[0.0, math.nan]])
    assert bad["beyond_limit"] == 1 and bad["largest_loss"] is None


def test_prompts_differ():
    texts = prompts(96)
    assert len({tuple(t) for t in texts}) == 96 and min(map(len, texts)) >= 33


def test_resuming_needs_the_same_code(tmp_path):
    meta = {"gpu": "g", "commit": "abc", "dirty": False, "model": "tiny", "tokens_in": 64}
    meta["acceptance"] = "real"
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"meta": {**meta, "anchor_ms": [5.0]}, "cases": [{"id": "x"}]}))
    assert earlier_cases(path, meta) == ([{"id": "x"}], [5.0])
    for name, other in (("commit", "def"), ("dirty", True), ("tokens_in", 65), ("gpu", None),
                        ("acceptance", "simulated"), ("sglang", "0.5.23"), ("tp", 2),
                        ("engine", {"page_size": 4}),
                        ("torch", "2.12.0")):  # fmt: skip
        assert earlier_cases(path, {**meta, name: other}) == ([], [])


def test_a_resumed_run_keeps_the_anchors(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    argv = ["--device=cpu", "--setups=specfused-plain", f"--json={tmp_path / 'r.json'}", "--resume"]
    suite = Suite(arguments.parse(argv), "test")
    suite.meta |= {"commit": "abc", "dirty": False}
    suite.anchors = suite.meta["anchor_ms"] = [5.0]
    suite.write()
    again = Suite(arguments.parse(argv), "test")
    again.meta |= {"commit": "abc", "dirty": False}
    again.resume()
    assert again.meta["anchor_ms"] == [5.0]


def test_what_is_of_another_run_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "r.json"
    path.write_text(text := json.dumps({"meta": {"commit": "abc"}, "cases": [{"id": "x"}]}))
    argv = ["--device=cpu", "--setups=specfused-plain", f"--json={path}", "--resume"]
    suite = Suite(arguments.parse(argv), "test")
    suite.resume()
    assert suite.cases == [] and not path.exists()
    assert (tmp_path / "r.json.other").read_text() == text


def test_prompts_fit_into_the_pool(tmp_path):
    """Shorter ones are the start of longer ones, so that the prefix cache serves all points."""
    argv = ["--device", "cpu", "--pool-tokens", "172000", "--tokens-in", "1024"]
    suite = Suite(arguments.parse([*argv, "--concurrency", "8,250"]), "test")
    assert suite.n_in(8) == 1024 and suite.n_in(128) == 1024
    assert suite.n_in(250) == 172000 // 250 - 64 - 128
    assert prompt(7, 100, 128256)[:40] == prompt(7, 40, 128256) != prompt(8, 40, 128256)


class Engine:
    """Stands in for a child process: answers, or fails once and for all."""

    def __init__(self, name: str, model, fails: bool):
        self.setup, self.fails, self.alive, self.asked = setup(name, model, True), fails, True, 0

    def measure(self, bs: int, n_in: int, n_out: int) -> dict:
        self.asked += 1
        if self.fails and self.asked > 1:
            raise Failed("no answer within 120 s")
        return {"seconds": 0.01 * n_out, "tokens": bs * n_out, "steps": n_out, "alone": 1.0}

    def close(self):
        self.alive = False


def test_an_engine_that_fails_is_ended_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    argv = ["--device", "cpu", "--json", str(tmp_path / "r.json"), "--decode-seconds", "2"]
    suite = Suite(arguments.parse([*argv, "--concurrency", "2"]), "test")
    model = llama_8b(tmp_path)
    good, bad = (
        Engine("specfused-plain", model, False),
        Engine("sglang-chain-triton", model, True),
    )
    suite.measure([bad, good], 2)
    assert not bad.alive and bad.asked == 2 and good.alive
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert case["impl"] == "specfused-plain" and case["id"] == "serve/c2"
    assert case["ms_per_step"] == pytest.approx(10.0) and case["decode_s"] >= 2.0
    assert suite.problems == ["sglang-chain-triton: no answer within 120 s"]


def test_a_dead_engine_is_a_failure_and_no_end_of_the_run():
    def write(text: str):
        raise BrokenPipeError

    child = Child.__new__(Child)
    child.log, child.process = "x.log", SimpleNamespace(stdin=SimpleNamespace(write=write))
    with pytest.raises(Failed, match="the engine ended, see x.log"):
        child.ask(bs=1)


class Judged:
    """Stands in for a child process of --suite rescore: emits token 7, which is always right."""

    def __init__(self, name: str):
        self.setup = setup(name, tiny(cuda=False), cuda=False)

    def ask(self, seconds=0, prompts=None, n_out=0, score=None, probe=None):
        if probe is not None:
            return {"steps": [Step(n % 2 == 0, 4, 1.0, 1.0, 1.0) for n in range(9)]}
        if score is not None:
            return {"losses": [[0.0] * len(answer) for answer in score]}
        return {"tokens": [[7] * n_out for _ in prompts], "accept_len": 2.0}

    def close(self):
        pass


def test_more_requests_are_judged_than_run_at_once(tmp_path, monkeypatch):
    argv = ["--device", "cpu", "--json", str(tmp_path / "r.json"), "--concurrency", "4"]
    argv += ["--requests", "96", "--tokens-out", "10"]
    argv += ["--setups", "specfused-tree-schedule:10,sglang-chain-torch_native"]
    suite = Rescore(arguments.parse(argv, "rescore"), "test")
    assert suite.common["max_running_requests"] == 4
    monkeypatch.setattr(suite, "start", lambda names: [Judged(name) for name in names])
    assert suite.run() == 0
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [(c["impl"], c["requests"], c["tokens"], c["switches"]) for c in cases] == [
        ("sglang-plain-torch_native", 96, 960, None),
        ("specfused-tree-schedule:10", 96, 960, 8),
        ("sglang-chain-torch_native", 96, 960, None),
    ]
