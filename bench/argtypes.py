# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments: what is wrong is said in one line, with exit status 2."""

import argparse
import json
import re
from pathlib import Path


def count(text: str) -> int:
    """An argument of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def numbers(text: str) -> list[int]:
    return [count(x) for x in text.split(",")]


def seconds(text: str) -> float:
    """An argument of more than 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text!r}")
    return value


def expression(text: str) -> str:
    """A regular expression, as text."""
    try:
        re.compile(text)
    except re.error as error:
        said = f"must be part of an id or a regular expression, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(said) from None
    return text


def json_file(text: str) -> str:
    """A file to write to, not a folder."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    return text


def results(text: str) -> dict:
    """A results file, read."""
    try:
        found = json.loads(Path(text).read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"meta", "cases"} <= found.keys():
        raise argparse.ArgumentTypeError(f"must be a results file of bench/run.py, got {text!r}")
    return found
