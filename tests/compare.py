# SPDX-License-Identifier: Apache-2.0
"""Comparisons that say where and by how much."""

import torch

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The same memory as integers: NaN equals itself, 0 differs from -0."""
    return tensor.contiguous().view(INTEGER[tensor.element_size()])


def assert_bits_equal(got, expected, what=""):
    """Bit for bit; where they are, if that is one device: pools may be large."""
    if got.device != expected.device:
        got, expected = got.cpu(), expected.cpu()
    got, expected = bits(got), bits(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if torch.equal(got, expected):
        return
    wrong = (got != expected).cpu().nonzero()
    raise AssertionError(
        f"{what}: {len(wrong)} of {got.numel()} elements differ, the first at {wrong[0].tolist()}"
    )


def assert_close(got, expected, tolerance, what=""):
    """|got - expected| <= tolerance everywhere; equal infinities pass, NaN never does."""
    got, expected = got.double().cpu(), expected.double().cpu()
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if got.numel() == 0:
        return
    error = torch.where(got == expected, 0.0, (got - expected).abs()).nan_to_num(nan=float("inf"))
    at = int(error.flatten().argmax())
    worst = float(error.flatten()[at])
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)]
    assert worst <= tolerance, (
        f"{what}: at {place} got {float(got.flatten()[at])}, expected "
        f"{float(expected.flatten()[at])}: error {worst:.3g} > {tolerance:.3g}"
    )
