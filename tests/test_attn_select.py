# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel serves a step, and where the wgmma kernels keep their operands."""

import pytest

FEW_ROWS = 32
MOST_ROWS = 1024
HEAD_DIMS = (64, 128, 256)
RESERVED = 1024  # bytes of shared memory that the system takes of each CTA
DEVICES = {  # sm_count, smem_per_sm, smem_per_block, wgmma
    "sm_80": (108, 167936, 166912, False),
    "sm_89": (142, 102400, 101376, False),
    "sm_90": (132, 233472, 232448, True),
    "sm_90 without its kernels": (132, 233472, 232448, False),
    "sm_100": (148, 233472, 232448, False),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_number_of_rows(head_dim, device, host):
    _, smem_per_sm, smem_per_block, wgmma = DEVICES[device]
    for rows in range(1, MOST_ROWS + 1):
        c = host.select_attn(rows, head_dim, *DEVICES[device])
        many = ("wgmma" if rows <= 64 else "wgmma_wide") if wgmma else "many"
        assert c["kernel_class"] == ("few" if rows <= FEW_ROWS else many), rows
        tiles = {"few": (16, 32), "many": (64, 128), "wgmma": (64,), "wgmma_wide": (128, 256)}
        assert c["row_tile"] in tiles[c["kernel_class"]], rows
        assert (c["num_row_tiles"] - 1) * c["row_tile"] < rows
        assert rows <= c["num_row_tiles"] * c["row_tile"]
        assert c["smem_bytes"] <= smem_per_block
        assert c["ctas_per_sm"] * (c["smem_bytes"] + RESERVED) <= smem_per_sm
        # The V of a tile is needed until the S of the next one is there.
        assert c["stages"] >= (2 if wgmma and rows > FEW_ROWS else 1)
        assert c["stages"] <= 6


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_wgmma_configurations(head_dim, host):
    """KV is read once for up to 256 rows; two CTAs share an SM where the registers allow it."""
    want = {
        64: {64: (64, 1, 6, 2), 128: (128, 1, 6, 1), 129: (256, 1, 6, 1), 300: (256, 2, 6, 1)},
        128: {64: (64, 1, 3, 2), 128: (128, 1, 6, 1), 256: (256, 1, 4, 1), 257: (256, 2, 4, 1)},
        256: {64: (64, 1, 2, 1), 128: (128, 1, 2, 1), 129: (128, 2, 2, 1), 512: (128, 4, 2, 1)},
    }
    for rows, config in want[head_dim].items():
        c = host.select_attn(rows, head_dim, *DEVICES["sm_90"])
        got = tuple(c[k] for k in ("row_tile", "num_row_tiles", "stages", "ctas_per_sm"))
        assert got == config, rows


def test_a_wide_cta_takes_the_plan_entries_of_its_sm(host):
    for head_dim, entries_per_sm in ((64, 3), (128, 2), (256, 1)):
        for rows in (1, 33, 64, 65, 128, 256, 1024):
            fold = host.select_attn(rows, head_dim, *DEVICES["sm_90"])["fold"]
            assert fold == (entries_per_sm if rows > 64 else 1), (head_dim, rows)
            assert host.select_attn(rows, head_dim, *DEVICES["sm_100"])["fold"] == 1


def test_few_rows_do_not_depend_on_wgmma(host):
    for head_dim in HEAD_DIMS:
        for rows in range(1, FEW_ROWS + 1):
            with_it = host.select_attn(rows, head_dim, *DEVICES["sm_90"])
            assert with_it == host.select_attn(
                rows, head_dim, *DEVICES["sm_90 without its kernels"]
            )


def test_too_little_shared_memory_for_wgmma(host):
    assert host.select_attn(64, 256, 132, 102400, 101376, True)["kernel_class"] == "many"


@pytest.mark.parametrize(("rows", "head_dim"), [(0, 128), (1025, 128), (16, 96), (64, 32)])
def test_not_supported(rows, head_dim, host):
    assert host.select_attn(rows, head_dim, *DEVICES["sm_90"])["row_tile"] == 0


# The canonical layouts of wgmma operands with 128-byte swizzle, from the PTX ISA: the address of
# an element by what the descriptor says, then bits 4-6 flipped by bits 7-9.


def fields(descriptor):
    assert descriptor >> 62 == 1, "128-byte swizzle"
    assert descriptor >> 49 & 7 == 0, "base offset: the pattern starts at a multiple of 1024"
    return tuple((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))


def swizzled(address):
    return address ^ (address >> 7 & 7) << 4


def k_major(descriptor, mn, k):
    start, _, stride = fields(descriptor)
    return swizzled(start + mn // 8 * stride + mn % 8 * 128 + k * 2)


def mn_major(descriptor, mn, k):
    start, leading, stride = fields(descriptor)
    chunk = mn // 64 * leading + mn % 64 * 2
    return swizzled(start + chunk + k // 8 * stride + k % 8 * 128)


BLOCKS = (0, 1024, 0x14000, 0x30000)  # of shared memory, at multiples of 1024


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block", BLOCKS)
def test_descriptors_find_what_was_stored(block, head_dim, host):
    rows = 64

    def stored(row, d):
        return block + host.wgmma_block_offset(row, d // 8, rows) + d % 8 * 2

    for d in range(0, head_dim, 16):
        descriptor = host.wgmma_row_descriptor(block, d, rows)
        for row in range(rows):
            for k in range(16):
                assert k_major(descriptor, row, k) == stored(row, d + k), (row, d + k)
    for first in range(0, rows, 16):
        descriptor = host.wgmma_column_descriptor(block, first, rows)
        for k in range(16):
            for d in range(head_dim):
                assert mn_major(descriptor, d, k) == stored(first + k, d), (first + k, d)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_parts_fill_a_block_without_bank_conflicts(head_dim, host):
    rows, parts = 64, head_dim // 8
    where = [host.wgmma_block_offset(r, c, rows) for r in range(rows) for c in range(parts)]
    assert sorted(where) == [16 * i for i in range(rows * parts)]
    # Eight parts of a row, which cp.async writes at once, hit all 32 banks.
    for row in range(rows):
        for c in range(0, parts, 8):
            banks = {host.wgmma_block_offset(row, c + i, rows) // 16 % 8 for i in range(8)}
            assert len(banks) == 8
