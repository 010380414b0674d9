# SPDX-License-Identifier: Apache-2.0
"""Tree words from links and from both mask layouts, and the depth of a node."""

import pytest
import reference
import torch
from compare import assert_bits_equal
from tree_setup import chain_parents, links_of_parents, links_tensors, randint, random_parents
from unit_cases import WIDTHS

from specfused import ops

TREES = {  # name -> (next_token, next_sibling, rows as sets of seen columns)
    "single node": ([-1], [-1], [{0}]),
    "chain": ([1, 2, -1], [-1] * 3, [{0}, {0, 1}, {0, 1, 2}]),
    "star": ([1, -1, -1, -1], [-1, 2, 3, -1], [{0}, {0, 1}, {0, 2}, {0, 3}]),
    "two levels": (
        [1, 3, -1, -1, -1],
        [-1, 2, -1, 4, -1],
        [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}],
    ),
    "unreachable node": ([1, -1, -1], [-1] * 3, [{0}, {0, 1}, {2}]),
    "child of an unreachable node": ([-1, -1, 3, -1], [-1] * 4, [{0}, {1}, {2}, {2, 3}]),
    "backward child": ([1, 0, -1], [-1] * 3, [{0}, {0, 1}, {2}]),
    "itself as child": ([0, -1], [-1, -1], [{0}, {1}]),
    "backward sibling": ([1, -1, -1], [-1, 2, 1], [{0}, {0, 1}, {0, 2}]),
    "links behind the end": ([3, -1, -1], [-1, 1 << 40, -(1 << 40)], [{0}, {1}, {2}]),
    "negative links": ([-7, -1], [-1, -(1 << 63)], [{0}, {1}]),
}


def words_of(seen):
    return [sum(1 << c for c in row) for row in seen]


def run_links(next_token, next_sibling, device):
    tensors = [
        torch.tensor(links, dtype=torch.int64, device=device)
        for links in (next_token, next_sibling)
    ]
    words = torch.full_like(tensors[0], -99)
    ops.tree_words_from_links(*tensors, words)
    return words.cpu()


def unsigned(words):
    return [word % (1 << 64) for word in words]


@pytest.mark.parametrize("name", TREES)
def test_hand_written_trees(name, device):
    next_token, next_sibling, seen = TREES[name]
    words = run_links([next_token] * 2, [next_sibling] * 2, device)
    assert [unsigned(row) for row in words.tolist()] == [words_of(seen)] * 2


@pytest.mark.parametrize("name", TREES)
def test_host_agrees(name, host):
    next_token, next_sibling, seen = TREES[name]
    assert host.words_from_links(next_token, next_sibling) == words_of(seen)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_random_trees(width, keep, device, rng):
    trees = [random_parents(width, rng, keep) for _ in range(17)]
    want = torch.stack([reference.ancestors_and_self(tree) for tree in trees])
    next_token, next_sibling = links_tensors(trees, device)
    words = torch.full((17, width), -99, dtype=torch.int64, device=device)
    ops.tree_words_from_links(next_token, next_sibling, words)
    assert_bits_equal(words, reference.to_words(want), "words")


@pytest.mark.parametrize("width", [3, 16, 64])
def test_random_links(width, device, rng, host):
    """Links that are no tree at all: host and ops agree, and every row sees itself."""
    links = torch.randint(-3, width + 3, (2, 40, width), generator=rng)
    links = torch.where(torch.rand(links.shape, generator=rng) < 0.3, -1, links)
    words = run_links(links[0].tolist(), links[1].tolist(), device)
    for row, next_token, next_sibling in zip(words.tolist(), *links.tolist(), strict=True):
        assert unsigned(row) == host.words_from_links(next_token, next_sibling)
    seen = reference.from_words(words, width)
    assert seen.diagonal(dim1=1, dim2=2).all()
    assert not seen.triu(1).any(), "a row sees a later column"


@pytest.mark.parametrize("width", WIDTHS)
def test_chain(width, device, host):
    want = [(1 << (column + 1)) - 1 for column in range(width)]
    assert [host.chain_word(column) for column in range(width)] == want
    next_token, next_sibling = links_of_parents(chain_parents(width))
    assert unsigned(run_links([next_token], [next_sibling], device)[0].tolist()) == want


def test_depth(host, rng):
    """Position of a node = C + depth: ancestors counted, root 0."""
    parents = random_parents(64, rng)
    words = host.words_from_links(*links_of_parents(parents))
    depths = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent is None else depths[parent] + 1)
        assert host.node_depth(words[node]) == depths[node]
        assert host.node_position(1000, depths[node]) == 1000 + depths[node]
    assert host.node_depth((1 << 64) - 1) == 63


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("width", [1, 4, 33, 64])
def test_qlen_only_mask(width, dtype, device, rng):
    """[bs, W, W] cells, in a buffer that is longer; any non-zero byte counts."""
    seen = torch.rand(3, width, width, generator=rng) < 0.5
    seen[1] = False  # an empty row stays empty
    mask = torch.ones(seen.numel() + 100, dtype=dtype)
    mask[: seen.numel()] = seen.flatten().to(dtype)
    if dtype == torch.uint8:
        mask = mask * torch.randint(1, 256, mask.shape, generator=rng).to(torch.uint8)
    words = torch.full((3, width), -99, dtype=torch.int64, device=device)
    ops.tree_words_from_mask(mask.to(device), words)
    assert_bits_equal(words, reference.to_words(seen), "words")


