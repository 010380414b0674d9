# SPDX-License-Identifier: Apache-2.0
"""What a caller asks before it calls an op: sizes, the address table, what this build is.

`specfused.ops` has all of it.
"""

import torch
from torch import Tensor

from specfused._load import load

load()
_ops = torch.ops.specfused


def kv_table(buffers: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Address table of K and V buffers for `commit` and `compact`.

    Args:
        buffers: K and V buffers of all layers, [slots, ...] each, contiguous, on one device.

    Returns:
        kv_ptrs [n] int64, kv_row_bytes [n] int64 (on the buffers' device) and the slot count. The
        table holds raw addresses: keep the buffers alive as long as it is used.

    Raises:
        ValueError: buffers differ in slots or device, or one is no tensor or not contiguous.
    """
    if not buffers:
        raise ValueError("kv_table: buffers must hold at least one tensor, got none")
    for t in buffers:
        if not isinstance(t, Tensor) or t.dim() == 0:
            got = "a tensor without dimensions" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"kv_table: buffers must be tensors [slots, ...], got {got}")
    first = buffers[0]
    for t in buffers:
        if t.shape[0] != first.shape[0] or t.device != first.device or not t.is_contiguous():
            raise ValueError(
                "kv_table: buffers must be contiguous, on one device and of one slot count, got "
                f"{tuple(t.shape)} on {t.device} beside {tuple(first.shape)} on {first.device}"
            )
    ptrs = torch.tensor([t.data_ptr() for t in buffers], dtype=torch.int64, device=first.device)
    row_bytes = [t.stride(0) * t.element_size() for t in buffers]
    strides = torch.tensor(row_bytes, dtype=torch.int64, device=first.device)
    return ptrs, strides, first.shape[0]


def plan_numel(bs: int, num_ctas: int) -> int:
    """Entries of a plan tensor."""
    return _ops.plan_numel.default(bs, num_ctas)


def attn_num_ctas(device_index: int, head_dim: int) -> int:
    """CTAs that a plan should have on this GPU.

    Raises:
        RuntimeError: this build has no CUDA kernels, or there is no such device.
    """
    return _ops.attn_num_ctas.default(device_index, head_dim)


def attn_workspace_bytes(num_ctas: int, rows_per_kv_head: int, head_dim: int) -> int:
    """Bytes of the attention workspace for up to rows_per_kv_head = W * Hq / Hkv rows.

    A workspace must be zero before its first use; each launch leaves it fit for the next.
    """
    return _ops.attn_workspace_bytes.default(num_ctas, rows_per_kv_head, head_dim)


def commit_workspace_bytes(bs: int, num_draft_tokens: int, vocab: int) -> int:
    """Bytes of the workspace of `commit` unless targets are given; it needs no initial value."""
    return _ops.commit_workspace_bytes.default(bs, num_draft_tokens, vocab)


def draft_workspace_bytes(rows: int, vocab: int, topk: int) -> int:
    """Bytes of the workspace of `draft_topk` for up to so many rows and candidates.

    It must be zero before its first use; each launch leaves it fit for the next.
    """
    return _ops.draft_workspace_bytes.default(rows, vocab, topk)


def build_info() -> dict[str, object]:
    """What this build is: {"version", "cuda_compiler" or None, "archs": ["smxx:sm_90a", ...]}."""
    version, compiler, *archs = _ops.build_info.default().split(";")
    return {
        "version": version,
        "cuda_compiler": compiler or None,
        "archs": [a for a in archs if a],
    }
