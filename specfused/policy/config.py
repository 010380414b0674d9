# SPDX-License-Identifier: Apache-2.0
"""Policies from text, e.g. of an environment variable."""

import json
from dataclasses import fields

from specfused.policy.base import Forced, Mode, Policy, Schedule, Table, is_count, require
from specfused.policy.goodput import Goodput, Settings

FORMS = (
    "be auto, on, off, table:1=on,32=off, threshold:32, schedule:1100, "
    'or JSON such as {"policy": "auto", "dwell": 16}'
)


def from_config(config: str | dict | None) -> Policy:
    """The policy that a configuration asks for.

    Args:
        config: None or "auto": goodput. "on", "off": that mode. "table:1=on,32=off": a mode from
            each batch size on. "threshold:32": drafting up to and including 32 requests.
            "schedule:1100": on, on, off, off, and again. Or a dict, or its JSON text: "policy"
            names one of these, the other keys are its parameters: of "auto" all of `Settings` and
            "calibration", a list of [mode, batch_size, context, seconds]; of "table" "table"
            ({"1": "on", "32": "off"}) and "dwell"; of "threshold" "batch_size" and "dwell"; of
            "schedule" "pattern".

    Raises:
        ValueError: With what was expected and what was given.
    """
    if config is None:
        return Goodput()
    if isinstance(config, str):
        text = config.strip()
        if not text.startswith("{"):
            return _from_words(text)
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"policy: configuration must be valid JSON, got {error}") from None
    require(isinstance(config, dict), "configuration", FORMS, config)
    options = dict(config)
    kind = options.pop("policy", "auto")
    require(isinstance(kind, str) and kind in KINDS, "policy", f"be one of {list(KINDS)}", kind)
    return KINDS[kind](options)


def _from_words(text: str) -> Policy:
    kind, colon, value = text.partition(":")
    if not colon:
        require(kind in ("auto", "on", "off"), "configuration", FORMS, text)
        return KINDS[kind]({})
    if kind == "schedule":
        return Schedule(value)
    if kind == "threshold":
        return _threshold({"batch_size": _integer(value, "threshold")})
    require(kind == "table", "configuration", FORMS, text)
    pairs = [entry.partition("=")[::2] for entry in value.split(",")]
    sizes = [size.strip() for size, _ in pairs]
    require(len(set(sizes)) == len(sizes), "table", "name each batch size once", value)
    return _table(
        {"table": {size: mode.strip() for size, (_, mode) in zip(sizes, pairs, strict=True)}}
    )


def _integer(value, what: str) -> int:
    """A count, in digits or as JSON has it."""
    text = str(value).strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    require(is_count(number), what, "be an integer >= 1", value)
    return number


def _known(options: dict, *names: str) -> None:
    for key in options:
        require(key in names, "a parameter", f"be one of {sorted(('policy', *names))}", key)


def _forced(mode: Mode):
    def make(options: dict) -> Policy:
        _known(options)
        return Forced(mode)

    return make


def _auto(options: dict) -> Policy:
    names = [field.name for field in fields(Settings)]
    _known(options, "calibration", *names)
    calibration = options.pop("calibration", None)
    valid = calibration is None or isinstance(calibration, (list, tuple))
    require(valid, "calibration", "be a list of points", calibration)
    return Goodput(Settings(**options), calibration)


def _table(options: dict) -> Policy:
    _known(options, "table", "dwell")
    table = options.get("table")
    require(isinstance(table, dict), "table", 'map batch sizes to "on" or "off"', table)
    entries = {}
    for size, mode in table.items():
        number = _integer(size, "a batch size of the table")
        require(mode in ("on", "off"), f"table entry {number}", "be on or off", mode)
        require(number not in entries, "table", "name each batch size once", dict(table))
        entries[number] = Mode(mode)
    return Table(entries, *_dwell(options))


def _threshold(options: dict) -> Policy:
    _known(options, "batch_size", "dwell")
    size = _integer(options.get("batch_size"), "threshold")
    return Table({1: Mode.ON, size + 1: Mode.OFF}, *_dwell(options))


def _schedule(options: dict) -> Policy:
    _known(options, "pattern")
    return Schedule(options.get("pattern"))


def _dwell(options: dict) -> tuple:
    return (options["dwell"],) if "dwell" in options else ()


KINDS = {
    "auto": _auto,
    "on": _forced(Mode.ON),
    "off": _forced(Mode.OFF),
    "table": _table,
    "threshold": _threshold,
    "schedule": _schedule,
}
