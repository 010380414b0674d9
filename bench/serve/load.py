# SPDX-License-Identifier: Apache-2.0
"""The load suite: a step in the number of clients, up and down again, and how engines follow it."""

import math

from bench.serve import decode_log
from bench.serve.clients import SPREAD
from bench.serve.results import LOAD
from bench.serve.suite import Child, Failed, Suite
from bench.timing import percentile

BIN_S = 0.1
ROOM = 64  # slots of a request beyond its tokens
GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def pool_tokens(prompts: int, n_in: int, clients: int, n_out: int) -> int:
    """KV slots that let all clients run with every prompt cached."""
    return prompts * n_in + clients * (math.ceil((1 + SPREAD) * n_out) + ROOM)


def pieces(request: dict):
    """(from, to, tokens) of each chunk: its tokens came between the one before and itself."""
    before, so_far = None, 0
    for second, total in request["chunks"]:
        yield (second if before is None else before), second, total - so_far
        before, so_far = second, total


def share(begin: float, end: float, low: float, high: float) -> float:
    """How much of [begin, end] lies in [low, high); a moment lies in it or not."""
    if begin == end:
        return float(low <= begin < high)
    return max(0.0, min(end, high) - max(begin, low)) / (end - begin)


def tokens_between(requests: list[dict], low: float, high: float) -> float:
    return sum(n * share(a, b, low, high) for r in requests for a, b, n in pieces(r))


def spread(stretches, bins: int) -> list[float]:
    """Amounts, (from, to, amount) each and even in between, added up by bins of BIN_S."""
    found = [0.0] * bins
    for begin, end, amount in stretches:
        for i in range(int(begin / BIN_S), min(int(end / BIN_S) + 1, bins)):
            found[i] += amount * share(begin, end, i * BIN_S, (i + 1) * BIN_S)
    return [round(x, 2) for x in found]


def series(requests: list[dict], log: decode_log.Log, end: float) -> dict:
    """Over time, by bins: tokens emitted, clients with a request, share of steps that drafted."""
    bins = math.ceil(end / BIN_S)
    spans = [(r["begin"], r["chunks"][-1][0]) for r in requests]
    return {
        "bin_s": BIN_S,
        "tokens": spread((p for r in requests for p in pieces(r)), bins),
        "clients": spread(((a, b, (b - a) / BIN_S) for a, b in spans), bins),
        "on": decode_log.on_share(log.choices, BIN_S, bins),
    }


def quantiles(name: str, milliseconds: list[float]) -> dict:
    return {
        f"{name}_p{p}_ms": round(percentile(milliseconds, p / 100), 2) if milliseconds else None
        for p in (50, 99)
    }


def latencies(requests: list[dict], low: float, high: float) -> dict:
    """Of the requests that ended in the phase; a gap between chunks is shared by its tokens."""
    ended = [r for r in requests if low <= r["chunks"][-1][0] < high]
    gaps = [
        1e3 * (b - a) / n for r in ended for a, b, n in pieces(r) if b > a for _ in range(n)
    ]  # fmt: skip
    return {
        "requests": len(ended),
        **quantiles("latency", [1e3 * (r["chunks"][-1][0] - r["begin"]) for r in ended]),
        **quantiles("ttft", [1e3 * (r["chunks"][0][0] - r["begin"]) for r in ended]),
        **quantiles("itl", gaps),
    }


def phase(requests: list[dict], log: decode_log.Log, clients: int, low: float, high: float) -> dict:
    """One phase of one engine, from `low` to `high` seconds."""
    middle = (low + high) / 2
    late = [r["chunks"][-1][0] for r in requests if r["client"] >= clients and r["begin"] < low]
    return {
        "clients": clients,
        "seconds": round(high - low, 3),
        "tok_s": round(tokens_between(requests, low, high) / (high - low), 1),
        "tok_s_steady": round(tokens_between(requests, middle, high) / (high - middle), 1),
        # until requests of clients that have to stop are done
        "settle_s": round(max(0.0, max(late, default=low) - low), 3),
        **decode_log.modes(log.choices, low, high),
        **decode_log.batches(log, low, high),
        **latencies(requests, low, high),
    }


