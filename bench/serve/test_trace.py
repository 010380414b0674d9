# SPDX-License-Identifier: Apache-2.0
"""Steps read from traces that are made here, in the format of torch's profiler. CPU only."""

import gzip
import json
import tempfile

import pytest

from bench.serve import arguments, child, timeline, trace
from bench.serve.setups import llama_8b, setup
from bench.serve.suite import Suite

PERIOD = 1000.0  # of a step, us
BASE = 5.2e12  # time stamps are that large


class Events:
    """A trace under construction."""

    def __init__(self):
        self.found, self.correlation = [], 0

    def add(self, category: str, name: str, ts: float, dur: float, tid=41, **args):
        self.found.append({"ph": "X", "cat": category, "name": name, "pid": 40, "tid": tid,
                           "ts": BASE + ts, "dur": dur, "args": args})  # fmt: skip

    def call(self, name: str, ts: float, dur: float, *work, category="cuda_runtime", nested=None):
        """A call and its work on the GPU: (category, name, ts, dur, stream)."""
        self.correlation += 1
        id_ = {"External id": 3, "correlation": self.correlation}
        if nested:
            self.add("cuda_driver", nested, ts + 1, dur - 2, **id_)
        self.add(category, name, ts, dur, cbid=211, **id_)
        for kind, text, begin, length, stream in work:
            self.add(kind, text, begin, length, tid=stream, device=0, stream=stream, **id_)
        start = {"ph": "s", "id": self.correlation, "pid": 40, "tid": 41, "ts": BASE + ts}
        self.found.append({**start, "cat": "ac2g", "name": "ac2g"})


def noise(events: Events, t: float):
    events.call("cudaEventRecord", t + 290, 1)
    events.call("cudaStreamWaitEvent", t + 291, 1)
    events.add("gpu_user_annotation", "step[TARGET_VERIFY bs=2]", t + 399, 317, tid=7, stream=7)
    events.add("overhead", "Activity Buffer Request", t + 5, 3)
    for i in range(4):
        events.add("cpu_op", "aten::empty", t + 101 + i, 1)
    events.add("user_annotation", "scheduler.run_batch", t + 50, 300)


def verify_step(events: Events, t: float, bs: int):
    """Target, one launch and two copies, draft extend; the GPU begins 400 us after the host."""
    g = t + 400
    events.add("user_annotation", f"step[TARGET_VERIFY bs={bs}]", t + 100, 100)
    metadata = ("kernel", "void ns::plan<int>(int*)", g - 30, 10, 7)
    events.call("cudaLaunchKernelExC", t + 110, 6, metadata, nested="cuLaunchKernelEx")
    target = [("kernel", "gemm", g + at, 100, 7) for at in (0, 115, 215)]
    target.append(("gpu_memset", "Memset (Device)", g + 100, 5, 7))
    events.call("cudaGraphLaunch", t + 150, 20, *target)
    commit = ("kernel", "commit_kernel", g + 320, 10, 7)
    events.call("cuLaunchKernel", t + 220, 5, commit, category="cuda_driver")
    copy = ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", g + 330, 2, 7)
    events.call("cudaMemcpyAsync", t + 230, 4, copy)
    events.call("cudaMemsetAsync", t + 240, 3, ("gpu_memset", "Memset (Device)", g + 332, 1, 7))
    events.call("cudaStreamSynchronize", t + 245, 10)
    events.call("cudaGraphLaunch", t + 260, 10, ("kernel", "extend", g + 340, 50, 7))
    back = ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", g + 380, 20, 13)
    events.call("cudaMemcpyAsync", t + 300, 7, back)
    events.call("cudaEventSynchronize", t + 400, 200)
    noise(events, t)


def verify_trace() -> list[dict]:
    """10 steps of two requests, then 2 of one."""
    events = Events()
    events.add("Trace", "PyTorch Profiler (0)", 0, 12 * PERIOD)
    events.found.append({"ph": "M", "name": "process_name", "pid": 40, "tid": 0, "ts": 0.0})
    for n in range(12):
        verify_step(events, n * PERIOD, 2 if n < 10 else 1)
    return events.found


