# SPDX-License-Identifier: Apache-2.0
"""Proof that our ops ran: SPECFUSED_STATS=FILE gets the calls per role and forward mode as JSON."""

import atexit
import json
import logging
import os
from collections import Counter

from specfused.sglang import compat

VARIABLE = "SPECFUSED_STATS"

logger = logging.getLogger(__name__)

_calls: Counter = Counter()


def count(role: str, mode: str) -> None:
    """Counts one attention call of a layer, e.g. ("target", "TARGET_VERIFY")."""
    if not os.environ.get(VARIABLE):
        return
    key = f"{role}.{mode}"
    _calls[key] += 1
    if _calls[key] == 1 or _calls.total() % 64 == 0:
        write()


def write() -> None:
    """Writes the file, on rank 0; called at exit too."""
    path = os.environ.get(VARIABLE)
    if not path or not _calls or compat.tp_rank() > 0:
        return
    import specfused

    temporary = f"{path}.{os.getpid()}"
    what = {"backend": "specfused", "version": specfused.__version__, "calls": _calls}
    try:
        with open(temporary, "w") as f:
            json.dump(what, f)
        os.replace(temporary, path)
    except OSError as error:  # a file for tests must not end a server
        os.environ.pop(VARIABLE)
        logger.warning("specfused: %s cannot be written: %s", VARIABLE, error)


atexit.register(write)
