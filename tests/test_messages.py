# SPDX-License-Identifier: Apache-2.0
"""Every check of csrc/torch says its sentence: `<op>: <argument> must ..., got <value>`."""

import op_args
import pytest
import torch
from message_tables import I32, TABLES, strided, value
from message_tables_commit import TABLES as COMMIT_TABLES

from specfused import ops

OPS = {
    "commit_with_logits": "commit",
    "commit_with_kv": "commit",
    "commit_with_outputs": "commit",
    "commit_sampled": "commit",
    "commit_with_probs": "commit",
    "full_mask": "tree_words_from_mask",
}
ROWS = [(call, *row) for call, rows in (TABLES | COMMIT_TABLES).items() for row in rows]


@pytest.mark.parametrize(
    "call,changes,message", ROWS, ids=[f"{call}: {message}" for call, _, message in ROWS]
)
def test_message(call, changes, message, device):
    """The same words on every device, before anything is read or launched."""
    op = OPS.get(call, call)
    args = getattr(op_args, call)(device)
    for name, change in changes.items():
        args[name] = change(args.get(name))
        if isinstance(args[name], torch.Tensor):
            args[name] = args[name].to(device)
            if message.endswith(("stride 2", "a strided tensor")) and args[name].is_contiguous():
                args[name] = strided(args[name])  # .to() packs what it copies
    with pytest.raises(RuntimeError) as error:
        getattr(ops, op)(**args)
    assert str(error.value) == f"{op}: {message}"


@pytest.mark.parametrize("op", ["verify_attn", "decode_attn"])
def test_scales_of_one_are_no_feature(op, device):
    args = getattr(op_args, op)(device)
    getattr(ops, op)(**args, k_scale=1.0, v_scale=1.0, softcap=0.0, window=-1)


def test_no_cuda_kernels():
    if ops.build_info()["archs"]:
        for index in (1000, 256, 1 << 32, -1):
            with pytest.raises(RuntimeError) as error:
                ops.attn_num_ctas(index, 64)
            assert str(error.value) == (
                f"attn_num_ctas: device_index must name a CUDA device of this machine, got {index}"
            )
        return
    with pytest.raises(RuntimeError) as error:
        ops.attn_num_ctas(3, 64)
    assert str(error.value) == (
        "attn_num_ctas: this build must have CUDA kernels, got a CPU-only build "
        "(device 3, head_dim 64)"
    )


def shifted(t):
    """The same elements, one element behind a 16-byte border."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def in_odd_rows(t):
    """Heads 68 elements apart: every second one starts between two borders."""
    return t.new_zeros(*t.shape[:2], 68)[..., :64]


UNALIGNED = "{} must have rows that start on 16-byte borders, got another alignment"
CUDA_ONLY = [
    ({"k_cache": lambda t: t.cpu()}, "k_cache must be on the device of q, got another device"),
    ({"seq_lens": lambda t: t.cpu()}, "seq_lens must be on the device of q, got another device"),
    ({"plan": value(None)}, "plan must be given on CUDA, got None"),
    (
        {"plan": value(torch.zeros(7 + 1025, dtype=I32, device="cpu"))},
        "plan must be made for at most 1024 CTAs, got 1025",
    ),
    *(
        ({name: unaligned}, UNALIGNED.format(name))
        for unaligned in (shifted, in_odd_rows)
        for name in ("q", "k_cache", "v_cache", "k_new", "v_new", "out")
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["verify_attn", "decode_attn"])
@pytest.mark.parametrize("changes,message", CUDA_ONLY)
def test_cuda_message(op, changes, message, cuda):
    args = getattr(op_args, op)(cuda)
    for name, change in changes.items():
        args[name] = change(args[name])
        if name == "plan" and args[name] is not None:
            args[name] = args[name].to(cuda)
    with pytest.raises(RuntimeError) as error:
        getattr(ops, op)(**args)
    assert str(error.value) == f"{op}: {message}"


@pytest.mark.gpu
def test_cuda_shapes_and_workspaces(cuda):
    """What the CPU serves and the kernels do not, and memory that is too small."""
    for heads, dim, said in [
        (4, 80, "q must have a head_dim of 64, 128 or 256 on CUDA, got 80"),
        (34, 64, "q must have at most 16 query heads per KV head on CUDA, got 17"),
    ]:
        args = op_args.verify_attn(cuda, optional=False)
        args["q"] = torch.zeros(8, heads, dim, dtype=torch.bfloat16, device=cuda)
        args["out"] = torch.zeros_like(args["q"])
        for name in ("k_cache", "v_cache"):
            args[name] = torch.zeros(32, 2, dim, dtype=torch.bfloat16, device=cuda)
        with pytest.raises(RuntimeError) as error:
            ops.verify_attn(**args)
        assert str(error.value) == f"verify_attn: {said}"
    calls = ("commit_with_logits", "commit_sampled", "commit_with_probs")
    kinds = [(op, op) for op in ("verify_attn", "decode_attn", "draft_topk")]
    for op, call in (*kinds, *(("commit", call) for call in calls)):
        args = getattr(op_args, call)(cuda)
        needed = args["workspace"].numel()
        for workspace, said in [
            (None, f"have at least {needed} bytes on CUDA, got 0"),
            (args["workspace"][1:], f"have at least {needed} bytes on CUDA, got {needed - 1}"),
            (torch.zeros(needed + 8, dtype=torch.uint8, device=cuda)[8:],
             "start on a 16-byte border, got another alignment"),
        ]:  # fmt: skip
            args["workspace"] = workspace
            with pytest.raises(RuntimeError) as error:
                getattr(ops, op)(**args)
            assert str(error.value) == f"{op}: workspace must {said}"


@pytest.mark.parametrize(
    "op, args, message",
    [
        ("plan_numel", (-1, 4), "bs must be 0 to 16777216, got -1"),
        ("plan_numel", (4, 0), "num_ctas must be 1 to 1048576, got 0"),
        ("attn_workspace_bytes", (4, 1025, 64), "rows_per_kv_head must be 1 to 1024, got 1025"),
        ("attn_workspace_bytes", (-1, 4, 64), "num_ctas must be 1 to 1048576, got -1"),
        ("draft_workspace_bytes", (2, 9, 17), "topk must be 1 to 16, got 17"),
        ("draft_workspace_bytes", (-1, 9, 4), "rows must be 0 to 16384, got -1"),
        ("draft_workspace_bytes", (1, 0, 4), "vocab must be 1 to 2147483648, got 0"),
        ("commit_workspace_bytes", (2, 4, 0), "vocab must be 1 to 2147483648, got 0"),
        ("commit_workspace_bytes", (2, 65, 9), "num_draft_tokens must be 1 to 64, got 65"),
        ("commit_workspace_bytes", (2**62, 64, 9), f"bs must be 0 to 16777216, got {2**62}"),
    ],
)
def test_sizes(op, args, message):
    """A size that cannot be is an error and never a small or negative number of bytes."""
    with pytest.raises(RuntimeError) as error:
        getattr(ops, op)(*args)
    assert f"{op}: {message}" in str(error.value)