EXPECTED = {
    "step_us": 1000, "host_ops": 4, "launches": 2, "graphs": 2, "copies": 2, "fills": 1,
    "syncs": 2, "blocking_copies": 1, "after_target": 3, "kernels": 2, "graph_kernels": 4,
    "host_launch_us": 6 + 20 + 5 + 4 + 3 + 10 + 7, "host_sync_us": 210, "ahead_us": 230,
    "target_us": 315, "busy_us": 388, "idle_us": 10 + 5 + 7 + 570 + 20,
    "idle_after_target_us": 602, "largest_gap_us": 570,
}  # fmt: skip


def test_figures_of_a_verify_step():
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)
    assert found["steps"] == 7  # of 10: the first two are left out, the last has no end
    assert {k: found[k] for k in EXPECTED} == pytest.approx(EXPECTED, abs=0.1)
    assert found["after_target_names"] == [
        "commit_kernel", "Memcpy HtoD ", "Memset "
    ]  # fmt: skip
    assert trace.summary(trace.Trace(verify_trace()), skip=2, most=4)["steps"] == 4


def test_a_graph_is_one_entry_of_the_timeline():
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)["timeline"]
    on_gpu = [e for e in found if e[1] == 7]
    assert on_gpu[0] == ["graph of 4", 7, 0.0, 315.0]
    assert on_gpu[1] == ["commit_kernel", 7, 320.0, 10.0]
    assert on_gpu[-1] == ["plan", 7, 970.0, 10.0]
    assert [e[3] for e in found if e[1] == 13] == [20.0]
    host = [e for e in found if e[1] == "host"]
    # What the host does meanwhile: it launches the next step.
    assert ["cudaGraphLaunch", "host", 750.0, 20.0] in host
    assert ["run_batch", "scheduler", 650.0, 300.0] in found
    assert [e[2] for e in found] == sorted(e[2] for e in found)
    assert timeline.rows(found) == ["scheduler", "host", 7, 13]


def test_a_timeline_keeps_the_longest(monkeypatch):
    monkeypatch.setattr(trace, "MOST_ENTRIES", 3)
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)["timeline"]
    assert [e[0] for e in found] == ["graph of 4", "cudaEventSynchronize", "run_batch"]


def test_plain_decode_has_one_graph():
    events = Events()
    for n in range(6):
        t, g = n * PERIOD, n * PERIOD + 300
        events.add("user_annotation", "step[DECODE bs=8]", t, 50)
        events.call("cudaGraphLaunch", t + 10, 10, ("kernel", "all", g, 900, 7))
        events.call("cudaLaunchKernel", t + 60, 5, ("kernel", "argmax", g + 900, 20, 7))
    found = trace.summary(trace.Trace(events.found), skip=1, most=20)
    assert (found["steps"], found["graphs"], found["after_target"]) == (4, 1, 1)
    assert found["idle_after_target_us"] == found["idle_us"] == pytest.approx(80)
    assert found["ahead_us"] == pytest.approx(280)


def test_without_graphs_a_target_is_what_its_forward_launches():
    events = Events()
    for n in range(6):
        t = n * PERIOD
        events.add("user_annotation", "step[DECODE bs=2]", t, 50)  # the draft model's
        events.call("cudaLaunchKernel", t + 10, 5, ("kernel", "draft", t + 100, 50, 7))
        events.add("user_annotation", "step[VERIFY bs=2 toks=8]", t + 100, 100)
        for i in range(3):
            kernel = ("kernel", "layer", t + 200 + 100 * i, 90, 7)
            events.call("cudaLaunchKernel", t + 110 + 10 * i, 5, kernel)
    found = trace.summary(trace.Trace(events.found), skip=1, most=20)
    assert (found["launches"], found["kernels"], found["graphs"]) == (4, 4, 0)
    assert found["target_us"] == pytest.approx(290) and found["after_target"] == 0


def test_steps_that_the_profiler_lost_are_left_out():
    events = verify_trace()
    graphs = [e for e in events if e["name"] == "cudaGraphLaunch"][::2]
    lost = graphs[5]["args"]["correlation"]
    kept = [
        e
        for e in events
        if e.get("args", {}).get("correlation") != lost or e["name"] == "cudaGraphLaunch"
    ]
    found = trace.summary(trace.Trace(kept), skip=2, most=20)
    assert found["steps"] == 5  # neither the step nor the one before it, which has no end
    assert found["target_us"] == pytest.approx(315)


