# SPDX-License-Identifier: Apache-2.0
"""Starts engines, a few at a time, and measures them in turns.

All engines of a group are alive at once on one GPU and take turns, repeat by repeat, so that drift
of clocks and temperature falls on all of them; only one works at any time. The anchor stays alive
through all groups and is measured in each at ANCHOR_BS.
"""

import contextlib
import datetime
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import specfused
from bench.report import PACKAGES, commit_and_dirty, version
from bench.serve import plot, probe, trace
from bench.serve.child import MARK
from bench.serve.results import earlier_cases, summary
from bench.serve.setups import ANCHOR, Setup, llama_8b, setup, tiny

ANCHOR_BS = 8
PILOT_TOKENS = 32
RESERVE = 64  # KV slots that a running request holds beyond its tokens
LEAST_TOKENS = 128  # of a request, if the pool is full
PROFILED_STEPS, SKIPPED_STEPS = 20, 4  # a profile's, and those before them
PROFILE_ID = "steps"
INNER_LIST = re.compile(r"\[\n[^][{}]*\]")  # is written on one line
STARTED_TOGETHER = {  # ranks may find GPUs unequally full, and a file of all engines half written
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "SGLANG_SKIP_P2P_CHECK": "1",
}
MOST_TOKENS = 4096  # a request's, whatever a disturbed pilot says


class Failed(Exception):
    """An engine did not start, died, or answered with an error."""


class Child:
    """An engine in its own process; its log is kept in a file.

    Args:
        plugins: a folder for the probe's entry point, if the engine gets the probe.
    """

    def __init__(self, s: Setup, common: dict, vocab: int, log: Path, plugins: Path | None = None):
        self.setup, self.log, self.lines = s, log, queue.Queue()
        self.alive = True
        root = Path(__file__).resolve().parents[2]
        path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "SGLANG_LOG_MS": "1", **s.env}
        if common.get("device") == "cpu":  # else every rank wants a NUMA node
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(common["tp_size"])))
        elif common["tp_size"] > 1:
            env |= STARTED_TOGETHER
        if plugins:
            path.append(probe.plant(plugins))
            env |= probe.environment(plugins / f"{s.name}.json")
        env["PYTHONPATH"] = os.pathsep.join(path)
        argument = json.dumps({"engine": {**common, **s.engine}, "vocab": vocab})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.serve.child", argument],
            cwd=root, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("a"), start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    self.lines.put(json.loads(line.removeprefix(MARK)))
                else:
                    log.write(line)
                    log.flush()
        self.lines.put({"error": f"the engine ended, see {self.log}"})

    def wait(self, seconds: float) -> dict:
        try:
            reply = self.lines.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"no answer within {seconds:.0f} s, see {self.log}") from None
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def ask(self, seconds: float = 120, **request) -> dict:
        """One request of child.py, and its answer."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(f"the engine ended, see {self.log}") from None
        return self.wait(seconds)

    def measure(self, bs: int, n_in: int, n_out: int) -> dict:
        return self.ask(bs=bs, n_in=n_in, n_out=n_out)

    def profile(self, bs: int, n_in: int, folder: Path, activities: list[str]) -> dict:
        steps = SKIPPED_STEPS + PROFILED_STEPS + 2
        return self.ask(bs=bs, n_in=n_in, profile=str(folder), steps=steps, activities=activities)

    def close(self):
        """Ends the engine and waits until its memory is free."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # whatever it started and left
            os.killpg(self.process.pid, signal.SIGKILL)


