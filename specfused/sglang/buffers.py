# SPDX-License-Identifier: Apache-2.0
"""Device memory of one backend object: split plans and workspace, address-stable for graphs."""

from functools import lru_cache

import torch

from specfused import ops
from specfused.sglang.features import attention_layers


@lru_cache(maxsize=1)
def cuda_kernels() -> str:
    """GPU architecture and kernel folder of this build, or an error that says how to build one."""
    archs = ops.build_info()["archs"]
    if not archs:
        raise RuntimeError(
            "specfused: this build has no CUDA kernels (SPECFUSED_CUDA=0): install it again with "
            "nvcc present, or serve with --attention-backend triton"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"smxx for sm_{major}{minor}"


class StepBuffers:
    """Plans and workspaces by rows per request, made at their full size when first asked for."""

    def __init__(self, runner, device: torch.device, max_bs: int):
        self.device = device
        self.max_bs = max_bs
        self.cuda = device.type == "cuda"
        self.kernels = cuda_kernels() if self.cuda else "CPU reference"
        layer = attention_layers(runner.model)[0]
        self._heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        self._steps: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def plan(self, seq_lens: torch.Tensor, seq_lens_offset: int, num_rows: int):
        """Plan of this batch and the workspace for it; (None, None) on the CPU, which needs none.

        Args:
            seq_lens: [bs] int64.
            num_rows: query rows per request.
        """
        if not self.cuda:
            return None, None
        self.reserve(num_rows)
        num_ctas, plan, workspace = self._steps[num_rows]
        plan = plan[: ops.plan_numel(seq_lens.shape[0], num_ctas)]
        ops.plan(seq_lens, self._heads[1], num_ctas, plan, seq_lens_offset=seq_lens_offset)
        return plan, workspace

    def reserve(self, num_rows: int) -> None:
        """Makes plan and workspace of a width before the first step that uses it."""
        if self.cuda and num_rows not in self._steps:
            self._steps[num_rows] = self._make(num_rows)

    def _make(self, num_rows: int):
        q_heads, kv_heads, head_dim = self._heads
        # "cuda" is the rank's own; asking device 0 would make a context there.
        index = self.device.index
        if index is None:
            index = torch.cuda.current_device()
        num_ctas = ops.attn_num_ctas(index, head_dim)
        size = ops.attn_workspace_bytes(num_ctas, num_rows * q_heads // kv_heads, head_dim)
        plan = torch.zeros(
            ops.plan_numel(self.max_bs, num_ctas), dtype=torch.int32, device=self.device
        )
        return num_ctas, plan, torch.zeros(size, dtype=torch.uint8, device=self.device)