def test_a_trace_without_a_gpu_has_host_figures(tmp_path):
    events = [e for e in verify_trace() if e.get("cat") in ("cpu_op", "user_annotation")]
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = trace.summary(trace.read(path), skip=2, most=20)
    assert found["step_us"] == pytest.approx(1000) and found["host_ops"] == 4
    assert "graphs" not in found
    assert "4 host ops" in trace.describe({"ms_per_step": None, **found})


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="trace must have 3 steady decode steps, got 2 of 10"):
        trace.summary(trace.Trace(verify_trace()), skip=7, most=20)
    with pytest.raises(ValueError, match="got 0 of 0"):
        trace.summary(trace.Trace([]), skip=0, most=20)


@pytest.mark.parametrize("name, kind", [
    ("cudaLaunchKernel", "launches"), ("cudaLaunchKernelExC", "launches"),
    ("cuLaunchKernelEx", "launches"), ("cudaLaunchCooperativeKernel", "launches"),
    ("cudaGraphLaunch", "graphs"), ("cudaMemcpy2DAsync", "copies"), ("cuMemsetD32Async", "fills"),
    ("cudaDeviceSynchronize", "syncs"), ("cudaLaunchHostFunc", None), ("cudaEventQuery", None),
])  # fmt: skip
def test_kinds_of_calls(name, kind):
    assert trace.kind(name) == kind


def test_names_are_shortened():
    assert trace.short("void at::native::(anonymous namespace)::scan<int, 4>(int*)") == "scan"
    assert trace.short("_fwd_kernel_stage1") == "_fwd_kernel_stage1"
    assert len(trace.short("nvjet_" + 60 * "x")) == 40


class Engine:
    """Stands in for SGLang's: 2.5 tokens a step, and a trace where one is wanted."""

    def __init__(self):
        self.asked, self.profiles = [], []

    def generate(self, input_ids, sampling_params):
        n = sampling_params["max_new_tokens"]
        self.asked.append(n)
        info = {"completion_tokens": n, "spec_verify_ct": round((n - 1) / 2.5)}
        return [{"meta_info": info} for _ in input_ids]

    def start_profile(self, output_dir, **options):
        self.folder, self.options = output_dir, options

    def stop_profile(self):
        for rank, events in enumerate((verify_trace(), [])):
            path = f"{self.folder}/{len(self.profiles)}.5-TP-{rank}.trace.json.gz"
            with gzip.open(path, "wt") as f:
                json.dump({"traceEvents": events}, f)
        self.profiles.append(path)


def test_a_profile_is_long_enough(tmp_path):
    engine = Engine()
    point = child.Point(engine, bs=2, n_in=8, vocab=256)
    for path in ("0.5", "1.5"):
        reply = point.profile(str(tmp_path), steps=10, activities=["CPU"])
        assert reply["trace"] == str(tmp_path / f"{path}-TP-0.trace.json.gz")
    assert engine.asked[:3] == [1, 16, 31]  # 1.2 x 10 steps of 15 / 6 tokens
    assert engine.options == {"activities": ["CPU"], "with_stack": False, "record_shapes": False}


class Child:
    """Stands in for an engine's process."""

    def __init__(self, name: str, model, acceptance: str):
        self.setup = setup(name, model, True, acceptance)
        self.alive, self.point = True, child.Point(Engine(), 2, 8, 256)
        self.measured = 0

    def measure(self, bs, n_in, n_out):
        """The first time is slow; the requests need 100 steps on average, one 125."""
        self.measured += 1
        seconds = 0.25 if self.measured > 1 else 2.0
        return {"seconds": seconds, "steps": 100, "longest": 125, "tokens": 500, "alone": 0.0}

    def profile(self, bs, n_in, folder, activities):
        folder.mkdir(parents=True)
        return self.point.profile(str(folder), 10, activities)

    def close(self):
        self.alive = False


