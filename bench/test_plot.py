# SPDX-License-Identifier: Apache-2.0
"""The numbers in the roofline plot; the drawing itself where matplotlib is installed."""

import json
import sys
from pathlib import Path

import pytest

from bench import cases, plot

ID = "attn/bs64/kv4096/w16/hq32/hkv8/d128/bf16/page1"
FILE = Path(__file__).parent / "results/h200-attn.json"


@pytest.fixture
def results() -> dict:
    return json.loads(FILE.read_text())


def test_base_shapes_come_first():
    found = [
        {"id": ID, "impl": "specfused", "bytes": 2, "us": 1.0},
        {"id": ID.replace("page1", "page64"), "impl": "specfused", "bytes": 3, "us": 1.0},
        {"id": "plan/bs64/kv4096/hkv8/d128", "impl": "specfused", "bytes": 4, "us": 1.0},
    ]
    assert plot.series(found) == {("specfused", 16): [(2, 1.0)]}
    assert plot.series(found[1:]) == {("specfused", 16): [(3, 1.0)]}


def test_series_and_bounds(results):
    found = plot.series(results["cases"])
    for w in cases.WIDTHS:
        assert len(found["specfused", w]) == len(cases.SHAPES)
    assert ("specfused-nopdl", 1) not in found and ("fa3", 1) in found
    reads, compute = plot.bounds(results["cases"])
    assert len(reads) == len(cases.SHAPES) * len(cases.WIDTHS)
    # 64 requests of 4096 rows: 4 x 64 x 4096 x 64 x 32 x 128 FLOPs
    assert compute[-1][1] == pytest.approx(274_877_906_944 / 550e6)
    names = plot.labels(results["cases"]).values()
    assert "64 x 4096" in names and "16 x 8192\n128 x 1024" in names


def test_drawing(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots/attn.png"
    assert plot.main([str(FILE), str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")
    ours = [c for c in results["cases"] if c["impl"] == "specfused"]
    assert plot.draw(results["meta"], ours, path) == f"wrote {path}"
    assert plot.draw(results["meta"], [], path) == "no plot: no attention case was measured"


def test_without_matplotlib(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = plot.draw(results["meta"], results["cases"], tmp_path / "x.png")
    assert said == "no plot: matplotlib is not installed" and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as error:
        plot.main([])
    assert error.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m bench.plot")
