# SPDX-License-Identifier: Apache-2.0
"""Proof that our ops ran: SPECFUSED_STATS=FILE gets the calls per role and forward mode as JSON."""

import atexit
import json
import os
from collections import Counter

VARIABLE = "SPECFUSED_STATS"

_calls: Counter = Counter()


def count(role: str, mode: str) -> None:
    """Counts one attention call of a layer, e.g. ("target", "TARGET_VERIFY")."""
    if VARIABLE not in os.environ:
        return
    key = f"{role}.{mode}"
    _calls[key] += 1
    if _calls[key] == 1 or _calls.total() % 64 == 0:
        write()


def write() -> None:
    """Writes the file; called at exit too."""
    path = os.environ.get(VARIABLE)
    if path is None or not _calls:
        return
    import specfused

    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as f:
        json.dump({"backend": "specfused", "version": specfused.__version__, "calls": _calls}, f)
    os.replace(temporary, path)


atexit.register(write)
