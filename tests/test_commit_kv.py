# SPDX-License-Identifier: Apache-2.0
"""The KV rows of all layers in commit and compact: accepted ones to the front, no other touched."""

import op_args
import pytest
import reference
import torch
from commit_setup import expected, outputs, random_tree_batch, run
from compare import assert_bits_equal
from tree_setup import links_of_parents, randint
from unit_cases import WIDTHS

from specfused import ops

ROWS = [(2, 64), (1, 256), (3,), (4, 2, 8), (16,), (5, 5)]  # row shapes of the buffers
ROW_DTYPES = [torch.bfloat16, torch.uint8, torch.float32, torch.float16, torch.uint8, torch.uint8]


def buffers_and_slots(rng, bs, width, device, page=1):
    """Buffers of several layers with rows of different sizes; distinct slots, shuffled pages."""
    pages = -(-bs * width // page) + 3
    order = torch.randperm(pages, generator=rng)[: -(-bs * width // page)]
    slots = (order[:, None] * page + torch.arange(page)).flatten()[: bs * width].view(bs, width)
    buffers = []
    for shape, dtype in zip(ROWS, ROW_DTYPES, strict=True):
        raw = torch.randint(0, 256, (pages * page, *shape, dtype.itemsize), generator=rng)
        buffers.append(raw.to(torch.uint8).view(dtype).squeeze(-1).contiguous().to(device))
    return buffers, slots


def check_buffers(buffers, before, slots, paths):
    for i, (buffer, original) in enumerate(zip(buffers, before, strict=True)):
        want = original.cpu()
        for request, path in zip(slots.tolist(), paths, strict=True):
            want = reference.compacted(want, request, path)
        assert_bits_equal(buffer, want, f"buffer {i}")


def table_of(buffers):
    return dict(zip(("kv_ptrs", "kv_row_bytes", "num_slots"), ops.kv_table(buffers), strict=True))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", [1, 16])
def test_kv_rows(page, width, device, rng):
    """Random trees: all buffers of all requests, everything else bit-identical."""
    buffers, slots = buffers_and_slots(rng, 17, width, device, page)
    before = [buffer.clone() for buffer in buffers]
    draft, targets, links = random_tree_batch(rng, 17, width)
    want, paths = expected(draft, targets, links)
    got = run(
        draft,
        targets,
        device,
        links=links,
        out_cache_loc=slots.flatten().to(device),
        **table_of(buffers),
    )
    assert got == want
    check_buffers(buffers, before, slots, paths)


def random_path(rng, width, most):
    """Increasing from 0, seldom without gaps: the hazards of an in-place move."""
    count = randint(rng, 1, most + 1)
    rest = (torch.randperm(width - 1, generator=rng)[: count - 1] + 1).sort().values.tolist()
    return [0, *rest]


@pytest.mark.parametrize("width", [1, 2, 4, 16, 33, 64])
def test_compact(width, device, rng):
    """Paths of any shape, in slots of any order; accept_index has room to spare."""
    bs, most = 17, width
    buffers, slots = buffers_and_slots(rng, bs, width, device)
    before = [buffer.clone() for buffer in buffers]
    paths = [random_path(rng, width, most) for _ in range(bs)]
    paths[0] = list(range(width))  # moves nothing
    paths[1] = [0, *range(2, width)]  # every row moves by one: the longest overlap
    index = torch.full((bs, most + 2), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        index[r, : len(path)] = torch.tensor(path) + r * width
    lens = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    ops.compact(*ops.kv_table(buffers), slots.to(device), index.to(device), lens.to(device))
    check_buffers(buffers, before, slots, paths)


@pytest.mark.parametrize("op", ["commit", "compact"])
def test_more_requests_than_65535(op, device, rng):
    """A launch's dimensions but the first end there. Every odd request accepts node 2 alone."""
    bs, width = 70_001, 3
    pool = torch.randint(0, 1 << 30, (bs * width + 1, 1), generator=rng).int().to(device)
    slots = torch.randperm(len(pool), generator=rng)[: bs * width].view(bs, width).to(device)
    odd = (torch.arange(bs) % 2 == 1).to(device)
    moved, kept = pool[slots[:, 2]], pool[slots]
    out = outputs(bs, 2, device)
    if op == "commit":
        draft = torch.tensor([7, 8, 9], device=device).repeat(bs, 1)
        links = torch.tensor([[1, -1, -1], [-1, 2, -1]], device=device)
        ops.commit(
            draft,
            torch.zeros(bs, dtype=torch.int64, device=device),
            **out,
            targets=torch.where(odd, 9, 5)[:, None].repeat(1, width),
            retrieve_next_token=links[0].repeat(bs, 1),
            retrieve_next_sibling=links[1].repeat(bs, 1),
            out_cache_loc=slots.flatten(),
            **table_of([pool]),
        )
        assert torch.equal(out["accept_lens"], 1 + odd.int())
    else:
        index = 3 * torch.arange(bs, device=device)[:, None] + torch.tensor([0, 2], device=device)
        table = table_of([pool])
        ops.compact(*table.values(), slots, index.int(), 1 + odd.int())
    kept[:, 1] = torch.where(odd[:, None], moved, kept[:, 1])
    assert torch.equal(pool[slots], kept)


def test_compact_is_the_kv_part_of_commit(device, rng):
    bs, width = 17, 16
    buffers, slots = buffers_and_slots(rng, bs, width, device)
    copies = [buffer.clone() for buffer in buffers]
    draft, targets, links = random_tree_batch(rng, bs, width)
    decision = run(draft, targets, device, links=links)
    ops.compact(
        *ops.kv_table(copies),
        slots.to(device),
        torch.tensor(decision["accept_index"], dtype=torch.int32, device=device),
        torch.tensor(decision["accept_lens"], dtype=torch.int32, device=device),
    )
    loc = slots.flatten().to(device)
    run(draft, targets, device, links=links, out_cache_loc=loc, **table_of(buffers))
    for i, (one, other) in enumerate(zip(buffers, copies, strict=True)):
        assert_bits_equal(one, other, f"buffer {i}")


def test_logits_and_kv_in_one_call(device, rng):
    """The full step: argmax, walk and moves, in the order that a server needs."""
    bs, width, vocab = 5, 16, 40000
    buffers, slots = buffers_and_slots(rng, bs, width, device)
    before = [buffer.clone() for buffer in buffers]
    draft, targets, links = random_tree_batch(rng, bs, width)
    logits = torch.randn(bs * width, vocab, generator=rng)
    logits[torch.arange(bs * width), torch.tensor(targets).flatten()] = 20
    want, paths = expected(draft, targets, links)
    loc = slots.flatten().to(device)
    got = run(draft, logits.to(device), device, links=links, out_cache_loc=loc, **table_of(buffers))
    assert got == want
    check_buffers(buffers, before, slots, paths)


@pytest.mark.parametrize("op", ["commit", "compact"])
def test_bad_slots_are_skipped(op, device, rng):
    """A row whose source or destination is outside the pool stays; the others move."""
    width = 8
    buffers, slots = buffers_and_slots(rng, 3, width, device)
    before = [buffer.clone() for buffer in buffers]
    path = [0, 2, 3, 5, 7]
    num_slots = len(buffers[0])
    slots[0, 2] = -1  # source of row 1
    slots[0, 3] = num_slots  # source of row 2, destination of row 3
    slots[1, 1] = 1 << 40
    slots[2, 7] = -(1 << 62)
    if op == "compact":
        index = torch.tensor([[r * width + node for node in path] for r in range(3)])
        lens = torch.full((3,), len(path), dtype=torch.int32, device=device)
        ops.compact(*ops.kv_table(buffers), slots.to(device), index.int().to(device), lens)
    else:
        parents = [None, 0, 0, 2, 2, 3, 3, 5]
        links = links_of_parents(parents)
        draft = [[9, 1, 2, 3, 4, 5, 6, 7]] * 3
        targets = [[2, 0, 3, 5, 0, 7, 0, 0]] * 3
        loc = slots.flatten().to(device)
        batch = tuple([part] * 3 for part in links)
        got = run(draft, targets, device, links=batch, out_cache_loc=loc, **table_of(buffers))
        assert got["accept_index"][0][:5] == path
    check_buffers(buffers, before, slots, [path] * 3)


def test_compact_of_a_garbage_decision(device, rng):
    """Lengths and nodes that no commit wrote: nothing outside of the windows changes."""
    width = 8
    buffers, slots = buffers_and_slots(rng, 4, width, device)
    before = [buffer.clone() for buffer in buffers]
    index = torch.tensor(
        [[0, 3, -1, -1], [8, -1, 1 << 30, -(1 << 31)], [16, 40, 2, 200], [24, 26, 27, 28]],
        dtype=torch.int32,
    )
    lens = torch.tensor([-5, 4, 1 << 30, 0], dtype=torch.int32)
    ops.compact(*ops.kv_table(buffers), slots.to(device), index.to(device), lens.to(device))
    for buffer, original in zip(buffers, before, strict=True):
        assert_bits_equal(buffer, original, "nothing of this is a move")


@pytest.mark.parametrize("width", [1, 64])
def test_no_request(width, device, rng):
    """bs 0: nothing is written, no buffer is touched."""
    buffers, _ = buffers_and_slots(rng, 2, width, device)
    before = [buffer.clone() for buffer in buffers]
    empty = torch.zeros(0, width, dtype=torch.int64, device=device)
    none = empty.new_zeros(0)
    for choice in (
        {"targets": empty},
        {"logits": torch.zeros(0, 100, device=device)},
    ):
        ops.commit(
            empty,
            none,
            **outputs(0, width, device),
            **choice,
            retrieve_next_token=empty,
            retrieve_next_sibling=empty,
            out_cache_loc=none,
            **table_of(buffers),
        )
    ops.compact(*ops.kv_table(buffers), empty, empty.int(), none.int())
    for buffer, original in zip(buffers, before, strict=True):
        assert_bits_equal(buffer, original)


def test_no_buffer(device):
    """An empty table is a table."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    got = run([[0, 1]], [[1, 2]], device, kv_ptrs=none, kv_row_bytes=none, num_slots=1)
    assert got["accept_lens"] == [2]


def test_kv_table():
    good = [torch.zeros(8, 2, 4), torch.zeros(8, 3, dtype=torch.float16)]
    ptrs, row_bytes, num_slots = ops.kv_table(good)
    assert ptrs.tolist() == [t.data_ptr() for t in good]
    assert row_bytes.tolist() == [32, 6]
    assert num_slots == 8
    wrong = ([good[0], torch.zeros(9, 2)], [torch.zeros(4, 8).t()], [torch.zeros(())], [None])
    for bad in ([], *wrong):
        with pytest.raises(ValueError, match="kv_table: buffers must"):
            ops.kv_table(bad)


@pytest.mark.gpu
def test_moves_behind_32_bits(cuda, rng):
    """Slots whose byte offset is beyond 2^32 in a buffer of 5 GB."""
    big = torch.zeros(5 << 20, 1024, dtype=torch.uint8, device=cuda)
    slots = torch.arange(len(big) - 8, len(big))
    big[slots] = torch.randint(0, 256, (8, 1024), generator=rng).to(torch.uint8).to(cuda)
    want = reference.compacted(big[-8:].cpu(), list(range(8)), [0, 3, 7])
    index = torch.tensor([[0, 3, 7]], dtype=torch.int32, device=cuda)
    lens = torch.tensor([3], dtype=torch.int32, device=cuda)
    ops.compact(*ops.kv_table([big]), slots[None].to(cuda), index, lens)
    assert_bits_equal(big[-8:], want, "high slots")
    assert not big[:-8].any()


@pytest.mark.parametrize("bad", ["null", "negative"])
def test_a_broken_table_entry_is_skipped(bad):
    """The table is trusted, but on the CPU an address of 0 or a row of no bytes cannot crash."""
    args = op_args.compact("cpu")
    args["accept_index"][:, :2] = torch.tensor([[0, 2], [4, 6]], dtype=torch.int32)
    args["accept_lens"].fill_(2)
    if bad == "null":
        args["kv_ptrs"] = torch.zeros_like(args["kv_ptrs"])
    else:
        args["kv_row_bytes"] = -args["kv_row_bytes"]
    ops.compact(**args)
