# SPDX-License-Identifier: Apache-2.0
"""Who decides whether the engine drafts: one decision per decode batch, on the host, before launch.

    policy = from_config("auto")
    policy.calibrate(points)  # where policy.uses_times: measured once, at start
    decision = policy.decide(batch_size, mean_context)  # before every decode step
    policy.observe_step(mode, batch_size, mean_context, seconds)  # late, never: fine
    policy.observe_accept(mode, accept_lens)

Pure Python without a clock: a policy is a function of its configuration and of the calls it got, in
order. Ranks that make the same calls decide the same, so give all of them one rank's step times;
`state_digest()` shows whether they agree. Only + - * / and comparisons touch floats, so that no
libm comes into it.
"""

from specfused.policy.base import Decision, Forced, Mode, Policy, Schedule, Table
from specfused.policy.config import from_config
from specfused.policy.goodput import Goodput, Settings

__all__ = [
    "Decision",
    "Forced",
    "Goodput",
    "Mode",
    "Policy",
    "Schedule",
    "Settings",
    "Table",
    "from_config",
]
