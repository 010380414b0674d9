# SPDX-License-Identifier: Apache-2.0
"""What callers and compilers may rely on: schemas, opcheck, Meta, one graph for all batch sizes."""

import inspect

import op_args
import pytest
import torch
from compare import assert_bits_equal

from specfused import ops

ATTN_TAIL = (
    "Tensor(d!)? lse=None, Tensor? k_new=None, Tensor? v_new=None, Tensor? out_cache_loc=None, "
    "{window_slots}Tensor? plan=None, Tensor(e!)? workspace=None, int seq_lens_offset=0, "
    "float? sm_scale=None, Tensor? sinks=None, int window=-1, float softcap=0., "
    "float? k_scale=None, float? v_scale=None) -> ()"
)

# Callers outside of this repository are written against these: a change here breaks them.
SCHEMAS = {
    "verify_attn": "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor? tree_words, Tensor(c!) out, *, "
    + ATTN_TAIL.format(window_slots="Tensor? window_slots=None, "),
    "decode_attn": "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor(c!) out, *, "
    + ATTN_TAIL.format(window_slots=""),
    "commit": "(Tensor draft_tokens, Tensor seq_lens, Tensor(a!) accept_index, "
    "Tensor(b!) num_correct_drafts, Tensor(c!) accept_lens, Tensor(d!) accept_tokens, "
    "Tensor(e!) bonus_tokens, Tensor(f!) new_seq_lens, *, Tensor? logits=None, "
    "Tensor? targets=None, Tensor? retrieve_next_token=None, "
    "Tensor? retrieve_next_sibling=None, Tensor? out_cache_loc=None, Tensor? kv_ptrs=None, "
    "Tensor? kv_row_bytes=None, int num_slots=0, Tensor(g!)? workspace=None, "
    "Tensor(h!)? hidden_states=None, Tensor(i!)? next_token_ids=None, "
    "Tensor(j!)? select_index=None, Tensor(k!)? positions=None, Tensor(l!)? invalid_logits=None, "
    "Tensor? temperatures=None, Tensor? target_probs=None, Tensor? draft_probs=None, "
    "Tensor? coins=None, Tensor? coins_final=None, float threshold_single=1., "
    "float threshold_acc=1., Tensor(m!)? window_ends=None) -> ()",
    "compact": "(Tensor kv_ptrs, Tensor kv_row_bytes, int num_slots, Tensor out_cache_loc, "
    "Tensor accept_index, Tensor accept_lens) -> ()",
    "draft_topk": "(Tensor logits, Tensor(a!) topk_index, *, Tensor(b!)? topk_p=None, "
    "Tensor? rows=None, Tensor? token_map=None, Tensor(c!)? workspace=None) -> ()",
    "plan": "(Tensor seq_lens, int num_kv_heads, int num_ctas, Tensor(a!) out, *, "
    "int seq_lens_offset=0) -> ()",
    "tree_words_from_links": "(Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
    "Tensor(a!) words) -> ()",
    "tree_words_from_mask": "(Tensor custom_mask, Tensor(a!) words, *, Tensor? seq_lens=None) "
    "-> ()",
    "plan_numel": "(int bs, int num_ctas) -> int",
    "attn_num_ctas": "(int device_index, int head_dim) -> int",
    "attn_workspace_bytes": "(int num_ctas, int rows_per_kv_head, int head_dim) -> int",
    "commit_workspace_bytes": "(int bs, int num_draft_tokens, int vocab) -> int",
    "draft_workspace_bytes": "(int rows, int vocab, int topk) -> int",
    "build_info": "() -> str",
}
TENSOR_OPS = sorted({op for op, _ in op_args.CALLS.values()})


def packet(op):
    return getattr(torch.ops.specfused, op).default


@pytest.mark.parametrize("op", SCHEMAS)
def test_schema(op):
    assert str(packet(op)._schema) == f"specfused::{op}{SCHEMAS[op]}"


