# SPDX-License-Identifier: Apache-2.0
"""Which stock backend serves prefill: SPECFUSED_PREFILL_BACKEND, or the best one present."""

import os

import torch

from specfused.sglang import compat

VARIABLE = "SPECFUSED_PREFILL_BACKEND"
CHOICES = ("fa3", "flashinfer", "triton", "torch_native")


def choose(configured: str) -> str:
    """Name of the stock prefill backend.

    Args:
        configured: what the command line gives to prefill; taken if it is a stock backend.

    Raises:
        ValueError: the variable names no known backend.
    """
    name = os.environ.get(VARIABLE, "").strip() or "auto"
    if name != "auto":
        if name not in CHOICES:
            raise ValueError(
                f"specfused: {VARIABLE} must be auto or one of {', '.join(CHOICES)}, got {name}"
            )
        return name
    if configured in CHOICES:
        return configured
    if not torch.cuda.is_available():
        return "torch_native"
    if compat.fa3_present():
        return "fa3"
    return "flashinfer" if compat.flashinfer_present() else "triton"
