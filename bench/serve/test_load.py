# SPDX-License-Identifier: Apache-2.0
"""The load suite without an engine: clients, what the log says, phases, the table."""

import asyncio
import datetime
import json
import types

import pytest

from bench.serve import arguments, clients, decode_log, load

EPOCH = datetime.datetime(2026, 3, 1, 12, 0, 0).timestamp()


def stamp(second: float) -> str:
    when = datetime.datetime.fromtimestamp(EPOCH + second)
    return f"[{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d} TP0]"


def choice(second: float, mode: str, reason: str, accept: str = "") -> str:
    return (
        f"{stamp(second)} specfused: drafting {mode}, 1 steps {mode}, accept len {accept or '1.00'}"
        f", 0 switches, 0 tokens caught up; auto: {mode} ({reason}) for 1 steps; bs 4 context 65: "
        "on 2.00 tokens / 18.7 ms = 107/s, off 1 / 4.03 ms = 248/s\n"
        "accept length 2.00 over 0 requests; step times calibrated"
    )


def decode(second: float, running: int, accept: str = "") -> str:
    return (
        f"{stamp(second)} Decode batch, #running-req: {running}, #token: 96, token usage: 0.02, "
        f"{accept}cpu graph: False, gen throughput (token/s): 10.70, #queue-req: 0"
    )


LOG = "\n".join(
    [
        "no time here: Decode batch, #running-req: 9",
        choice(0.1, "on", "goodput", "0.00"),
        choice(0.2, "on", "goodput", "3.00"),
        decode(0.21, 4, "accept len: 3.00, accept rate: 0.1, "),
        choice(0.3, "off", "probe"),  # a probe that finds nothing
        choice(0.4, "on", "probe-end", "2.00"),
        choice(1.1, "on", "dwell"),
        decode(1.15, 8),
        choice(1.25, "off", "goodput"),
        f"{stamp(1.3)} Prefill batch, #new-seq: 2, #new-token: 66, #cached-token: 62, "
        "token usage: 0.02, #running-req: 0, #queue-req: 0",
        choice(1.4, "off", "goodput"),
        choice(1.5, "on", "probe", "3.00"),  # and one that runs when the phase ends
    ]
)


def test_the_log_is_read():
    log = decode_log.read(LOG, EPOCH)
    assert [c.on for c in log.choices] == [True, True, False, True, True, False, False, True]
    assert [c.accept for c in log.choices[:4]] == [None, 3.0, None, 2.0]
    assert log.choices[1].second == pytest.approx(0.2, abs=1e-3)
    assert [d[1:] for d in log.decodes] == [(4, 3.0), (8, 1.0)]
    assert [n for _, n in log.prefills] == [66]


def test_modes_of_a_phase():
    choices = decode_log.read(LOG, EPOCH).choices
    first = decode_log.modes(choices, 0.0, 1.0)
    assert (first["mode"], first["time_to_mode_s"], first["steps_to_mode"]) == ("on", 0.0, 0)
    assert (first["switches"], first["probes"], first["on_share"]) == (2, 1, 0.75)
    assert first["accept_len_on"] == pytest.approx(2.5)
    second = decode_log.modes(choices, 1.0, 2.0)
    assert (second["mode"], second["steps_to_mode"]) == ("off", 1)
    assert second["time_to_mode_s"] == pytest.approx(0.25, abs=2e-3)
    assert (second["switches"], second["probes"]) == (2, 1)
    # it changed exactly between the phases: the first step counts, and takes its time
    third = decode_log.modes(choices, 1.2, 1.45)
    assert (third["steps_to_mode"], third["switches"]) == (0, 1)
    assert third["time_to_mode_s"] == pytest.approx(0.05, abs=2e-3)
    assert set(decode_log.modes(choices, 5.0, 6.0).values()) == {None}


def test_sglang_adaptive_speculation_is_read():
    lines = [
        f"{stamp(-2)} AdaptiveSpeculativeParams initialized: steps=3, candidate_steps=[1, 3, 7]",
        decode(0.1, 4, "accept len: 2.50, "),
        f"{stamp(0.2)} Switch adaptive runtime state: steps 3 -> 0, draft_tokens 4 -> 1",
        decode(0.3, 4, "accept len: 1.00, "),
        decode(0.4, 4, "accept len: 1.00, "),
    ]
    choices = decode_log.read("\n".join(lines), EPOCH).choices
    found = decode_log.modes(choices, 0.0, 1.0)
    assert (found["mode"], found["steps_to_mode"], found["switches"]) == ("off", 1, 1)
    assert found["accept_len_on"] == 2.5 and found["probes"] == 0


