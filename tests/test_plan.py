# SPDX-License-Identifier: Apache-2.0
"""The split plan: every KV tile once, in order, evenly, from lengths alone."""

import pytest
import reference
import torch
from tree_setup import randint

from specfused import ops

TILE = 64
MIN_TILES = 1  # of a CTA that has any
BORDERS = (-5, -1, 0, 1, 63, 64, 65, 127, 128, 5000)
FIXED = [  # (lengths, num_kv_heads, num_ctas)
    ([], 8, 4),
    ([0], 1, 1),
    ([0], 1, 132),  # more CTAs than tiles
    ([-1, -64, -(1 << 40)], 2, 5),
    ([63, 64, 65], 3, 2),
    ([1 << 20], 1, 264),
    ([0] * 257, 8, 264),
    ([5000, 0], 2, 3),
    ([131072] * 16, 8, 132),
]


def device_plan(lengths, heads, num_ctas, device, offset=0):
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=device)
    numel = ops.plan_numel(len(lengths), num_ctas)
    plan = torch.full((numel,), -7, dtype=torch.int32, device=device)
    ops.plan(seq_lens, heads, num_ctas, plan, seq_lens_offset=offset)
    return plan.tolist()


def random_batch(rng):
    bs = randint(rng, 1, 40)
    longest = (4, 200, 3000)[randint(rng, 0, 3)]
    lengths = [randint(rng, -3, longest) for _ in range(bs)]
    for _ in range(randint(rng, 0, bs)):
        lengths[randint(rng, 0, bs)] = BORDERS[randint(rng, 0, len(BORDERS))]
    return lengths, randint(rng, 1, 9), randint(rng, 1, 300)


@pytest.fixture
def batches(rng):
    return FIXED + [random_batch(rng) for _ in range(30)]


def check_segments(segments, lengths, heads, num_ctas):
    """The properties that kernels rely on, each stated on its own."""
    tiles_of = [max(committed, 0) // TILE + 1 for committed in lengths]
    total = heads * sum(tiles_of)
    per_cta = [0] * num_ctas
    units = {}
    for s in segments:
        begin, end = s["tiles"]
        assert 0 <= begin < end <= tiles_of[s["request"]], "empty or beyond the unit"
        assert 0 <= s["kv_head"] < heads
        per_cta[s["cta"]] += end - begin
        units.setdefault((s["request"], s["kv_head"]), []).append(s)
    assert len(units) == heads * len(lengths), "a unit is missing"
    for (request, _), parts in units.items():
        covered = [tile for s in parts for tile in range(*s["tiles"])]
        assert covered == list(range(tiles_of[request])), "a tile is missing, twice, or unordered"
        assert [s["split"] for s in parts] == list(range(len(parts))), "splits are not numbered"
        assert {s["num_splits"] for s in parts} == {len(parts)}
        assert [s["tail"] for s in parts] == [False] * (len(parts) - 1) + [True]
        assert [s["cta"] for s in parts] == sorted({s["cta"] for s in parts}), "CTAs not in order"
    assert sum(per_cta) == total
    assert max(per_cta) <= max(-(-total // num_ctas), MIN_TILES), "a CTA has more than its share"


def test_segments(batches, host):
    for lengths, heads, num_ctas in batches:
        if heads * sum(max(n, 0) // TILE + 1 for n in lengths) > 50000:
            continue
        segments = host.segments(host.plan(lengths, heads, num_ctas), num_ctas)
        if lengths:
            check_segments(segments, lengths, heads, num_ctas)
        assert segments == reference.plan_segments(lengths, heads, num_ctas)


def test_op_is_the_host_function(batches, device, host):
    for lengths, heads, num_ctas in batches:
        plan = device_plan(lengths, heads, num_ctas, device)
        assert plan == host.plan(lengths, heads, num_ctas), f"{lengths} x {heads} on {num_ctas}"


def test_header(batches, device):
    """{total tiles, tiles per CTA, bs, num_kv_heads}, tile_begin[bs + 1], first_request[ctas]."""
    for lengths, heads, num_ctas in batches:
        plan = device_plan(lengths, heads, num_ctas, device)
        tiles = [heads * (max(committed, 0) // TILE + 1) for committed in lengths]
        begin = [sum(tiles[:r]) for r in range(len(tiles) + 1)]
        per_cta = max(-(-begin[-1] // num_ctas), MIN_TILES)
        first = [
            sum(1 for border in begin[1:] if border <= cta * per_cta) for cta in range(num_ctas)
        ]
        assert plan == [begin[-1], per_cta, len(lengths), heads, *begin, *first]
        assert len(plan) == ops.plan_numel(len(lengths), num_ctas)


@pytest.mark.parametrize("offset", [0, -1, -4, -64])
def test_offset(offset, device, rng):
    """The plan is of committed lengths: seq_lens with their offset, whatever the step's W is."""
    lengths, heads, num_ctas = random_batch(rng)
    shifted = [committed - offset for committed in lengths]
    plan = device_plan(shifted, heads, num_ctas, device, offset)
    assert plan == device_plan(lengths, heads, num_ctas, device)


@pytest.mark.parametrize(
    "huge", [1 << 36, (1 << 37) - 1, 1 << 37, 3 << 36, 1 << 40, (1 << 63) - 1, -(1 << 63)]
)
def test_garbage_length_leaves_the_neighbours(huge, device, host):
    """A length that no table can hold is skipped by the kernels; the plan must still hand out the
    other requests' tiles, so nothing in it may overflow."""
    lengths, heads, num_ctas = [100, huge, 200], 2, 8
    plan = device_plan(lengths, heads, num_ctas, device, -1)
    begin = plan[4:8]
    assert plan[0] == begin[-1] > 0
    assert begin == sorted(begin), f"tiles overflow: {begin}"
    assert begin[1] - begin[0] == heads * 2
    assert begin[3] - begin[2] == heads * 4
    assert begin[2] - begin[1] >= heads, "no unit may be empty: kernels divide by its tiles"
    assert all(0 <= request <= 3 for request in plan[8:])


def test_numel():
    assert ops.plan_numel(0, 1) == 6
    assert ops.plan_numel(128, 264) == 4 + 129 + 264
