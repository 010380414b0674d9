# SPDX-License-Identifier: Apache-2.0
"""`pip install .` as a user runs it: a venv that holds the CPU torch and nothing else of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Runs in the new environment, away from the source tree.
USE = """
import importlib.metadata, torch, specfused
from specfused import ops
assert 'site-packages' in specfused.__file__, specfused.__file__
plan = torch.empty(ops.plan_numel(2, 3), dtype=torch.int32)
ops.plan(torch.tensor([0, 200]), 2, 3, plan)
assert plan[:4].tolist() == [10, 4, 2, 2], plan
points = importlib.metadata.entry_points(group='sglang.srt.plugins')
assert [p.value for p in points] == ['specfused.sglang.plugin:register'], points
print('torch', torch.__version__, 'specfused', specfused.__version__)
"""


def run(*command, **kwargs):
    """Output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A venv that has the torch of this one, by links, and nothing else of it."""
    import torch

    folder = tmp_path_factory.mktemp("install")
    run(sys.executable, "-m", "venv", str(folder / "venv"))
    site = next((folder / "venv/lib").glob("python*/site-packages"))
    mine = Path(torch.__file__).resolve().parents[1]
    for name in TORCH_NEEDS:
        for found in mine.glob(name):
            if not (site / found.name).exists():
                (site / found.name).symlink_to(found)
    return folder / "venv/bin/python"


TORCH_NEEDS = (
    "torch",
    "torch-*.dist-info",
    "torchgen",
    "functorch",
    "typing_extensions*",
    "sympy*",
    "mpmath*",
    "filelock*",
    "fsspec*",
    "jinja2*",
    "markupsafe*",
    "MarkupSafe*",
    "networkx*",
    "setuptools*",
)


def test_plain_install_uses_the_torch_that_is_there(environment, tmp_path):
    before = run(environment, "-m", "pip", "freeze")
    env = {**os.environ, "SPECFUSED_CUDA": "0"}
    env.pop("PYTHONPATH", None)
    source = tmp_path / "source"
    run("git", "clone", "-q", str(ROOT), str(source))
    log = run(environment, "-m", "pip", "install", "-v", str(source), env=env, cwd=tmp_path)
    assert "torch" not in " ".join(
        line for line in log.splitlines() if line.lstrip().startswith("Downloading")
    ), "the build downloaded torch"
    after = run(environment, "-m", "pip", "freeze")
    added = {line.split("==")[0].split(" ")[0] for line in after.splitlines()}
    added -= {line.split("==")[0].split(" ")[0] for line in before.splitlines()}
    assert added == {"specfused"}, added
    assert "specfused" in run(environment, "-c", USE, cwd=tmp_path, env=env)


def test_without_torch_one_sentence_says_how_to_go_on(tmp_path):
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    source = tmp_path / "source"
    run("git", "clone", "-q", str(ROOT), str(source))
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "install", str(source)],
        capture_output=True,
        text=True,
        env={**env, "SPECFUSED_CUDA": "0"},
        cwd=tmp_path,
    )
    assert done.returncode != 0
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    said = [line for line in said if line.startswith("specfused:")]
    assert len(said) == 1 and "pip install torch" in said[0], done.stdout + done.stderr
