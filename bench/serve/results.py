# SPDX-License-Identifier: Apache-2.0
"""Cases of a results file: from repeats, and from an earlier run."""

import json
import statistics
from pathlib import Path

from bench.report import PACKAGES
from bench.serve.setups import Setup

BUILD = ("gpu", "torch", "cuda", "commit", "dirty", *PACKAGES)
LOAD = ("phases", "phase_seconds", "tokens_out", "prompts", "stream_interval")  # of --suite load


def summary(s: Setup, bs: int, repeats: list[dict]) -> dict:
    """One case from its repeats: medians, spread, and tok/s at the nominal accept length.

    Simulated steps that draft emit 2 tokens or more. So those that emitted one were plain ones.
    """
    ms = [1e3 * r["seconds"] / r["steps"] for r in repeats]
    steps = sum(r["steps"] for r in repeats)
    realised = [r["tokens"] / r["steps"] / bs for r in repeats]
    nominal = [r["alone"] + (1 - r["alone"]) * s.accept for r in repeats] if s.accept else realised

    def rate(accept_lens: list[float]) -> float:
        return round(
            statistics.median(1e3 * bs * a / t for a, t in zip(accept_lens, ms, strict=True)), 1
        )

    def mean(accept_lens: list[float]) -> float:
        return round(
            sum(a * r["steps"] for a, r in zip(accept_lens, repeats, strict=True)) / steps, 3
        )

    return {
        "impl": s.name,
        "ms_per_step": round(statistics.median(ms), 3),
        "spread": round((max(ms) - min(ms)) / statistics.median(ms), 4),
        "accept_len": mean(realised),
        "tok_s": rate(realised),
        "nominal_accept_len": mean(nominal),
        "tok_s_nominal": rate(nominal),
        "decode_s": round(sum(r["seconds"] for r in repeats), 2),
        "repeats_ms": [round(x, 3) for x in ms],
        "repeats_alone": [round(r["alone"], 4) for r in repeats],
    }


def earlier_cases(path: Path, meta: dict) -> tuple[list[dict], list[float]]:
    """Cases and anchors of a results file, if it is of the same code, packages, GPU and model."""
    found = json.loads(path.read_text())
    same = (*BUILD, "model", "tp", "engine", "tokens_in", "acceptance", *LOAD)
    if (
        meta["commit"] is None
        or meta["dirty"]
        or any(found["meta"].get(k) != meta.get(k) for k in same)
    ):
        return [], []
    return found["cases"], found["meta"].get("anchor_ms", [])
