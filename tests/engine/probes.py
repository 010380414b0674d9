# SPDX-License-Identifier: Apache-2.0
"""Counts in a child engine, of calls to specfused's ops above all, and deliberate faults.

The backend calls its ops as attributes of `specfused.ops`, so wrapping those before the engine
forks its scheduler is enough; SGLang's own are wrapped in the module that calls them. The counters
live in memory that parent and children share.
"""

import functools
import inspect
import json
import multiprocessing
import os
import pkgutil
from typing import NamedTuple


def _ragged(arguments):
    """1 where the requests of one verified batch accepted unequal numbers of tokens."""
    return int(len(set(arguments["accept_lens"].tolist())) > 1)


def _forked(arguments):
    """1 where two requests of one batch accepted as many tokens along different nodes."""
    # A row is the root's flat index and those of the accepted nodes; -1 pads.
    rows = arguments["accept_index"].tolist()
    paths = {tuple(i - row[0] for i in row if i >= 0) for row in rows}
    return int(len(paths) > len(set(map(len, paths))))


def _moved(arguments):
    """KV rows that go to another slot; SGLang's padding moves slot 0 to itself."""
    return int((arguments["tgt_loc"] != arguments["src_loc"]).sum())


def _lost(arguments):
    """KV slots that are neither free nor in the prefix cache of an idle scheduler."""
    scheduler = arguments["self"]
    if not scheduler.is_fully_idle():
        return 0
    allocator = scheduler.token_to_kv_pool_allocator
    return allocator.size - allocator.available_size() - scheduler.tree_cache.evictable_size()


class Probe(NamedTuple):
    """What is wrapped, and what one call adds to the counter: 1 unless a function says."""

    owner: str
    attribute: str
    measure: object = None


_SAMPLING = "tree_speculative_sampling_target_only"
PROBES = {
    "verify_attn": Probe("specfused.ops", "verify_attn"),
    "decode_attn": Probe("specfused.ops", "decode_attn"),
    "commit": Probe("specfused.ops", "commit"),
    "compact": Probe("specfused.ops", "compact"),
    _SAMPLING: Probe("sgl_kernel", _SAMPLING),
    "event_loop_overlap": Probe("sglang.srt.managers.scheduler:Scheduler", "event_loop_overlap"),
    "flush_cache": Probe("sglang.srt.managers.scheduler:Scheduler", "flush_cache"),
    "lost_slots": Probe("sglang.srt.managers.scheduler:Scheduler", "flush_cache", _lost),
    "missing_draft_kv": Probe("specfused.sglang.ring", "missing_draft_kv"),
    "reads_done": Probe("specfused.sglang.compat", "publish_reads_done"),
    "catch_ups": Probe("specfused.sglang.catch_up", "prepare_for_draft_extend"),
    "ragged_rounds": Probe(
        "sglang.kernels.ops.speculative.eagle", "fill_bonus_tokens_cpu", _ragged
    ),
    "forked_rounds": Probe(
        "sglang.kernels.ops.speculative.eagle", "fill_accept_out_cache_loc_cpu", _forked
    ),
    "moved_rows": Probe(
        "sglang.kernels.ops.kvcache.cache_move", "copy_all_layer_kv_cache_cpu", _moved
    ),
}


def _is_draft_step(arguments):
    """Only the draft's own steps bring window slots of their own."""
    return arguments.get("window_slots") is not None


def _causal_verify(arguments):
    """Every node sees all nodes before it, as if the tree were a chain."""
    if not _is_draft_step(arguments):
        arguments["tree_words"] = None


def _first_branch_only(arguments):
    """Every draft branch reads what branch 0 may read."""
    if _is_draft_step(arguments):
        words = arguments["tree_words"]
        arguments["tree_words"] = words[:, :1].repeat(1, words.shape[1])


def _misread_last(arguments):
    """The last committed position reads the slot of the first one."""
    rows = arguments["req_pool_indices"]
    last = arguments["seq_lens"] + arguments["seq_lens_offset"] - 1
    table = arguments["req_to_token"].clone()
    table[rows, last] = table[rows, 0]
    arguments["req_to_token"] = table


def _wrong_slot(arguments):
    if not _is_draft_step(arguments):
        _misread_last(arguments)


def _wrong_draft_slot(arguments):
    if _is_draft_step(arguments):
        _misread_last(arguments)


def _raise(arguments):
    raise ValueError("deliberate fault")


def _leave_in_place(arguments):
    """Accepted nodes stay where they were drafted."""
    arguments["tgt_loc"] = arguments["tgt_loc"][:0]
    arguments["src_loc"] = arguments["src_loc"][:0]


def _hole(arguments):
    """The draft KV of a catch-up goes to the dummy slot."""
    arguments["batch"].out_cache_loc = arguments["batch"].out_cache_loc * 0


def _cache_all(arguments):
    """A request that ends is taken for one without pending pairs."""
    arguments["req"] = None


_OPS = ("verify_attn", "decode_attn")
FAULTS = {
    "mask": (_OPS, _causal_verify),
    "slot": (_OPS, _wrong_slot),
    "draft_mask": (_OPS, _first_branch_only),
    "draft_slot": (_OPS, _wrong_draft_slot),
    "raise": (_OPS, _raise),
    "move": (("moved_rows",), _leave_in_place),
    "hole": (("catch_ups",), _hole),
    "cache_all": (("missing_draft_kv",), _cache_all),
}


class OpProbe:
    """Shared counters of what PROBES lists."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._counters = {name: context.Value("q", 0) for name in PROBES}

    def install(self, fault=None):
        """Wrap them in this process and those that it will fork."""
        names, alter = FAULTS[fault] if fault else ((), None)
        for name, counter in self._counters.items():
            owner, attribute, measure = PROBES[name]
            owner = pkgutil.resolve_name(owner)
            function = getattr(owner, attribute)
            fault_here = alter if name in names else None
            setattr(owner, attribute, _wrapped(function, counter, measure, fault_here))

    def counts(self):
        return {name: counter.value for name, counter in self._counters.items()}


def _wrapped(function, counter, measure, alter):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def probe(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        amount = measure(bound.arguments) if measure else 1
        with counter.get_lock():
            counter.value += amount
        if alter is None:
            return function(*args, **kwargs)
        alter(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return probe


STEP_LOG = "SPECFUSED_TEST_STEPS"


class Step(NamedTuple):
    """One decode step of one request, from the arguments of `commit`."""

    width: int
    committed: int  # tokens with KV before the step
    root: int
    accepted: int


def log_steps():
    """Append what every `commit` of this process and its children decides to the file STEP_LOG."""
    import specfused.ops

    commit = specfused.ops.commit

    @functools.wraps(commit)
    def logged(draft_tokens, seq_lens, accept_index, num_correct_drafts, *args, **kwargs):
        committed = seq_lens.tolist()
        commit(draft_tokens, seq_lens, accept_index, num_correct_drafts, *args, **kwargs)
        rows = zip(committed, draft_tokens[:, 0].tolist(), num_correct_drafts.tolist(), strict=True)
        with open(os.environ[STEP_LOG], "a") as f:
            f.write(json.dumps([[draft_tokens.shape[1], *row] for row in rows]) + "\n")

    specfused.ops.commit = logged


def read_steps(path):
    """The logged steps: a list of Step per `commit`."""
    if not path.exists():
        return []
    return [[Step(*row) for row in json.loads(line)] for line in path.read_text().splitlines()]
