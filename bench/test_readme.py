# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md are what the results files have, rounded."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREE = "specfused-tree-"
SERVING = ("sglang-plain-triton", "sglang-tree-triton", TREE + "off", TREE + "on", TREE + "auto")
COMMIT = ("specfused", "sglang", "sglang-graph")
CHOICES = {
    "targets given": "targets",
    "argmax of 128256": "argmax-v128256",
    "sampled from 128256": "sample-v128256",
}


def rows(first: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first`."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index(f"\n| {first}") :].split("\n\n")[0].strip().split("\n")
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table[2:]]


def results(name: str, key: str) -> dict:
    cases = json.loads((ROOT / "bench/results" / name).read_text())["cases"]
    return {(c["id"], c["impl"]): c[key] for c in cases if key in c}


def same(shown: str, value: float, where):
    decimals = len(shown.partition(".")[2])
    assert float(shown) == pytest.approx(value, abs=0.5 * 10**-decimals + 1e-9), where


def test_serving():
    found = results("h200-switch.json", "tok_s_nominal")
    for requests, *cells, over in rows("requests | SGLang plain, Triton"):
        of = [found.get((f"switch/c{requests}", impl)) for impl in SERVING]
        for shown, value, impl in zip(cells, of, SERVING, strict=True):
            assert (shown == "-") == (value is None), (requests, impl)
            if value is not None:
                same(shown, value, (requests, impl))
        same(over.removesuffix("x"), of[-1] / of[0], requests)


def test_two_gpus():
    found = results("h200x2-serve.json", "tok_s_nominal")
    impls = ("sglang-plain-triton", *(f"specfused-{s}-{m}" for s in ("tree", "chain")
                                      for m in ("on", "auto")))  # fmt: skip
    for requests, *cells in rows("requests | SGLang plain | tree on"):
        for shown, impl in zip(cells, impls, strict=True):
            same(shown, found[f"serve/c{requests}", impl], (requests, impl))


def test_step_in_load():
    found = results("h200-load.json", "tok_s_steady")
    phases = ("load/p0-c4", "load/p1-c128", "load/p2-c4")
    text = " ".join((ROOT / "README.md").read_text().split())
    words = re.search(
        r"steady rate is (\d+), (\d+) and (\d+) tokens per second; "
        r"always on (\d+), (\d+) and (\d+), off (\d+), (\d+) and (\d+)\.", text
    )  # fmt: skip
    assert words
    points = [(phase, TREE + mode) for mode in ("auto", "on", "off") for phase in phases]
    for shown, point in zip(words.groups(), points, strict=True):
        same(shown, found[point], point)


def test_memory_while_modes_change():
    """Nothing within a generation, at one point something between two."""
    found = results("h200-flips.json", "memory")
    assert len(found) == 4 and not any(memory["changes"] for memory in found.values())
    grown = [most - first for first, _, most in (m["reserved_bytes"] for m in found.values())]
    assert sorted(grown) == [0, 0, 0, 2 << 20]


def test_attention():
    found = results("h200-attn.json", "us")
    for shape, width, *cells in rows("requests x context | W"):
        bs, context = shape.split(" x ")
        id_ = f"attn/bs{bs}/kv{context}/w{width}/hq32/hkv8/d128/bf16/page1"
        flashinfer = "flashinfer-decode" if width == "1" else "flashinfer-treemask"
        for shown, impl in zip(
            cells, ("specfused", flashinfer, "sglang-triton", "fa3"), strict=True
        ):
            same(shown, found[id_, impl], (id_, impl))


def test_commit():
    found = results("h200-commit.json", "us")
    for bs, choice, *cells in rows("requests | choice"):
        id_ = f"commit/bs{bs}/w16/l32/hkv8/d128/bf16/{CHOICES[choice]}"
        for shown, impl in zip(cells, COMMIT, strict=True):
            same(shown, found[id_, impl], (id_, impl))


def test_late_draft_kv():
    """Up to 16 steps late, 8 requests."""
    text = " ".join((ROOT / "README.md").read_text().split())
    words = re.search(
        r"late took ([\d.]+) to ([\d.]+) ms for 8 requests, where a plain step takes "
        r"([\d.]+) to ([\d.]+) ms", text
    )  # fmt: skip
    assert words
    late = [point["ms"] for of in results("h200-flips.json", "catch_up").items()
            if of[0][0] == "flips/c8" for point in of[1] if point["pending"] <= 16]  # fmt: skip
    plain = [v for (id_, _), v in results("h200-flips.json", "plain_ms").items()
             if id_ == "flips/c8"]  # fmt: skip
    for shown, value in zip(words.groups(), (min(late), max(late), min(plain), max(plain)),
                            strict=True):  # fmt: skip
        same(shown, value, words[0])
