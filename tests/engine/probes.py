# SPDX-License-Identifier: Apache-2.0
"""Counts of calls in a child engine, specfused's ops above all, and deliberate faults in those.

The backend calls its ops as attributes of `specfused.ops`, so wrapping those before the engine
forks its scheduler is enough. The counters live in memory that parent and children share.
"""

import functools
import inspect
import multiprocessing
import pkgutil

CALLS = {
    "verify_attn": "specfused.ops",
    "decode_attn": "specfused.ops",
    "tree_speculative_sampling_target_only": "sgl_kernel",
    "event_loop_overlap": "sglang.srt.managers.scheduler:Scheduler",
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


FAULTS = {
    "mask": _causal_verify,
    "slot": _wrong_slot,
    "draft_mask": _first_branch_only,
    "draft_slot": _wrong_draft_slot,
    "raise": _raise,
}


class OpProbe:
    """Shared call counters of what CALLS lists."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._calls = {name: context.Value("q", 0) for name in CALLS}

    def install(self, fault=None):
        """Wrap them in this process and those that it will fork."""
        for name, counter in self._calls.items():
            owner = pkgutil.resolve_name(CALLS[name])
            alter = FAULTS[fault] if fault and CALLS[name] == "specfused.ops" else None
            setattr(owner, name, _wrapped(getattr(owner, name), counter, alter))

    def counts(self):
        return {name: counter.value for name, counter in self._calls.items()}


def _wrapped(function, counter, alter):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def probe(*args, **kwargs):
        with counter.get_lock():
            counter.value += 1
        if alter is None:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        alter(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return probe
