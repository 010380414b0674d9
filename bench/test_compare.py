# SPDX-License-Identifier: Apache-2.0
"""The parts of the bench that need no GPU: `pytest bench/test_compare.py`."""

import json
import random
from unittest import mock

import pytest
import torch

from bench import attn, cases, commit, compare, report, run
from bench.timing import Harness, percentile

ID = "attn/bs64/kv4096/w16/hq32/hkv8/d128/bf16/page1"


def result(**times: tuple[float, float, float]) -> dict:
    """A result file in memory: impl -> (p10, us, p90) of one case."""
    meta = {"gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"}
    found = {
        (ID, impl): {"id": ID, "impl": impl, "p10": p10, "us": us, "p90": p90}
        for impl, (p10, us, p90) in times.items()
    }
    return {"meta": meta, "cases": found}


def test_launches_without_overlap_are_a_peer_of_our_own():
    impls = (attn.SpecFusedNoPdl(), commit.SpecFusedCommitNoPdl())
    assert {i.name for i in impls} == {"specfused-nopdl"}
    for impl in impls:
        reason = impl.available(torch.device("cpu"))
        assert reason == "programmatic dependent launch needs sm_90"
    calls = []
    with (
        mock.patch.object(attn, "set_overlap", calls.append),
        pytest.raises(ZeroDivisionError),
        attn.launches_apart(),
    ):
        assert calls == [False]
        raise ZeroDivisionError
    assert calls == [False, True]
    attn.set_overlap(True)  # as it is


def test_slower_beyond_the_spread_is_a_regression():
    old, new = result(specfused=(98, 100, 102)), result(specfused=(108, 110, 112))
    lines, regressions = compare.compare(old, new, 0.05, "specfused")
    assert regressions == [ID]
    assert any("slower" in line for line in lines)
    assert compare.compare(old, new, 0.2, "specfused")[1] == []


def test_a_wide_spread_or_another_impl_is_no_regression():
    old = result(specfused=(90, 100, 140), fa3=(98, 100, 102))
    new = result(specfused=(95, 110, 150), fa3=(198, 200, 202))
    assert compare.compare(old, new, 0.05, "specfused")[1] == []
    assert compare.compare(old, new, 0.05, "fa3")[1] == [ID]


def test_faster_missing_and_new_cases_are_named():
    old, new = result(specfused=(98, 100, 102), gone=(1, 1, 1)), result(specfused=(48, 50, 52))
    new["cases"][("x", "specfused")] = {"us": 1.0}
    new["meta"]["gpu"] = "another"
    text = "\n".join(compare.compare(old, new, 0.05, "specfused")[0])
    assert "faster" in text and "only in the old file" in text and "only in the new file" in text
    assert "meta.gpu differs" in text and "0.500 (1)" in text


def test_main_returns_status(tmp_path):
    for name, us in (("old", 100.0), ("new", 200.0)):
        case = {"id": ID, "impl": "specfused", "us": us, "p10": us - 1, "p90": us + 1}
        (tmp_path / name).write_text(json.dumps({"meta": {}, "cases": [case]}))
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert compare.main([old, new]) == 1
    assert compare.main([new, old]) == 0


