# SPDX-License-Identifier: Apache-2.0
"""`bench/run.py --suite flips` and the judge of `--suite rescore` on the CPU engine.

The suite starts its engine as on a GPU: processes are spawned, and the probe has to find its way
into the scheduler's as a plugin of SGLang.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ENGINE_ARGS, call

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine

SETUP = "specfused-tree-schedule:10"
PENDING, SMALL_RING = [1, 6], 4


@pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="no source tree around the tests")
def test_the_suite_sees_every_flip(models, tmp_path):
    out, log = tmp_path / "flips.json", tmp_path / "log"
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--suite", "flips"]
    command += ["--setups", SETUP, "--concurrency", "3", "--flips", "30", "--device", "cpu"]
    command += [
        "--pending",
        ",".join(map(str, PENDING)),
        "--json",
        str(out),
        "--logs",
        str(tmp_path),
    ]
    with log.open("w") as f:
        environment = {**os.environ, "STANDINS_OVERLAP": "1"}
        code = subprocess.run(
            command, env=environment, stdout=f, stderr=f, timeout=240, check=False
        ).returncode
    assert code == 0, log.read_text()
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["id"], case["impl"]) == ("flips/c3", SETUP)
    assert 30 <= case["flips"] < case["steps"] <= case["flips"] + 3
    assert case["memory"] is None and set(case["graphs"].values()) == {0}
    assert case["host_us"]["switch"]["steps"] > 30 and case["host_us"]["stay"]["steps"] > 30
    assert 0 < case["plain_ms"] < case["on_ms"]
    assert [point["pending"] for point in case["catch_up"]] == PENDING
    assert all(point["times"] >= 3 and point["ms"] > 0 for point in case["catch_up"])
    small, whole = case["ring"]
    assert small["ring"] == SMALL_RING < whole["ring"] and small["us_per_token"] > 0
    # Six off steps and one that drafts: a ring of 4 is caught up twice, one of 64 once.
    assert small["times"] >= 5


def _score(models):
    import sglang

    sys.path.insert(0, str(ROOT))
    from bench.serve import child

    options = {**ENGINE_ARGS, "attention_backend": "torch_native"}
    engine = sglang.Engine(model_path=str(models / "target"), **options)
    prompts = [list(range(2 + n, 8 + 3 * n)) for n in range(child.SCORED_AT_ONCE + 1)]
    try:
        answers = child.tokens(engine, prompts, 5)["tokens"]
        changed = [list(answer) for answer in answers]
        changed[-1][2] = (changed[-1][2] + 1) % 8
        return [child.losses(engine, prompts, each)["losses"] for each in (answers, changed)]
    finally:
        engine.shutdown()


@pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="no source tree around the tests")
def test_the_judge_scores_every_token_at_its_place(models):
    own, changed = call(_score, models)
    assert [len(row) for row in own] == [5] * len(own)
    assert max(map(max, own)) == 0
    assert changed[:-1] == own[:-1] and changed[-1][:2] == [0, 0] and changed[-1][2] > 0
