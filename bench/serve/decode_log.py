# SPDX-License-Identifier: Apache-2.0
"""What an engine did step by step, from its log (a line a step: decode_log_interval 1)."""

import datetime
import re
from dataclasses import dataclass, field

STAMPED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})[^\]]*\] (.*)")
DECODE = re.compile(r"Decode batch.*?#running-req: (\d+)")
ACCEPT = re.compile(r"accept len: ([\d.]+)")
PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")
CHOICE = re.compile(r"specfused: drafting (on|off),(.*?); [^:]+: \w+ \(([\w-]+)\)")
ADAPTIVE = re.compile(  # SGLang's adaptive speculation; 0 steps: it does not draft
    r"(?:AdaptiveSpeculativeParams initialized|Switch adaptive runtime state)"
    r": steps[= ](?:\d+ -> )?(\d+)"
)
ON_ACCEPT = re.compile(r"steps on, accept len ([\d.]+)")


@dataclass
class Choice:
    """One decode step of a worker that may draft or not, when it said so."""

    second: float
    on: bool
    reason: str
    accept: float | None  # of drafting steps whose result arrived since the step before


@dataclass
class Log:
    """Seconds count from the epoch given to `read`."""

    choices: list[Choice] = field(default_factory=list)
    decodes: list[tuple[float, int, float]] = field(default_factory=list)  # requests, accept length
    prefills: list[tuple[float, int]] = field(default_factory=list)  # tokens not in the cache


def read(text: str, epoch: float) -> Log:
    """The steps in a piece of log whose lines have milliseconds (SGLANG_LOG_MS)."""
    log, draft_steps = Log(), None
    for line in text.splitlines():
        stamped = STAMPED.match(line)
        if not stamped:
            continue
        when = datetime.datetime.strptime(stamped[1], "%Y-%m-%d %H:%M:%S.%f")
        second, what = when.timestamp() - epoch, stamped[2]
        if found := CHOICE.match(what):
            accept = ON_ACCEPT.search(found[2])
            # 0.00 stands where none has arrived yet
            length = float(accept[1]) if accept and float(accept[1]) >= 1 else None
            log.choices.append(Choice(second, found[1] == "on", found[3], length))
        elif found := DECODE.match(what):
            accept = ACCEPT.search(what)
            length = float(accept[1]) if accept else 1.0
            log.decodes.append((second, int(found[1]), length))
            if draft_steps is not None:
                log.choices.append(Choice(second, draft_steps > 0, "adaptive", length))
        elif found := PREFILL.match(what):
            log.prefills.append((second, int(found[1])))
        elif found := ADAPTIVE.match(what):
            draft_steps = int(found[1])
    return log


def settled(choices: list[Choice]) -> list[bool]:
    """Whether each step drafts, but during a probe whether the steps before it did."""
    modes: list[bool] = []
    for choice in choices:
        modes.append(modes[-1] if choice.reason == "probe" and modes else choice.on)
    return modes


def modes(choices: list[Choice], begin: float, end: float) -> dict:
    """What the policy did in a phase.

    Returns:
        mode: the one that the phase ends in; time_to_mode_s and steps_to_mode: from the begin of
        the phase to the first step of the last stretch in it, probes aside; switches, probes: how
        many there were; on_share: of steps; accept_len_on. All None where nothing was chosen.
    """
    inside = [i for i, c in enumerate(choices) if begin <= c.second < end]
    names = ("mode", "time_to_mode_s", "steps_to_mode", "switches", "probes", "on_share",
             "accept_len_on")  # fmt: skip
    if not inside:
        return dict.fromkeys(names)
    first, last = inside[0], inside[-1]
    held = settled(choices)
    reached = last
    while reached > first and held[reached - 1] == held[last]:
        reached -= 1
    before = held[first - 1] if first else held[first]
    at_once = reached == first and before == held[first]
    pairs = [(choices[i - 1], choices[i]) for i in inside if i]
    accept = [c.accept for c in choices[first : last + 1] if c.on and c.accept]
    values = (
        "on" if held[last] else "off",
        0.0 if at_once else round(choices[reached].second - begin, 3),
        reached - first,
        sum(a.on != b.on for a, b in pairs),
        sum(a.reason != "probe" and b.reason == "probe" for a, b in pairs),
        round(sum(choices[i].on for i in inside) / len(inside), 3),
        round(sum(accept) / len(accept), 3) if accept else None,
    )
    return dict(zip(names, values, strict=True))


def batches(log: Log, begin: float, end: float) -> dict:
    """Decode steps of a phase, their requests and accept length, and what prefill computed."""
    found = [(n, accept) for second, n, accept in log.decodes if begin <= second < end]
    requests = sum(n for n, _ in found)
    return {
        "steps": len(found),
        "requests_per_step": round(requests / len(found), 2) if found else None,
        "accept_len": round(sum(n * a for n, a in found) / requests, 3) if requests else None,
        "prefills": sum(begin <= second < end for second, _ in log.prefills),
        "prefill_tokens": sum(n for second, n in log.prefills if begin <= second < end),
    }


def on_share(choices: list[Choice], bin_s: float, bins: int) -> list[float | None]:
    """Of the steps in each bin, None where a bin has none."""
    steps, on = [0] * bins, [0] * bins
    for choice in choices:
        at = int(choice.second // bin_s)
        if 0 <= at < bins:
            steps[at] += 1
            on[at] += choice.on
    return [round(a / b, 2) if b else None for a, b in zip(on, steps, strict=True)]
