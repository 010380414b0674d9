# SPDX-License-Identifier: Apache-2.0
"""Loads _C.so into torch, with an error that says what to do."""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("_C.so")


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def load() -> None:
    """Registers `torch.ops.specfused.*`.

    Raises:
        ImportError: torch is older than 2.10, or the library was not built or does not load.
    """
    if _torch_version() < (2, 10):
        raise ImportError(f"specfused: torch must be 2.10 or newer, got {torch.__version__}")
    if not _LIBRARY.is_file():
        raise ImportError(
            f"specfused: {_LIBRARY.name} is missing beside {__file__}: this is a source tree, run "
            "pip install . and import specfused from another folder, or build it in place with "
            "python setup.py build_ext --inplace"
        )
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"specfused: {_LIBRARY.name} does not load into torch {torch.__version__}: {error}"
        ) from error