def test_every_op_is_in_the_snapshot():
    registered = {
        name.removeprefix("specfused::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("specfused::") and not name.startswith("specfused::bench_")
    }  # what bench/ measures the machine with is nobody's interface
    assert registered == set(SCHEMAS)


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_python_signature_is_the_schema(op):
    """specfused.ops adds types and words, no argument and no default of its own."""
    parameters = inspect.signature(getattr(ops, op)).parameters
    arguments = packet(op)._schema.arguments
    assert list(parameters) == [argument.name for argument in arguments]
    for argument in arguments:
        parameter = parameters[argument.name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name
        else:
            assert parameter.default is parameter.empty, argument.name


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_documented(op):
    doc = getattr(ops, op).__doc__
    assert doc
    for name in inspect.signature(getattr(ops, op)).parameters:
        if op in ("verify_attn", "commit", "compact", "plan", "tree_words_from_mask"):
            assert name in doc, f"{op}: {name} is not in the docstring"


@pytest.mark.parametrize("call", op_args.CALLS)
def test_opcheck(call, device):
    """Declared writes, autograd keys, fake tensors, AOT with dynamic shapes."""
    op, make = op_args.CALLS[call]
    args = make(device)
    schema = packet(op)._schema.arguments
    positional = [args.pop(a.name) for a in schema if not a.kwarg_only]
    torch.library.opcheck(packet(op), tuple(positional), args)


@pytest.mark.parametrize("call", op_args.CALLS)
def test_call_is_accepted(call, device):
    """The calls that the message tests break one argument of are correct themselves."""
    op, make = op_args.CALLS[call]
    getattr(ops, op)(**make(device))


@pytest.mark.parametrize("call", op_args.CALLS)
def test_meta(call):
    """On the Meta device: accepted, nothing computed."""
    op, make = op_args.CALLS[call]
    args = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in make("cpu").items()
    }
    assert getattr(ops, op)(**args) is None


@pytest.mark.parametrize("call", op_args.CALLS)
def test_meta_touches_nothing(call):
    """One Meta argument makes it a Meta call: every real tensor beside it keeps its bits."""
    op, make = op_args.CALLS[call]
    args = make("cpu")
    first = next(name for name, value in args.items() if isinstance(value, torch.Tensor))
    args[first] = args[first].to("meta")
    real = {
        name: value
        for name, value in args.items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    }
    before = {name: value.clone() for name, value in real.items()}
    getattr(ops, op)(**args)
    for name, value in real.items():
        assert_bits_equal(value, before[name], name)


def test_one_graph_for_all_batch_sizes(device):
    """torch.compile with dynamic shapes: the Meta implementation must not pin a size."""
    from torch._dynamo.testing import CompileCounter

    def step(args):
        ops.verify_attn(**args)
        return args["out"] * 2

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    for bs in (5, 6, 11):  # sizes that no other dimension has: the compiler would tie them together
        args = op_args.verify_attn(device, bs=bs)
        ops.verify_attn(**args)
        want = args["out"] * 2
        args["out"] = torch.zeros_like(args["out"])
        assert_bits_equal(compiled(args), want, f"compiled at bs {bs}")
    assert counter.frame_count == 1, f"{counter.frame_count} graphs for three batch sizes"


def test_compiled_mutation_is_seen(device):
    """AOT functionalisation keeps the declared writes: pool and lse as in eager mode."""

    def step(args):
        ops.verify_attn(**args)
        return args["k_cache"].float().nansum() + args["lse"].sum()

    args = op_args.verify_attn(device)
    again = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in args.items()
    }
    want = step(args)
    torch._dynamo.reset()
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(again)
    assert torch.equal(got, want)
    for name in ("k_cache", "v_cache", "out", "lse"):
        assert_bits_equal(again[name], args[name], name)


def test_sizes():
    """Numbers that callers allocate by: monotone, and what the layout says."""
    assert ops.plan_numel(3, 5) == 4 + 3 + 1 + 5
    small = ops.attn_workspace_bytes(1, 1, 64)
    assert ops.attn_workspace_bytes(132, 64, 128) > ops.attn_workspace_bytes(132, 64, 64) > small
    assert ops.attn_workspace_bytes(1024, 1024, 256) > 1 << 31, "64-bit arithmetic"
    assert ops.commit_workspace_bytes(1, 1, 1) >= 8
    assert ops.commit_workspace_bytes(256, 64, 151936) >= 256 * 64 * 8


def test_build_info():
    from specfused._version import __version__

    info = ops.build_info()
    assert list(info) == ["version", "cuda_compiler", "archs"]
    assert info["version"] == __version__
    assert bool(info["archs"]) == bool(info["cuda_compiler"])
    for arch in info["archs"]:
        folder, _, target = arch.partition(":")
        assert folder.startswith("sm"), arch
        assert target.startswith(("sm_", "compute_")), arch
