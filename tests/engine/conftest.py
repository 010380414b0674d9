# SPDX-License-Identifier: Apache-2.0
"""Two roles. In an ordinary pytest run only test_versions.py is collected, which starts one pytest
per SGLang version. In such a child (SPECFUSED_ENGINE_VERSION is set) all the others are."""

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
VERSION = os.environ.get("SPECFUSED_ENGINE_VERSION")

if VERSION:
    collect_ignore = ["test_versions.py"]
else:
    collect_ignore = [
        path.name for path in HERE.glob("test_*.py") if path.name != "test_versions.py"
    ]
collect_ignore += ["standins"]


@pytest.fixture(scope="session")
def work_folder(tmp_path_factory):
    """A folder that the runs of both versions share when run.py made one."""
    shared = os.environ.get("SPECFUSED_ENGINE_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def models(work_folder):
    """Folder of the checkpoints, with every import done that an engine needs."""
    import sglang
    from checkpoints import make_checkpoints
    from harness import preload

    assert sglang.__version__ == VERSION, "PYTHONPATH holds another SGLang"
    preload()
    return make_checkpoints(work_folder / "models")


@pytest.fixture(scope="session")
def truth(models, work_folder):
    """truth(*setting, max_new_tokens) -> one oracle.Truth per prompt."""
    import oracle
    from cases import PROMPTS

    def compute(*setting):
        stored = work_folder / f"truth_{'_'.join(map(str, setting))}.json"
        if not stored.exists():
            answers = oracle.speculate(models, *setting[:4], PROMPTS, setting[4])
            stored.write_text(json.dumps([vars(answer) for answer in answers]))
        return [oracle.Truth(**answer) for answer in json.loads(stored.read_text())]

    return compute


@pytest.fixture(scope="session")
def rounds(models, work_folder):
    """rounds(*setting) -> per prompt (tokens, accepted drafts by committed length).

    Somewhat longer than the tests generate, for the step that overlap launches in vain; SECOND_TURN
    goes on for as long again.
    """
    import oracle
    from cases import MAX_NEW_TOKENS, PROMPTS, SECOND_TURN

    counts = [MAX_NEW_TOKENS + 4] * len(PROMPTS)
    counts[SECOND_TURN] += MAX_NEW_TOKENS

    def compute(*setting):
        stored = work_folder / f"rounds_{'_'.join(map(str, setting))}.json"
        if not stored.exists():
            answers = oracle.accept_everywhere(models, *setting, PROMPTS, counts)
            stored.write_text(json.dumps(answers))
        return json.loads(stored.read_text())

    return compute


@pytest.fixture(scope="session")
def plain(models):
    """What SGLang's own backend generates without speculation."""
    from cases import MAX_NEW_TOKENS, PROMPTS
    from harness import run_engine

    return run_engine(
        models,
        PROMPTS,
        MAX_NEW_TOKENS,
        attention_backend="torch_native",
        return_logprob=True,
    )[0]
