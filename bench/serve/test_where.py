# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, on a trace that is made. CPU only."""

import pytest

from bench.serve import trace, where
from bench.serve.test_trace import Events, verify_trace

EXPECTED = {  # of verify_step in test_trace
    "commit": 10,
    "gemm": 300,
    "attention": 10,
    "top-k": 0,
    "other in graphs": 5 + 50,
    "other outside": 2 + 1 + 10,  # of a copy of 20 that overlaps a graph
    "gaps in graphs": 10,
    "gaps between": 5 + 7 + 570 + 20,
}


def test_every_microsecond_has_a_kind():
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)
    assert found["where_us"] == pytest.approx(EXPECTED, abs=0.1)
    assert sum(EXPECTED.values()) == found["step_us"] == 1000


@pytest.mark.parametrize("name, kind", [
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>", "gemm"),
    ("void specfused::verify_attn_kernel<specfused::Mma<128> >(Params)", "attention"),
    ("specfused::plan_kernel(PlanParams)", "attention"),
    ("specfused::words_from_mask_kernel(bool const*)", "attention"),
    ("specfused::commit_kernel(CommitParams)", "commit"),
    ("void at::native::mbtopk::computeBlockDigitCounts<float, unsigned int>", "top-k"),
    ("void (anonymous namespace)::cunn_SoftMaxForward<4, float>", "top-k"),
    ("_draft_topk1_partial_argmax_kernel", "top-k"),
    ("build_tree_efficient(long*)", "top-k"),
    ("void at::native::vectorized_elementwise_kernel<4>", "other in graphs"),
])  # fmt: skip
def test_kinds_of_kernels(name, kind):
    assert where.kind(trace.Work(0, 1, name, "kernel", 7), in_graph=True) == kind


def test_a_copy_is_none_of_these():
    copy = trace.Work(0, 1, "Memcpy DtoD", "gpu_memcpy", 7)
    assert where.kind(copy, in_graph=False) == "other outside"


def test_a_table():
    found = trace.summary(trace.Trace(verify_trace()), skip=2, most=20)
    cases = [{"id": f"steps/c{bs}", "impl": "a", **found} for bs in (1, 8)]
    lines = where.table([*cases, {"id": "serve/c8", "impl": "a"}]).splitlines()
    assert lines[0] == "| us of a step | a c1 | a c8 |"
    assert "| gaps in graphs | 10 | 10 |" in lines
    assert lines[-2:] == ["| step | 1000 | 1000 |", "| calls outside of graphs | 5 | 5 |"]
    assert where.table([{"id": "serve/c8"}]) == "no table: no step was profiled on a GPU"


def test_without_a_gpu_there_is_no_table():
    events = Events()
    for n in range(6):
        events.add("user_annotation", "step[DECODE bs=2]", 1000.0 * n, 50)
    assert "where_us" not in trace.summary(trace.Trace(events.found), skip=1, most=20)