def a_run(suite, tmp_path, monkeypatch, *options) -> Suite:
    """A run of a suite whose engines are stand-ins."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    argv = ["--json", str(tmp_path / "r.json"), "--device=cpu", "--concurrency=2", *options]
    run = arguments.SUITES[suite](arguments.parse(argv, suite), "test")
    model = llama_8b(tmp_path)
    monkeypatch.setattr(
        run, "start", lambda names: [Child(n, model, run.args.acceptance) for n in names]
    )
    return run


def test_the_suite_of_steps(tmp_path, monkeypatch):
    names = "--setups=specfused-chain-on,sglang-chain-triton"
    run = a_run("steps", tmp_path, monkeypatch, names, f"--logs={tmp_path / 'logs'}")
    assert run.run() == 0
    text = (tmp_path / "r.json").read_text()
    first, second = json.loads(text)["cases"]
    assert (first["id"], first["impl"]) == ("steps/c2", "specfused-chain-on")
    assert second["impl"] == "sglang-chain-triton" and second["ms_per_step"] == 2.0
    assert first["steps"] == 5 and first["after_target"] == 3 and not first["simulated"]
    assert '[ "graph of 4", 7, 0.0, 315.0 ]' in text
    assert list((tmp_path / "logs" / "specfused-chain-on-c2").glob("*.gz"))
    line = trace.describe(first)
    assert "1.00 ms/step profiled (2.00 without)" in line and "calls 2+2+1 and 2 graphs" in line
    assert run.has("specfused-chain-on", 2) and not run.has("specfused-chain-on", 4)


def test_serving_ends_with_a_profile(tmp_path, monkeypatch):
    setups = "--setups=sglang-plain-triton,specfused-chain"
    run = a_run("serve", tmp_path, monkeypatch, setups, "--profile=2")
    assert run.run() == 0
    cases = {
        (c["id"], c["impl"]): c for c in json.loads((tmp_path / "r.json").read_text())["cases"]
    }
    assert set(cases) == {(i, n) for i in ("serve/c2", "steps/c2") for n in run.args.setups}
    profiled = cases["steps/c2", "specfused-chain"]
    assert profiled["simulated"] and profiled["ms_per_step"] == 2.5
    assert not run.folder.exists()
    run.profile_last(Child("specfused-chain", llama_8b(tmp_path), "simulated"))
    assert len(run.cases) == 4  # as it is in a run that is resumed: once is enough


def test_a_broken_trace_is_kept_and_the_run_goes_on(tmp_path, monkeypatch):
    run = a_run("steps", tmp_path, monkeypatch, "--setups=specfused-chain-on,sglang-plain-triton")
    monkeypatch.setattr(trace, "read", lambda path: trace.Trace([]))
    assert run.run() == 1 and run.cases == []
    assert len(run.problems) == 2 and "trace must have 3 steady" in run.problems[0]
    assert list((run.folder / "specfused-chain-on-c2").glob("*.gz"))


def test_no_profile_after_the_time_is_up(tmp_path, monkeypatch):
    run = a_run("steps", tmp_path, monkeypatch, "--setups=specfused-chain-on")
    monkeypatch.setattr(run, "late", iter([False, True]).__next__)
    assert run.run() == 1 and run.problems == ["time is up: specfused-chain-on c2 not profiled"]
    run = a_run("steps", tmp_path, monkeypatch, "--seconds=1e-9")
    assert run.run() == 1 and run.problems[0].startswith("time is up: sglang-plain-torch_native, ")
    run = a_run("serve", tmp_path, monkeypatch, "--profile=2", "--seconds=1e-9")
    run.profile_last(Child("specfused-chain", llama_8b(tmp_path), "simulated"))
    assert run.problems == ["time is up: specfused-chain c2 not profiled"]


def test_arguments_of_steps():
    args = arguments.parse(["--device=cpu"], "steps")
    assert (args.concurrency, args.acceptance, args.id) == ([4], "real", "steps")
    with pytest.raises(SystemExit):
        arguments.parse(["--device=cpu", "--profile=3", "--concurrency=1,4"])


def test_drawing(tmp_path, capsys):
    assert timeline.draw([{"id": "serve/c2"}], tmp_path) == "no plot: no step was profiled"
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"meta": {}, "cases": []}))
    assert timeline.main([str(file), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no plot: no step was profiled\n"
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)
    cases = [{"id": "steps/c2", "impl": name, **found} for name in ("a", "b")]
    said = timeline.draw(cases, tmp_path / "plots")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert said == "no plot: matplotlib is not installed"
    else:
        assert said == f"wrote {tmp_path / 'plots' / 'steps-c2.png'}"
        assert (tmp_path / "plots" / "steps-c2.png").stat().st_size > 10_000
