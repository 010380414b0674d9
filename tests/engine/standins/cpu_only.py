# SPDX-License-Identifier: Apache-2.0
"""The guard of this folder: nothing in it may be imported where a GPU could be used."""

import os

import torch


def require_cpu_engine(name: str) -> None:
    """Raise unless this process runs SGLang's CPU engine and sees no GPU."""
    if torch.cuda.is_available():
        raise ImportError(
            f"{name}: this is the CPU stand-in of tests/engine/standins, and a GPU is visible; "
            "take that folder off PYTHONPATH"
        )
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ImportError(
            f"{name}: the CPU stand-in of tests/engine/standins needs SGLANG_USE_CPU_ENGINE=1"
        )
