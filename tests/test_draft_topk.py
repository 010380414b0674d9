# SPDX-License-Identifier: Apache-2.0
"""draft_topk: the likeliest tokens of a row in order, and what the softmax gives them."""

import pytest
import torch
from compare import assert_bits_equal, assert_close

from specfused import ops

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(logits, topk):
    """Tokens and probabilities in float64; of equal logits the lower index first."""
    values = logits.double().cpu()
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :topk]
    return order, torch.softmax(values, dim=-1).gather(1, order)


def run(logits, topk, *, sums=True, workspace=None, **options):
    device = logits.device
    rows = options["rows"].numel() if "rows" in options else logits.shape[0]
    index = torch.full((rows, topk), -7, dtype=torch.int64, device=device)
    p = torch.full((rows, topk), -7.0, device=device) if sums else None
    if device.type == "cuda" and workspace is None:
        size = ops.draft_workspace_bytes(rows, logits.shape[1], topk)
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    ops.draft_topk(logits, index, topk_p=p, workspace=workspace, **options)
    return index, p


def draw(rng, rows, vocab, dtype, device, levels=None):
    """With `levels` different values only: many are equal."""
    logits = torch.randn(rows, vocab, generator=rng) * 3
    if levels:
        logits = torch.randint(levels, (rows, vocab), generator=rng).float()
    return logits.to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("vocab", [16, 17, 511, 4096, 4097, 32000])
def test_random_rows(vocab, topk, dtype, device, rng):
    logits = draw(rng, 5, vocab, dtype, device)
    tokens, p = expected(logits, topk)
    got, got_p = run(logits, topk)
    assert got.tolist() == tokens.tolist()
    assert_close(got_p, p, 2e-6)
    assert run(logits, topk, sums=False)[0].tolist() == tokens.tolist()


@pytest.mark.parametrize("topk", [1, 4, 16])
def test_ties_go_to_the_lower_index(topk, device, rng):
    logits = draw(rng, 9, 20000, torch.bfloat16, device, levels=3)
    logits[0] = 1  # all alike
    logits[1, :] = -0.0
    logits[1, 5] = 0.0
    tokens, p = expected(logits, topk)
    got, got_p = run(logits, topk)
    assert got.tolist() == tokens.tolist()
    assert_close(got_p, p, 2e-6)


def test_a_large_vocabulary(device, rng):
    """More than 64 slices of 4096: a slice has two blocks."""
    logits = draw(rng, 2, 300001, torch.float32, device)
    logits[0, 300000] = 40
    tokens, p = expected(logits, 7)
    got, got_p = run(logits, 7)
    assert got.tolist() == tokens.tolist()
    assert_close(got_p, p, 2e-6)


def test_rows_and_token_map(device, rng):
    """Some rows of a wider tensor, off the 16-byte borders; one of them is not there."""
    wide = draw(rng, 6, 1003, torch.float32, device)
    logits = wide[:, 1:1001]
    rows = torch.tensor([4, 0, 4, 6, -1], device=device)
    token_map = torch.randperm(5000, generator=rng)[:1000].to(device)
    tokens, p = expected(logits, 4)
    tokens = token_map.cpu()[tokens]
    got, got_p = run(logits, 4, rows=rows, token_map=token_map)
    assert got[:3].tolist() == tokens[[4, 0, 4]].tolist()
    assert_close(got_p[:3], p[[4, 0, 4]], 2e-6)
    assert got[3:].tolist() == [token_map[:4].tolist()] * 2
    assert got_p[3:].tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_no_numbers(dtype, device):
    """NaN is the least likely; ids stay in the vocabulary; no probability is NaN."""
    vocab = 9000
    logits = torch.full((5, vocab), NAN, dtype=dtype, device=device)
    logits[1] = -INF
    logits[2] = 0
    logits[2, 7:9] = NAN
    logits[2, 8500] = 3
    logits[3] = 1
    logits[3, 4400] = logits[3, 4399] = INF
    logits[4, 4100:4102] = 1  # two numbers among NaN
    got, p = run(logits, 3)
    assert got.tolist() == [[0, 1, 2], [0, 1, 2], [8500, 0, 1], [4399, 4400, 0], [4100, 4101, 0]]
    assert p[:2].tolist() == [[0.0] * 3] * 2
    assert p[3].tolist() == [1.0, 0.0, 0.0]
    assert p[4].tolist() == [0.5, 0.5, 0.0]
    total = vocab - 3 + torch.e**3
    assert_close(p[2], torch.tensor([torch.e**3, 1, 1]) / total, 1e-6)


def test_rows_do_not_depend_on_the_batch(device, rng):
    """Bit for bit: alone, among others, and from a workspace that was used before."""
    logits = draw(rng, 40, 32000, torch.float32, device)
    size = ops.draft_workspace_bytes(40, 32000, 8)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    index, p = run(logits, 8, workspace=workspace)
    for row in (0, 17, 39):
        alone, alone_p = run(logits[row : row + 1], 8, workspace=workspace)
        assert alone.tolist() == index[row : row + 1].tolist()
        assert_bits_equal(alone_p, p[row : row + 1], "probabilities")
    again, again_p = run(logits, 8, workspace=workspace)
    assert again.tolist() == index.tolist()
    assert_bits_equal(again_p, p, "probabilities")


def test_no_rows(device):
    index, p = run(torch.zeros(0, 9, device=device), 2)
    assert index.shape == p.shape == (0, 2)


def test_in_a_graph(cuda, rng):
    """Other logits and rows at replay."""
    logits = draw(rng, 8, 128256, torch.float32, cuda)
    rows = torch.arange(4, device=cuda)
    index = torch.zeros(4, 4, dtype=torch.int64, device=cuda)
    p = torch.zeros(4, 4, device=cuda)
    size = ops.draft_workspace_bytes(4, 128256, 4)
    workspace = torch.zeros(size, dtype=torch.uint8, device=cuda)
    options = {"topk_p": p, "rows": rows, "workspace": workspace}
    ops.draft_topk(logits, index, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.draft_topk(logits, index, **options)
    for _ in range(3):
        logits.copy_(draw(rng, 8, 128256, torch.float32, cuda))
        rows.copy_(torch.randint(8, (4,), generator=rng).to(cuda))
        graph.replay()
        tokens, want = expected(logits[rows], 4)
        assert index.tolist() == tokens.tolist()
        assert_close(p, want, 2e-6)