def shown(case: dict) -> str:
    """A phase in one line."""
    line = (
        f"{case['id']:16s} {case['impl']:26s} {case['tok_s']:8.0f} tok/s, "
        f"{case['tok_s_steady']:8.0f} in the second half"
    )
    if case["mode"]:
        line += (
            f"; {case['mode']} after {case['time_to_mode_s']:.2f} s and {case['steps_to_mode']} "
            f"steps, {case['switches']} switches, {case['probes']} probes"
        )
    return line


def table(cases: list[dict], key: str) -> list[str]:
    """Engines by phases, each with its share of the fastest engine's figure."""
    found = {(c["impl"], c["id"]): c[key] for c in cases if key in c}
    impls, ids = (list(dict.fromkeys(k[i] for k in found)) for i in (0, 1))
    best = {i: max(v for (_, other), v in found.items() if other == i) or 1.0 for i in ids}
    lines = [f"{key:28s}" + "".join(f"{i:>22s}" for i in ids)]
    for impl in impls:
        cells = []
        for i in ids:
            value = found.get((impl, i))
            cells.append("-" if value is None else f"{value:.0f} ({100 * value / best[i]:.0f} %)")
        lines.append(f"{impl:28s}" + "".join(f"{cell:>22s}" for cell in cells))
    return lines


class Load(Suite):
    """One engine works after the other; each serves all phases."""

    def __init__(self, args, command: str):
        args.concurrency = sorted(set(args.phases))
        super().__init__(args, command)
        self.common["decode_log_interval"] = 1
        if self.cuda:  # batches of any size come by
            most = max(args.phases)
            sizes = {n for n in GRAPH_SIZES if n < most} | set(args.phases)
            self.common["cuda_graph_bs_decode"] = sorted(sizes)
        self.meta |= {name: getattr(args, name) for name in LOAD}

    def phase_id(self, number: int) -> str:
        return f"{self.args.id}/p{number}-c{self.args.phases[number]}"

    def serve(self, child: Child):
        args = self.args
        found = child.ask(
            len(args.phases) * args.phase_seconds + 240,
            phases=args.phases,
            phase_seconds=args.phase_seconds,
            n_in=args.tokens_in,
            n_out=args.tokens_out,
            num_prompts=args.prompts,
            stream_interval=args.stream_interval,
        )
        text = child.log.read_text(errors="replace")
        self.record_run(child.setup.name, found, decode_log.read(text, found["epoch"]))

    def record_run(self, name: str, found: dict, log: decode_log.Log):
        bounds, requests = found["bounds"], found["requests"]
        for k, clients in enumerate(self.args.phases):
            result = phase(requests, log, clients, bounds[k], bounds[k + 1])
            case = {"id": self.phase_id(k), "impl": name, **result}
            self.cases.append(case)
            self.line(shown(case))
        over_time = series(requests, log, bounds[-1])
        what = {"bounds": [round(b, 3) for b in bounds], "client_busy": round(found["busy"], 3)}
        self.cases.append({"id": f"{self.args.id}/series", "impl": name, **what, **over_time})
        self.write()

    def run(self) -> int:
        self.resume()
        names = [n for n in self.args.setups if not self.measured(n)]
        for i in range(0, len(names), self.args.parallel):
            if self.late():
                self.problem(f"time is up: {', '.join(names[i:])} not run")
                break
            for child in self.start(names[i : i + self.args.parallel]):
                try:
                    self.serve(child)
                except Exception as e:  # the next engine may work
                    what = str(e) if isinstance(e, Failed) else f"{type(e).__name__}: {e}"
                    self.problem(f"{child.setup.name}: {what}")
                child.close()
        for key in ("tok_s", "tok_s_steady"):
            for text in table(self.cases, key):
                self.line(text)
        return self.end()

    def measured(self, name: str) -> bool:
        return any(c["id"] == f"{self.args.id}/series" and c["impl"] == name for c in self.cases)
