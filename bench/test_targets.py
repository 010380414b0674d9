# SPDX-License-Identifier: Apache-2.0
"""The limits of each target, from made-up times; no GPU."""

import json

import pytest

from bench import targets
from bench.cases import AttnCase


def measured(case: AttnCase, us: float, t_read: float | None, **peers: float) -> list[dict]:
    """Entries of a results file: ours, and peer -> us."""
    times = {"specfused": us, **{name.replace("_", "-"): t for name, t in peers.items()}}
    return [
        {"id": case.id, "impl": impl, "us": t, "bytes": case.bytes, "t_read_us": t_read}
        for impl, t in times.items()
    ]


def limits(found: list[dict]) -> dict[str, tuple[float, bool]]:
    """Kind -> limit and whether it is met, of one target each."""
    rows = targets.targets(found)
    assert len(rows) == len({t.kind for t in rows})
    return {t.kind: (pytest.approx(t.limit), t.met) for t in rows}


@pytest.mark.parametrize(
    "w, limit", [(1, 106.0), (4, 107.06), (16, 112.0), (64, 274_877_906_944 / 550e6 + 5)]
)
def test_share_of_t_read(w, limit):
    """W 64: 4 x 64 x 4096 x 64 x 32 x 128 FLOPs at 550 TFLOP/s, or 1.1 t_read, and 5 us."""
    case = AttnCase(64, 4096, w)
    for us, met in ((limit + 0.01, False), (limit - 0.01, True)):
        assert limits(measured(case, us, 100.0)) == {"share of t_read": (limit, met)}


def test_share_of_t_read_where_kv_is_the_bound():
    case = AttnCase(64, 4096, 64)
    assert limits(measured(case, 1.0, 1000.0)) == {"share of t_read": (1105.0, True)}


def test_start():
    found = limits(measured(AttnCase(1, 1024, 16), 7.1, 3.0))
    assert found == {"share of t_read": (7.24, True), "start": (7.0, False)}
    assert "start" not in limits(measured(AttnCase(1, 1024, 64), 6.0, 3.0))
    assert limits(measured(AttnCase(1, 1024, 1, d=64), 6.0, 3.0)) == {}


def test_one_long_request():
    case = AttnCase(64, 131072, 4, rest=1024)
    assert limits(measured(case, 118.0, 100.0)) == {"one long request": (118.45, True)}
    assert limits(measured(case, 118.0, None)) == {}


def test_pages_and_head_dim_beside_the_base_case():
    base = measured(AttnCase(64, 4096, 16), 100.0, None)
    paged = measured(AttnCase(64, 4096, 16, page=16), 102.5, None)
    narrow = measured(AttnCase(64, 4096, 16, d=64), 62.4, None)
    assert limits(base + paged) == {"pages": (102.0, False)}
    assert limits(base + narrow) == {"head_dim": (62.5, True)}  # half of the bytes at 80 %
    assert limits(paged) == limits(narrow) == {}


def test_every_peer_counts():
    """A tie is not faster; the table has the peers that are not slower, or else the fastest."""
    case = AttnCase(64, 4096, 16, store=True)
    times = {"sglang_triton": 300.0, "flashinfer_treemask": 200.0, "specfused_nopdl": 1.0}
    slower = targets.targets(measured(case, 100.0, None, **times))
    assert [(t.text, t.limit, t.met) for t in slower] == [
        ("faster than flashinfer-treemask", 200.0, True),
        ("faster than sglang-triton", 300.0, True),
    ]
    lines = targets.report(slower)
    assert sum("| met |" in line for line in lines) == 1 and "peers: 2 of 2 met" in lines
    rows = targets.targets(measured(case, 100.0, None, fa3=100.0, flashinfer_causal=90.0, **times))
    assert [t.met for t in rows] == [False, False, True, True]
    lines = targets.report(rows)
    assert sum("| missed |" in line for line in lines) == 2 and "peers: 2 of 4 met" in lines
    assert not any("| met |" in line for line in lines)


def test_report(tmp_path, capsys):
    file = tmp_path / "attn.json"
    found = measured(AttnCase(1, 1024, 1), 6.0, 3.0, fa3=9.0)
    plan = {"id": "plan/bs1/kv1024/hkv8/d128", "impl": "specfused", "us": 1.0}
    file.write_text(json.dumps({"meta": {}, "cases": [plan, *found]}))
    assert targets.main([str(file)]) == 1  # most were not measured
    lines = capsys.readouterr().out.splitlines()
    name = "bs1/kv1024/w1/hq32/hkv8/d128/bf16/page1"
    assert f"| {name} | 1.03 t_read + 3 | 6.1 | 6.0 | 0.985 | met |" in lines
    assert "start: 1 of 1 met" in lines and "pages: not measured" in lines
    more = measured(AttnCase(1, 1024, 1, page=16), 6.0, None)
    more += measured(AttnCase(1, 1024, 1, d=256), 6.0, None)
    more += measured(AttnCase(2, 1024, 1, rest=9), 6.0, 3.0)
    file.write_text(json.dumps({"meta": {}, "cases": found + more}))
    assert targets.main([str(file)]) == 0


def test_what_is_no_results_file(tmp_path, capsys):
    """Exit status 2: 1 is for a target that is missed."""
    (tmp_path / "text").write_text("# no JSON")
    for name in ("text", "missing"):
        with pytest.raises(SystemExit) as error:
            targets.main([str(tmp_path / name)])
        assert error.value.code == 2
        assert "must be a results file of bench/run.py, got" in capsys.readouterr().err