def full_mask(lengths, seen):
    """SGLang's layout: request after request, W rows of C + W cells, the prefix all true."""
    rows = []
    for committed, window in zip(lengths, seen, strict=True):
        prefix = torch.ones(window.shape[0], committed, dtype=torch.bool)
        rows.append(torch.cat([prefix, window], dim=1).flatten())
    return torch.cat(rows)


@pytest.mark.parametrize("width", [1, 4, 33, 64])
def test_full_mask(width, device, rng):
    lengths = [randint(rng, 0, 300) for _ in range(7)] + [0]
    seen = torch.rand(8, width, width, generator=rng) < 0.5
    mask = full_mask(lengths, seen)
    words = torch.full((8, width), -99, dtype=torch.int64, device=device)
    ops.tree_words_from_mask(mask.to(device), words, seq_lens=torch.tensor(lengths, device=device))
    assert_bits_equal(words, reference.to_words(seen), "words")


def test_cells_outside_the_mask_are_false(device, rng):
    """Also in the row that the mask's end cuts in two: cells before the end are still read."""
    lengths, width = [5, 9, 2], 4
    seen = torch.rand(3, width, width, generator=rng) < 0.7
    seen[1, 2, 0] = True
    whole = full_mask(lengths, seen)
    for cut in range(0, len(whole) + 1, 1):
        read = whole.clone()
        read[cut:] = False
        words = torch.full((3, width), -99, dtype=torch.int64, device=device)
        ops.tree_words_from_mask(
            whole[:cut].to(device), words, seq_lens=torch.tensor(lengths, device=device)
        )
        want, at = torch.zeros_like(seen), 0
        for r, committed in enumerate(lengths):
            for row in range(width):
                want[r, row] = read[at + committed : at + committed + width]
                at += committed + width
        assert_bits_equal(words, reference.to_words(want), f"mask of {cut} cells")


def test_lengths_that_do_not_fit_the_mask(device):
    """Garbage lengths of padded rows: no crash, and the requests before them are right."""
    seen = torch.ones(3, 2, 2, dtype=torch.bool)
    mask = full_mask([3, 0, 0], seen).to(device)
    for garbage in (-1, -100, 1 << 31, 1 << 40, -(1 << 40)):
        words = torch.full((3, 2), -99, dtype=torch.int64, device=device)
        lengths = torch.tensor([3, garbage, 1], device=device)
        ops.tree_words_from_mask(mask, words, seq_lens=lengths)
        assert words[0].tolist() == [3, 3], f"length {garbage}"
        assert (words >= 0).all() and (words <= 3).all()


def test_mask_offsets_in_64_bits(host):
    """256 requests of 131072 tokens and 64 rows: the last cells are behind 2^31 and 2^32."""
    committed, width = 131072, 64
    for request, row in [(0, 0), (0, 63), (255, 0), (255, 63)]:
        before = request * committed
        want = request * width * (committed + width) + row * (committed + width) + committed
        assert host.full_mask_offset(before, committed, request, row, width) == want
        assert host.qlen_only_offset(request, row, width) == (request * width + row) * width
    assert host.full_mask_offset(255 * committed, committed, 255, 63, width) > 1 << 31
    assert host.full_mask_offset(1 << 31, 1 << 33, 1 << 20, 1, 64) > 1 << 37


@pytest.mark.gpu
def test_full_mask_behind_32_bits(cuda, rng):
    """A mask of 5 GB: the last request's cells are behind 2^32."""
    lengths, width = [131072] * 512, 64
    size = sum(width * (committed + width) for committed in lengths)
    assert size > 1 << 32
    mask = torch.zeros(size, dtype=torch.bool, device=cuda)
    seen = torch.rand(width, width, generator=rng) < 0.5
    last = mask[-width * (131072 + width) :].view(width, -1)
    last[:, 131072:] = seen.to(cuda)
    words = torch.full((512, width), -99, dtype=torch.int64, device=cuda)
    ops.tree_words_from_mask(mask, words, seq_lens=torch.tensor(lengths, device=cuda))
    assert_bits_equal(words[-1], reference.to_words(seen), "words of the last request")
    assert not words[:-1].any()


@pytest.mark.parametrize("width", [1, 64])
def test_no_request(width, device):
    empty = torch.zeros(0, width, dtype=torch.int64, device=device)
    ops.tree_words_from_links(empty, empty, empty.clone())
    mask = torch.zeros(0, dtype=torch.bool, device=device)
    ops.tree_words_from_mask(mask, empty.clone())
    ops.tree_words_from_mask(mask, empty.clone(), seq_lens=empty.new_zeros(0))


@pytest.mark.parametrize("width", [0, 65])
def test_host_refuses_other_widths(width, host):
    with pytest.raises(ValueError, match="must be 1 to 64"):
        host.words_from_links([-1] * width, [-1] * width)