def test_batches_and_bins():
    log = decode_log.read(LOG, EPOCH)
    found = decode_log.batches(log, 0.0, 2.0)
    assert (found["steps"], found["requests_per_step"]) == (2, 6.0)
    assert found["accept_len"] == pytest.approx((4 * 3 + 8) / 12, abs=1e-3)
    assert (found["prefills"], found["prefill_tokens"]) == (1, 66)
    assert decode_log.batches(log, 5.0, 6.0)["accept_len"] is None
    assert decode_log.on_share(log.choices, 0.5, 4) == [0.75, None, 0.33, 1.0]


# client 1 has to stop at second 1: its request ends at 1.5
REQUESTS = [
    {"client": 0, "begin": 0.0, "chunks": [[0.1, 1], [0.5, 5], [0.9, 9]]},
    {"client": 1, "begin": 0.5, "chunks": [[0.6, 1], [1.5, 10]]},
]


def test_chunks_are_spread_over_their_time():
    assert list(load.pieces(REQUESTS[1])) == [(0.6, 0.6, 1), (0.6, 1.5, 9)]
    assert load.tokens_between(REQUESTS, 0.0, 1.0) == pytest.approx(9 + 1 + 4)
    assert load.tokens_between(REQUESTS, 1.0, 2.0) == pytest.approx(5)
    found = load.series(REQUESTS, decode_log.Log(), 2.0)
    assert len(found["tokens"]) == 20 and found["tokens"][7] == pytest.approx(2.0)
    assert sum(found["tokens"]) == pytest.approx(19, abs=0.1)
    assert found["clients"][4:7] == pytest.approx([1, 2, 2]) and found["clients"][15] == 0
    assert found["on"] == [None] * 20


def test_a_phase():
    first = load.phase(REQUESTS, decode_log.read(LOG, EPOCH), 2, 0.0, 1.0)
    assert (first["tok_s"], first["settle_s"], first["mode"]) == (14.0, 0.0, "on")
    assert first["tok_s_steady"] == pytest.approx((4 + 1 + 4) / 0.5)
    assert first["requests"] == 1
    assert first["latency_p50_ms"] == pytest.approx(900) and first["ttft_p99_ms"] == 100
    assert first["itl_p50_ms"] == pytest.approx(100)
    second = load.phase(REQUESTS, decode_log.Log(), 1, 1.0, 2.0)
    assert (second["tok_s"], second["settle_s"], second["mode"]) == (5.0, 0.5, None)
    assert second["itl_p99_ms"] == pytest.approx(100)
    nothing = load.phase([], decode_log.Log(), 1, 0.0, 1.0)
    assert nothing["tok_s"] == 0 and nothing["latency_p50_ms"] is None


def test_the_table_compares_with_the_fastest():
    cases = [
        {"id": "load/p0-c4", "impl": "a", "tok_s": 100.0},
        {"id": "load/p0-c4", "impl": "b", "tok_s": 50.0},
        {"id": "load/p1-c8", "impl": "b", "tok_s": 70.0},
        {"id": "load/series", "impl": "a"},
    ]
    head, a, b = load.table(cases, "tok_s")
    assert head.split() == ["tok_s", "load/p0-c4", "load/p1-c8"]
    assert a.split() == ["a", "100", "(100", "%)", "-"]
    assert b.split() == ["b", "50", "(50", "%)", "70", "(100", "%)"]


# -- clients


class Engine:
    """Answers a token a millisecond, in chunks; `short`: a token too few."""

    def __init__(self, short: bool = False):
        self.loop, self.short = asyncio.new_event_loop(), short
        self.batches, self.prompts, self.lengths, self.now, self.most = [], [], [], 0, 0

    def generate(self, input_ids, sampling_params):
        self.batches.append((len(input_ids), sampling_params["max_new_tokens"]))

    async def async_generate(self, input_ids, sampling_params, stream):
        assert stream and sampling_params["ignore_eos"]
        wanted, chunk = sampling_params["max_new_tokens"], sampling_params["stream_interval"]
        self.prompts.append(input_ids[0])
        self.lengths.append(wanted)

        async def answer():
            self.now += 1
            self.most = max(self.most, self.now)
            for done in [*range(1, wanted - 1, chunk), wanted - self.short]:
                await asyncio.sleep(1e-3 * chunk)
                yield {"meta_info": {"completion_tokens": done, "finish_reason": "length"}}
            self.now -= 1

        return answer()


