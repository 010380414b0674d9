# SPDX-License-Identifier: Apache-2.0
"""The load suite against a real engine: clients and the engine's log must tell the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]


def test_a_step_in_load(tmp_path):
    results = tmp_path / "r.json"
    done = subprocess.run(
        [sys.executable, "bench/run.py", "--suite=load", "--device=cpu", f"--json={results}",
         "--setups=specfused-tree-auto", "--phases=1,3", "--phase-seconds=3", "--tokens-out=20",
         f"--logs={tmp_path / 'logs'}"],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    one, three, series = json.loads(results.read_text())["cases"]
    assert [c["id"] for c in (one, three, series)] == ["load/p0-c1", "load/p1-c3", "load/series"]
    for case, clients in ((one, 1), (three, 3)):
        assert case["requests"] > clients and case["mode"] in ("on", "off")
        assert case["requests_per_step"] == pytest.approx(clients, rel=0.2)
        # prompts of 64 tokens came out of the cache
        assert 0 < case["prefill_tokens"] <= 8 * (case["requests"] + clients)
        decoded = case["steps"] * case["requests_per_step"] * case["accept_len"]
        emitted = case["tok_s"] * case["seconds"]  # the first token of a request is prefill's
        assert emitted == pytest.approx(decoded + case["requests"], rel=0.1)
    assert sum(series["tokens"]) == pytest.approx(
        one["tok_s"] * one["seconds"] + three["tok_s"] * three["seconds"], rel=0.05
    )
    assert any(share is not None for share in series["on"])