def test_what_cannot_be_compared_is_no_regression(tmp_path, capsys):
    files = {"attn": result(specfused=(98, 100, 102)), "serve": {"meta": {}, "cases": {}}}
    files["serve"]["cases"][ID, "specfused"] = {"id": ID, "impl": "specfused", "tok_s": 1.0}
    for name, content in files.items():
        text = json.dumps(content | {"cases": list(content["cases"].values())})
        (tmp_path / name).write_text(text)
    (tmp_path / "text").write_text("[1]")
    for other, said in (("serve", "must have a timed case"), ("text", "must be a results file"),
                        ("missing", "must be a results file")):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            compare.main([str(tmp_path / "attn"), str(tmp_path / other)])
        assert error.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--repeats=-3", "must be an integer of at least 1, got '-3'"),
        ("--seconds=0", "must be more than 0 seconds, got '0'"),
        ("--filter=(", "must be part of an id or a regular expression, got '('"),
        ("--json=.", "must be a file, got the folder '.'"),
        ("--device=cuda", "--device cuda needs a GPU that torch can use"),
        ("--peers=fa9", "--peers must be of"),
    ],
)
def test_wrong_arguments_are_named(argument, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        run.parse([argument])
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_ids_are_never_renamed():
    assert cases.AttnCase(64, 4096, 16).id == ID
    assert cases.CommitCase(1, 16).id == "commit/bs1/w16/l32/hkv8/d128/bf16/targets"
    argmax = cases.CommitCase(1, 16, vocab=128256)
    assert argmax.id == "commit/bs1/w16/l32/hkv8/d128/bf16/argmax-v128256"
    for name in ("quick", "attn", "commit", "all"):
        for device in ("cuda", "cpu"):
            found = cases.suite(name, device)
            ids = [c.id for c in found]
            assert ids and len(ids) == len(set(ids))
            for case in found:
                is_attn = isinstance(case, cases.AttnCase)
                assert cases.attn_case(case.id) == (case if is_attn else None)


def test_select_by_part_or_expression():
    all_cases = cases.suite("attn", "cuda")
    assert [c.id for c in cases.select(all_cases, "bs64/kv4096/w16/")] == [ID]
    assert len(cases.select(all_cases, r"^attn/.*/w(1|4)/")) == 12
    assert cases.select(all_cases, "no such case") == []


def test_bytes_of_a_case():
    case = cases.AttnCase(2, 100, 4, hq=8, hkv=2, d=64, rest=10)
    assert case.lens == [100, 10]
    assert case.bytes == (110 + 8) * 2 * 64 * 2 * 2 + 2 * 8 * 8 * 64 * 2


def test_percentile():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.1) == 1.0


def test_command_line_names_no_folder(tmp_path):
    words = ["--json", str(tmp_path / "out.json"), f"--plot={tmp_path / 'x'}", "--suite", "attn"]
    assert report.command_line(words) == (
        "python bench/run.py --json out.json --plot=x --suite attn"
    )


def test_commit_from_environment(monkeypatch):
    monkeypatch.setattr(report, "_run", lambda *command, cwd=None: None)
    monkeypatch.setenv("SPECFUSED_COMMIT", "abc")
    for text, dirty in (("0", False), ("1", True), ("true", True), ("", None)):
        monkeypatch.setenv("SPECFUSED_DIRTY", text)
        assert report.commit_and_dirty() == ("abc", dirty)


@pytest.mark.parametrize("w", [1, 16, 64])
def test_trees(w):
    rng = random.Random(w)
    parents, path = commit.random_tree(w, 8, rng)
    assert path == sorted(path) and path[0] == 0 and len(path) <= 8
    first, sibling = commit.links(parents)
    reached = {0} | {n for n in first + sibling if n >= 0}
    assert reached == set(range(w))
    sees = attn.visible(torch.tensor([attn.words_of(parents)]), w)[0]
    for node, parent in enumerate(parents):
        expected = {node} | (set(sees[parent].nonzero().flatten().tolist()) if node else set())
        assert set(sees[node].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("chain", [False, True])
def test_the_check_sees_one_wrong_tree_bit(chain):
    case = cases.AttnCase(2, 300, 8, hq=4, hkv=2, d=32, dtype="f32")
    data = attn.AttnData(case, Harness(torch.device("cpu")), seed=3)
    impl = attn.SpecFused()
    impl.prepare(data)
    if chain:
        data.words = torch.tensor([[(2 << i) - 1 for i in range(8)]] * 2)
    limit = attn.TOLERANCE["f32"]
    assert data.error(impl.launch(0), chain) <= limit
    data.words = data.words.clone()
    request, row = data.sample[-1]
    data.words[request, row] ^= 1
    wrong = impl.launch(0).clone()
    data.words[request, row] ^= 1
    assert data.error(wrong, chain) > 10 * limit