def test_clients_come_and_go():
    engine = Engine()
    found = clients.measure(engine, [[7], [8]], [1, 3, 1], 0.15, n_out=10, stream_interval=4)
    assert engine.batches == [(2, 1), (1, clients.WARM_TOKENS), (3, clients.WARM_TOKENS)]
    assert engine.most == 3 and engine.now == 0 and set(engine.prompts) == {7, 8}
    assert 7 <= min(engine.lengths) < max(engine.lengths) <= 13
    assert 0 < found["busy"] < 1.5
    begin, up, down, end = found["bounds"]
    assert begin < 0.01 and up - begin >= 0.15 and end - down >= 0.15
    assert abs(found["epoch"] - datetime.datetime.now().timestamp()) < 60
    by_client = {i: [r for r in found["requests"] if r["client"] == i] for i in range(3)}
    assert len(by_client[0]) > len(by_client[1]) > 1
    assert all(up <= r["begin"] < down for i in (1, 2) for r in by_client[i])
    assert all(r["chunks"][-1][1] in range(7, 14) for r in found["requests"])
    # one after the other, and the same lengths in every engine
    ends = [r["chunks"][-1][0] for r in by_client[0]]
    assert all(r["begin"] >= e for r, e in zip(by_client[0][1:], ends, strict=False))
    again = clients.lengths(0, 10)
    assert [r["chunks"][-1][1] for r in by_client[0]] == [next(again) for _ in by_client[0]]


def test_an_answer_too_short_ends_the_run():
    with pytest.raises(RuntimeError, match=r"must emit \d+ tokens"):
        clients.measure(Engine(short=True), [[7]], [1], 5.0, n_out=10, stream_interval=4)


# -- the suite


def test_arguments():
    args = arguments.parse(["--device", "cpu"], "load")
    assert args.phases == [1, 6, 1] and args.prompts == 6 and args.id == "load"
    assert args.setups == arguments.LOAD.split(",")
    args = arguments.parse(["--device=cpu", "--phases=2,3", "--prompts=1"], "load")
    assert args.phases == [2, 3] and args.prompts == 1
    least = load.pool_tokens(1, 64, 3, 160)
    assert least == 64 + 3 * (208 + 64)
    fits = ["--device=cpu", "--phases=3", "--prompts=1", "--pool-tokens"]
    assert arguments.parse([*fits, str(least)], "load").pool_tokens == least
    for bad in ([*fits, str(least - 1)], ["--phases", "0"], ["--phase-seconds", "0"]):
        with pytest.raises(SystemExit) as error:
            arguments.parse(bad, "load")
        assert error.value.code == 2


class Child:
    """Stands in for an engine: its log grows while it answers, or it fails."""

    def __init__(self, name: str, path, fails: bool):
        self.setup, self.log, self.fails = types.SimpleNamespace(name=name), path, fails
        self.closed = False
        self.log.write_text(choice(-9.0, "on", "goodput") + "\n")

    def ask(self, seconds: float, **request):
        assert request["phases"] == [2, 1] and request["num_prompts"] == 2 and seconds > 2
        if self.fails:
            raise KeyError("chunks")
        with self.log.open("a") as log:
            log.write(LOG)
        return {"epoch": EPOCH, "bounds": [0.0, 1.0, 2.0], "busy": 0.2, "requests": REQUESTS}

    def close(self):
        self.closed = True


def test_engines_one_after_the_other(tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.json"
    argv = ["--device=cpu", "--phases=2,1", "--phase-seconds=1", f"--json={path}", "--parallel=2",
            "--setups=specfused-tree-on,specfused-tree-auto"]  # fmt: skip
    suite = load.Load(arguments.parse(argv, "load"), "test")
    assert suite.common["max_running_requests"] == 2 and suite.common["decode_log_interval"] == 1
    children = []

    def start(names):
        children.extend(Child(n, tmp_path / n, n == "specfused-tree-on") for n in names)
        return children

    monkeypatch.setattr(suite, "start", start)
    assert suite.run() == 1 and all(c.closed for c in children)
    assert suite.problems == ["specfused-tree-on: KeyError: 'chunks'"]
    found = json.loads(path.read_text())
    assert [c["id"] for c in found["cases"]] == ["load/p0-c2", "load/p1-c1", "load/series"]
    assert found["cases"][1]["mode"] == "off" and found["cases"][0]["tok_s"] == 14.0
    assert found["cases"][2]["bounds"] == [0.0, 1.0, 2.0]
    assert found["cases"][2]["client_busy"] == 0.2 and found["meta"]["phases"] == [2, 1]
    assert " 14 (100 %) " in capsys.readouterr().out
    assert suite.measured("specfused-tree-auto") and not suite.measured("specfused-tree-on")


def test_time_is_up(tmp_path, monkeypatch):
    argv = ["--device=cpu", "--seconds=0.0001", "--setups=specfused-tree-on"]
    suite = load.Load(arguments.parse(argv, "load"), "test")
    assert suite.run() == 1
    assert suite.problems == ["time is up: specfused-tree-on not run"]


def test_graphs_for_all_sizes_in_between(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    argv = ["--device=cpu", "--phases=5,40,5", "--pool-tokens=20000"]
    args = arguments.parse(argv, "load")
    args.device = "cuda"
    suite = load.Load(args, "test")
    assert suite.common["cuda_graph_bs_decode"] == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 40]