class Suite:
    """The run: groups of engines, cases, JSON after every case."""

    probed = False  # whether engines that switch get the probe

    def __init__(self, args, command: str):
        self.args, self.cuda = args, args.device == "cuda"
        self.begin = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="specfused-serve-"))
        self.model = llama_8b(self.folder) if args.model == "llama8b" else tiny(self.cuda)
        if args.logs:
            Path(args.logs).mkdir(parents=True, exist_ok=True)
        most = max(args.concurrency)
        self.common = {
            "random_seed": 1,
            "log_level": "info",
            "max_running_requests": most,
            "max_total_tokens": args.pool_tokens,
            "disable_prefill_cuda_graph": True,
        }
        if self.cuda:
            self.common["cuda_graph_bs_decode"] = sorted(set(args.concurrency))
        else:
            self.common |= {"device": "cpu", "disable_cuda_graph": True, "skip_server_warmup": True}
            self.common["context_length"] = 1024
        self.common |= {**args.engine, "tp_size": args.tp}
        commit, dirty = commit_and_dirty()
        self.meta = {
            "gpu": torch.cuda.get_device_name() if self.cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": commit,
            "dirty": dirty,
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "specfused": specfused.__version__,
            "model": self.model.name,
            "tp": args.tp,
            "engine": args.engine,
            "tokens_in": args.tokens_in,
            "acceptance": args.acceptance if self.model.dummy else "real",
            **{name: version(*names) for name, names in PACKAGES.items()},
        }
        self.cases: list[dict] = []
        self.anchors: list[float] = []
        self.problems: list[str] = []

    def resume(self):
        """Takes over what --json has of an earlier run, if that is wanted."""
        path = self.args.json
        if self.args.resume and path and Path(path).is_file():
            self.cases, self.anchors = earlier_cases(Path(path), self.meta)
            if not self.cases:
                Path(path).replace(f"{path}.other")  # not of this run, and not to be lost
                self.line(f"{path} is of another run, it is now {path}.other")
            if self.anchors:
                self.meta["anchor_ms"] = self.anchors
            self.line(f"{len(self.cases)} cases of {path} are kept")

    def case_id(self, bs: int) -> str:
        return f"{self.args.id}/c{bs}"

    def has(self, name: str, bs: int, first: str | None = None) -> bool:
        """Whether this point was measured in a run that is being resumed."""
        id_ = f"{first}/c{bs}" if first else self.case_id(bs)
        return any(c["id"] == id_ and c["impl"] == name for c in self.cases)

    def profile(self, child: Child, bs: int, ms_per_step: float | None, first: str):
        """What a step of this engine consists of. After all of its timing: a profiler stays.

        Args:
            ms_per_step: of this point without a profiler.
            first: part of the case's id.
        """
        name = child.setup.name
        folder = Path(self.args.logs or self.folder).resolve() / f"{name}-c{bs}"
        activities = ["CPU", "GPU"] if self.cuda else ["CPU"]
        reply = self.try_(child, lambda: child.profile(bs, self.n_in(bs), folder, activities))
        if reply is None:
            return
        try:
            found = trace.summary(trace.read(Path(reply["trace"])), SKIPPED_STEPS, PROFILED_STEPS)
        except Exception as e:  # the other points may work; the trace is kept
            self.problem(f"{name} c{bs}: {type(e).__name__}: {e}, see {reply['trace']}")
            return
        if not self.args.logs:
            shutil.rmtree(folder)
        case = {"id": f"{first}/c{bs}", "impl": name, "ms_per_step": ms_per_step,
                "simulated": "SGLANG_SIMULATE_ACC_LEN" in child.setup.env, **found}  # fmt: skip
        self.cases.append(case)
        self.line(f"c{bs:<4d} {name:26s} {trace.describe(case)}")
        self.write()

    def line(self, text: str):
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def problem(self, text: str):
        self.problems.append(text)
        self.line(f"! {text}")

    def late(self) -> bool:
        return time.monotonic() - self.begin > self.args.seconds

    def start(self, names: list[str]) -> list[Child]:
        """Engines that came up, of those named; the others are reported."""
        logs = Path(self.args.logs or self.folder)
        children = []
        for name in names:
            s = setup(name, self.model, self.cuda, self.args.acceptance)
            plugins = self.folder / "plugins" if self.probed and s.switches else None
            log = logs / f"{name}.log"
            children.append(Child(s, self.common, self.model.vocab, log, plugins))
        ready = []
        for child in children:
            try:
                reply = child.wait(self.args.start_seconds)
                self.line(f"{child.setup.name}: ready in {reply['ready']:.0f} s")
                ready.append(child)
            except Failed as e:
                self.problem(f"{child.setup.name}: {e}")
                child.close()
        return ready

    def n_in(self, bs: int) -> int:
        """Prompt length: as wanted, or what leaves room in the pool for LEAST_TOKENS a request."""
        room = self.args.pool_tokens // bs - RESERVE - LEAST_TOKENS
        return max(min(self.args.tokens_in, room), 1)

    def n_out(self, child: Child, bs: int) -> int:
        """Tokens a request for one repeat: its share of the wanted seconds, as the pool allows."""
        pilot = child.measure(bs, self.n_in(bs), PILOT_TOKENS)
        per_token = max(pilot["seconds"], 1e-3) / pilot["tokens"] * bs
        wanted = 1.1 * self.args.decode_seconds / self.args.repeats / per_token
        return max(PILOT_TOKENS, min(int(wanted) + 1, self.room(bs)))

    def room(self, bs: int) -> int:
        """Most tokens that each of `bs` requests may emit."""
        context = self.common.get("context_length", self.model.context)
        share = min(self.args.pool_tokens // bs, context)
        return min(share - self.n_in(bs) - RESERVE, MOST_TOKENS)

    def measure(self, children: list[Child], bs: int):
        """All children in turns; a child that fails is left out from there on."""
        samples, tokens, begin = {c: [] for c in children}, {}, time.monotonic()
        for child in children:
            tokens[child] = self.try_(child, lambda c=child: self.n_out(c, bs))
        done = False
        while not done and time.monotonic() - begin < 60 * len(children):
            done = True
            for child in children:
                taken = sum(r["seconds"] for r in samples[child])
                enough = len(samples[child]) >= self.args.repeats
                if tokens[child] is None or enough and taken >= self.args.decode_seconds:
                    continue
                done = False
                reply = self.try_(child, lambda c=child: c.measure(bs, self.n_in(bs), tokens[c]))
                if reply is None:
                    tokens[child] = None
                else:
                    samples[child].append(reply)
        for child in children:
            if samples[child]:
                self.record(child.setup, bs, samples[child])

    def try_(self, child: Child, work):
        """work(), or None; an engine that failed is ended, it might disturb the others."""
        if not child.alive:
            return None
        try:
            return work()
        except Failed as e:
            self.problem(f"{child.setup.name}: {e}")
            child.close()
            return None

    def record(self, s: Setup, bs: int, repeats: list[dict]):
        case = {"id": self.case_id(bs), "tokens_in": self.n_in(bs), **summary(s, bs, repeats)}
        if s.name == ANCHOR and bs == ANCHOR_BS:
            self.anchors.append(case["ms_per_step"])
            self.meta["anchor_ms"] = self.anchors
        plain = [c for c in self.cases if c["id"] == case["id"] and c["impl"] == ANCHOR]
        beside = f"{case['tok_s_nominal'] / plain[0]['tok_s_nominal']:.2f}x" if plain else ""
        if s.name != ANCHOR or not plain:
            self.cases.append(case)
        self.line(
            f"c{bs:<4d} {s.name:26s} {case['ms_per_step']:8.2f} ms/step (spread "
            f"{100 * case['spread']:.1f} %)  accept {case['accept_len']:.2f}  "
            f"{case['tok_s_nominal']:8.0f} tok/s at {case['nominal_accept_len']:.2f}  {beside}"
        )
        self.write()

    def end(self) -> int:
        """Draws, and returns the exit status; the logs of a run without problems are removed."""
        if self.args.plot:
            for text in plot.draw({"meta": self.meta, "cases": self.cases}, Path(self.args.plot)):
                self.line(text)
        if not self.problems:
            shutil.rmtree(self.folder)
        return 1 if self.problems else 0

    def write(self):
        if self.args.json:
            path = Path(self.args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"meta": self.meta, "cases": self.cases}, indent=1) + "\n"
            path.write_text(INNER_LIST.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text))

    def run(self) -> int:
        self.resume()

        def missing(name: str) -> list[int]:
            return [bs for bs in self.args.concurrency if not self.has(name, bs)]

        names = [n for n in self.args.setups if n != ANCHOR and missing(n)]
        with_anchor = ANCHOR in self.args.setups
        width = max(self.args.parallel - with_anchor, 1)
        groups = [names[i : i + width] for i in range(0, len(names), width)] or [[]]
        anchor: list[Child] = []
        for number, group in enumerate(groups):
            if self.late():
                self.problem(f"time is up: {', '.join(sum(groups[number:], []))} not run")
                break
            children = self.start(group if number or not with_anchor else [ANCHOR, *group])
            anchor = anchor or [c for c in children if c.setup.name == ANCHOR]
            children = [c for c in children if c not in anchor]
            for bs in self.args.concurrency:
                if self.late():
                    self.problem(f"time is up: concurrency {bs} of {', '.join(group)} not run")
                    break
                again = bs == ANCHOR_BS or number == 0 and not self.has(ANCHOR, bs)
                wanted = [c for c in children if c.alive and not self.has(c.setup.name, bs)]
                if wanted or again:
                    self.measure([*(a for a in anchor if again and a.alive), *wanted], bs)
            for child in children:
                self.profile_last(child)
                child.close()
        for child in anchor:
            self.profile_last(child)
            child.close()
        return self.end()

    def profile_last(self, child: Child):
        """--profile: at the end of an engine's life."""
        bs = self.args.profile
        if bs is None or not child.alive or self.has(child.setup.name, bs, PROFILE_ID):
            return
        if self.late():
            self.problem(f"time is up: {child.setup.name} c{bs} not profiled")
            return
        times = [c["ms_per_step"] for c in self.cases
                 if c["id"] == self.case_id(bs) and c["impl"] == child.setup.name]  # fmt: skip
        self.profile(child, bs, times[0] if times else None, PROFILE_ID)
