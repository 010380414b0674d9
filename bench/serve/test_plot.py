# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the plots; the drawing itself where matplotlib is installed."""

import json

import pytest

from bench.serve import arguments, plot, timeline
from bench.serve.suite import Suite


def rate_case(impl: str, size: int, tok_s: float) -> dict:
    return {"id": f"serve/c{size}", "impl": impl, "tok_s_nominal": tok_s}


# on / off is 2, 1.25, 0.5: they meet between 8 and 32
CASES = [
    rate_case(impl, size, tok_s)
    for impl, rates in {
        "sglang-plain-triton": (100, 700, 2000),
        "specfused-chain-on": (220, 1000, 1100),
        "specfused-chain-off": (110, 800, 2200),
        "specfused-chain-on@triton": (200, 900, 2500),
        "specfused-chain-off@triton": (100, 700, 2000),
    }.items()
    for size, tok_s in zip((1, 8, 32), rates, strict=True)
]
SERIES = [
    {"id": "load/series", "impl": impl, "bounds": [0.0, 0.3, 0.6], "bin_s": 0.1,
     "tokens": [10, 11, 0, 40, 41, 42], "clients": [1, 1, 2, 4, 4, 4], "on": on}
    for impl, on in {
        "specfused-chain-auto": [1.0, 1.0, 0.9, 0.2, None, 0.0],
        "specfused-chain-on": [1.0] * 6,
        "sglang-plain-triton": [None] * 6,
    }.items()
]  # fmt: skip
META = {"gpu": "NVIDIA H200", "model": "llama8b", "commit": None}


def test_lines_and_ratios():
    found = plot.lines([*CASES[::-1], *SERIES, {"id": "load/p0-c4", "impl": "x", "tok_s": 1.0}])
    assert found["specfused-chain-on"] == [(1, 220), (8, 1000), (32, 1100)]
    assert "x" not in found and len(found) == 5
    other = [(1, 110), (32, 2200)]  # only what both have
    assert plot.ratio(found["specfused-chain-on"], other) == [(1, 2.0), (32, 0.5)]


def test_where_on_and_off_meet():
    on, off = [(1, 2.0), (4, 2.0), (16, 1.0)], [(1, 1.0), (4, 1.0), (16, 2.0)]
    assert plot.crossings(on, off) == pytest.approx([8.0])  # halfway in the logarithm
    assert plot.crossings([(1, 1.0), (4, 3.0)], [(1, 1.0), (4, 1.0)]) == [1.0]
    assert plot.crossings([(1, 2.0), (4, 3.0)], [(1, 1.0), (4, 3.0)]) == pytest.approx([4.0])
    assert plot.crossings([(1, 2.0), (4, 3.0)], [(1, 1.0), (4, 1.0)]) == []
    assert plot.crossings([], off) == []


def test_verdicts():
    texts = plot.verdicts(plot.lines(CASES))
    assert texts == [
        "specfused-chain-on / chain-off: on and off meet at concurrency 11.2",
        "specfused-chain-on@triton / chain-off@triton: on is faster from concurrency 1 to 32",
    ]
    apart = [rate_case("specfused-tree-on", 1, 1.0), rate_case("specfused-tree-off", 2, 1.0)]
    assert plot.verdicts(plot.lines(apart)) == []


def test_labels_move_apart_and_keep_their_order():
    assert plot.apart([0.0, 10.0, 20.0], 5) == [0.0, 10.0, 20.0]
    assert plot.apart([10.0, 10.0], 4) == [8.0, 12.0]
    moved = plot.apart([3.0, 1.0, 2.0, 30.0], 4)
    assert moved == [6.0, -2.0, 2.0, 30.0]
    chain = sorted(plot.apart([0.0, 0.0, 5.0, 6.0], 4))
    assert all(b - a >= 4 - 1e-9 for a, b in zip(chain, chain[1:], strict=False))
    assert sum(chain) == pytest.approx(11)


def test_stretches_of_a_mode():
    assert plot.stretches([None, 1.0, None, 0.6, 0.4, 0.0]) == [(1, 4, "on"), (4, 6, "off")]
    assert plot.stretches([None, None]) == []
    assert plot.smooth([0, 3, 6, 0]) == [1.5, 3, 3, 3]


def test_names_have_a_style():
    on, stock = plot.style("specfused-tree-on"), plot.style("specfused-tree-on@triton")
    assert on["color"] == stock["color"] != plot.style("specfused-tree-off")["color"]
    assert on["linestyle"] != stock["linestyle"]
    assert plot.style("sglang-chain-adaptive")["color"] == plot.YELLOW


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = plot.draw({"meta": META, "cases": CASES}, tmp_path)
    assert said[0].startswith("specfused-chain-on") and "not installed" in said[-1]
    assert not list(tmp_path.iterdir())


def test_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"meta": META, "cases": CASES + SERIES}))
    assert plot.main([str(file), str(tmp_path / "figures")]) == 0
    written = {p.name: p.stat().st_size for p in (tmp_path / "figures").iterdir()}
    assert set(written) == {"serve-chain.png", "load.png"} and min(written.values()) > 10_000
    assert "meet at concurrency 11.2" in capsys.readouterr().out
    one = [rate_case("specfused-tree-on", 4, 9.0)]  # no plain engine, a single point
    assert plot.draw({"meta": META, "cases": one}, tmp_path) == [f"wrote {tmp_path}/serve-tree.png"]
    only = {"meta": META, "cases": SERIES[2:]}  # nobody switched
    assert plot.draw(only, tmp_path) == [f"wrote {tmp_path}/load.png"]
    assert plot.draw({"meta": META, "cases": []}, tmp_path) == [
        "no plot: nothing to draw was measured"
    ]


def test_the_command_line(capsys):
    for main in (plot.main, timeline.main):
        with pytest.raises(SystemExit) as error:
            main(["missing", "folder"])
        said = "must be a results file of bench/run.py, got 'missing'"
        assert error.value.code == 2 and said in capsys.readouterr().err


def test_a_suite_draws_at_its_end(tmp_path, capsys):
    suite = Suite(arguments.parse(["--device=cpu", f"--plot={tmp_path}"]), "test")
    suite.cases = CASES
    assert suite.end() == 0
    assert "meet at concurrency 11.2" in capsys.readouterr().out


def test_labels_that_would_overlap_are_left_out():
    assert plot.spaced([1, 2, 8, 10, 30, 32, 100, 128, 250]) == [
        "1", "2", "8", "", "30", "", "100", "", "250"
    ]  # fmt: skip
