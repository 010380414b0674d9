# SPDX-License-Identifier: Apache-2.0
"""The goodput policy in worlds whose step times and accept lengths it does not know."""

import itertools
import math
import random

import pytest
from policy_sim import OFF, ON, Engine, World

from specfused.policy import Goodput, Settings

DEFAULT = Settings()
# Where drafting pays at 4 requests and not at 128.
STEEP = World(on=(8e-3, 0.5e-3, 0.0), off=(4.8e-3, 0.045e-3, 0.0), accept=3.2)


def check_dwell(trace, settings=DEFAULT):
    """The rule of switches as the module states it, from decisions and batch sizes alone."""
    switches = trace.switches
    for start, end in zip(switches, switches[1:], strict=False):
        first, last = trace.decisions[start], trace.decisions[end]
        sizes = [bs for bs, _ in trace.loads[start : end + 1]]
        jumped = max(sizes) >= 2 * min(sizes)
        steps = end - start
        assert steps >= settings.min_dwell, (first, last)
        if last.reason == "urgent":
            assert jumped, (first, last)
        elif first.reason == "probe":
            assert steps >= settings.probe_steps or jumped, (first, last)
        else:
            assert steps >= settings.dwell, (first, last)
        if last.reason == "probe":
            assert steps >= settings.dwell, (first, last)


def run(engine, steps, bs, context=1024):
    trace = engine.run(steps, bs, context)
    check_dwell(trace, engine.policy.settings)
    return trace


def calibrated(world, **errors):
    return Goodput(calibration=world.grid(**errors))


@pytest.fixture(params=["calibrated", "learning"])
def make(request):
    return calibrated if request.param == "calibrated" else lambda world: Goodput()


@pytest.mark.parametrize(
    ("accept", "bs", "mode"),
    [(1.2, 1, OFF), (3.5, 1, ON), (3.5, 64, ON), (1.2, 64, OFF), (2.5, 128, ON), (1.9, 128, OFF)],
)
def test_goes_to_the_better_mode(make, accept, bs, mode):
    """Times of an H200; the truth of this world says which mode is the better one."""
    world = World(on=(7.2e-3, 0.113e-3, 0.0), off=(4.8e-3, 0.0445e-3, 0.0), accept=accept)
    assert world.best(bs, 1024) is mode
    engine = Engine(make(world), world, seed=bs)
    run(engine, 300, bs)
    assert run(engine, 700, bs).share(mode) > 0.9


def test_growing_context_flips_it(make):
    """The verify step reads more per token of context here, so that long contexts do not pay."""
    world = World(on=(6e-3, 0, 1.2e-7), off=(5e-3, 0, 0.4e-7), accept=2.0)
    assert world.best(16, 1000) is ON and world.best(16, 32000) is OFF
    engine = Engine(make(world), world, seed=5)
    run(engine, 300, 16, 1000)
    assert run(engine, 200, 16, 1000).share(ON) > 0.9
    run(engine, 1000, 16, lambda step: 1000 + 31 * step)
    run(engine, 1000, 16, 32000)
    assert run(engine, 200, 16, 32000).share(OFF) > 0.9


def test_accept_length_falls_and_rises(make):
    """Falling is seen at once, rising by probes: within the steps that pay for the rarest."""
    world = World(accept=3.5)
    engine = Engine(make(world), world, seed=6)
    run(engine, 400, 4)
    for _ in range(2):
        assert run(engine, 200, 4).share(ON) > 0.9
        world.accept = 1.2
        run(engine, 80, 4)
        assert run(engine, 400, 4).share(OFF) > 0.9
        world.accept = 3.5
        lost = world.seconds(ON, 4, 1024) - 1.2 * world.seconds(OFF, 4, 1024)
        paid = DEFAULT.probe_steps * lost / world.seconds(OFF, 4, 1024) + 1
        stated = math.ceil(DEFAULT.probe_backoff * paid / DEFAULT.probe_budget)
        assert 1000 < stated < 1500
        assert 0 < steps_to(run(engine, 2000, 4), ON, 0) <= 1.1 * stated


def steps_to(trace, mode, begin):
    """Steps after `begin` until the mode is there to stay for a dwell."""
    for step in range(begin, len(trace.modes)):
        if set(trace.modes[step : step + DEFAULT.dwell]) == {mode}:
            return step - begin
    return math.inf


@pytest.mark.parametrize("hold", [48, 200])
def test_a_load_step_is_answered_in_the_stated_number_of_steps(hold):
    """Calibrated: min_dwell and the steps whose loss pays for a switch, one for rounding."""
    engine = Engine(calibrated(STEEP), STEEP, seed=7)
    run(engine, 300, 4)
    trace = run(engine, 6 * hold, lambda step: 128 if step // hold % 2 else 4)
    for number in range(1, 6):
        bs, mode = (128, OFF) if number % 2 else (4, ON)
        assert STEEP.best(bs, 1024) is mode
        staying = STEEP.seconds(mode.other, bs, 1024)
        loss = 1 - STEEP.goodput(mode.other, bs, 1024) / STEEP.goodput(mode, bs, 1024)
        price = STEEP.seconds(OFF, bs, 1024)
        stated = DEFAULT.min_dwell + math.ceil(price / (staying * loss)) + 1
        assert stated <= 10
        assert steps_to(trace, mode, number * hold) <= stated


def test_a_load_step_cuts_a_dwell_short():
    """A jump right after a switch waits for min_dwell, not for dwell."""
    policy = Goodput(Settings(probe_interval=10**6), STEEP.grid())
    engine = Engine(policy, STEEP, seed=8)
    run(engine, 300, 128)
    trace = run(engine, 40, lambda step: 128 if step < 10 or step >= 18 else 4)
    on = trace.modes.index(ON)
    off = trace.modes.index(OFF, on)
    assert 10 <= on < 18 <= off
    assert off - on < DEFAULT.dwell and off <= 18 + DEFAULT.min_dwell + 3
    assert trace.decisions[off].reason == "urgent"
    assert policy.counters()["reason_urgent"] == 1


def reasons_while(mode, policy, bs):
    """Reasons of the decisions for `mode` until the first for the other one."""
    decisions = iter(lambda: policy.decide(bs, 0.0), None)
    first = itertools.islice(decisions, 2000)
    return [d.reason for d in itertools.takewhile(lambda d: d.mode is mode, first)]


def test_without_a_jump_a_dwell_is_kept():
    """However large the loss: here half of the tokens per second."""
    points = [(ON, 8, 0, 0.010), (OFF, 8, 0, 0.005)]
    policy = Goodput(Settings(accept_prior=3.0, probe_interval=10**6), points)
    assert policy.decide(8, 0.0).mode is ON
    policy.observe_accept(ON, [1] * 8 * 64)
    reasons = reasons_while(ON, policy, 8)
    assert reasons == ["dwell"] * (DEFAULT.dwell - 1)


def test_load_step_while_learning():
    """Never calibrated: two dwells and a probe at a batch size seen for the first time."""
    engine = Engine(Goodput(), STEEP, seed=9)
    run(engine, 300, 4)
    trace = run(engine, 600, lambda step: 128 if 100 <= step < 350 else 4)
    assert steps_to(trace, OFF, 100) <= 2 * DEFAULT.dwell + DEFAULT.probe_most_steps
    assert steps_to(trace, ON, 350) <= 2 * DEFAULT.dwell + DEFAULT.probe_most_steps


def test_hovering_at_a_border_does_not_flap():
    engine = Engine(calibrated(STEEP), STEEP, seed=10)
    border = next(bs for bs in range(4, 128) if STEEP.best(bs, 1024) is OFF)
    run(engine, 200, border)
    rng = random.Random(1)
    trace = run(engine, 2000, lambda step: border + rng.randint(-3, 3))
    assert len(trace.switches) < 2000 / 60
    assert trace.shortfall() < 0.02


@pytest.mark.parametrize("errors", [(1.3, 1.0), (1.0, 1.3), (0.7, 1.0), (1.0, 0.7), (1.3, 0.7)])
def test_a_wrong_calibration_is_corrected(errors):
    """30 % off, in worlds where that is the difference between the modes."""
    for accept in (1.35, 1.9):
        world = World(accept=accept)
        policy = calibrated(world, error_on=errors[0], error_off=errors[1])
        engine = Engine(policy, world, seed=11)
        run(engine, 1000, 8)
        best = world.best(8, 1024)
        assert run(engine, 500, 8).share(best) > 0.9
        seconds = policy.compare(8, 1024.0).seconds[best]
        assert seconds == pytest.approx(world.seconds(best, 8, 1024), rel=0.03)


@pytest.mark.parametrize(
    "trouble",
    [{"delay": 8}, {"lost": 0.6}, {"outliers": 0.05}, {"delay": 4, "lost": 0.3, "outliers": 0.02}],
    ids=str,
)
def test_late_missing_and_outlying_observations(make, trouble):
    for accept, mode in ((3.0, ON), (1.2, OFF)):
        world = World(accept=accept, **trouble)
        engine = Engine(make(world), world, seed=12)
        run(engine, 500, 8)
        trace = run(engine, 500, 8)
        assert world.best(8, 1024) is mode and trace.share(mode) > 0.85
        assert trace.shortfall() < 0.03


def test_without_any_observation_it_stays():
    """Nothing measured: nothing to probe for, and nothing to decide by but the calibration."""
    learning = Goodput()
    assert {learning.decide(8, 100.0).mode for _ in range(1000)} == {ON}
    assert learning.counters()["reason_warmup"] == 1000
    policy = calibrated(World(accept=2.5))
    trace = [policy.decide(8, 100.0).mode for _ in range(2000)]
    assert trace.count(ON) > 0.95 * len(trace)  # 2.0 by prior


def test_stale_observations_of_the_other_mode_stay_there():
    policy = calibrated(World())
    for _ in range(20):
        assert policy.decide(8, 1024.0).mode is ON
    before = policy.compare(8, 1024.0)
    for _ in range(20):
        policy.observe_step(OFF, 8, 1024.0, 1.2 * before.seconds[OFF])
        policy.observe_accept(OFF, [1] * 8)
    after = policy.compare(8, 1024.0)
    assert after.seconds[ON] == before.seconds[ON]
    assert after.accept_len == before.accept_len
    assert after.seconds[OFF] == pytest.approx(1.2 * before.seconds[OFF], rel=0.02)


def test_the_first_step_after_a_switch_is_not_learned():
    """It has the catch-up in it."""
    policy = Goodput(calibration=[(ON, 1, 0, 0.01), (OFF, 1, 0, 0.009)])
    assert policy.decide(1, 0.0).mode is ON
    policy.observe_step(ON, 1, 0.0, 0.012)
    assert policy.compare(1, 0.0).seconds[ON] == 0.01
    policy.observe_step(ON, 1, 0.0, 0.012)
    assert policy.compare(1, 0.0).seconds[ON] > 0.0105


@pytest.mark.parametrize(("accept", "mode"), [(1.1, OFF), (3.5, ON)])
def test_probes_are_seldom_and_within_budget(accept, mode):
    world = World(on=(30e-3, 0, 0), off=(12e-3, 0, 0), accept=accept)
    policy = calibrated(world)
    engine = Engine(policy, world, seed=13)
    run(engine, 200, 8)
    before = policy.counters()["probes"]
    trace = run(engine, 8000, 8)
    probes = policy.counters()["probes"] - before
    assert 1 <= probes <= 8000 / DEFAULT.probe_interval
    assert trace.share(mode) > 0.98
    assert 0 < trace.shortfall() < DEFAULT.probe_budget


def test_probes_keep_their_interval_where_they_cost_nothing():
    settings = Settings(catchup_seconds=0.0, probe_interval=50, accept_prior=1.0)
    policy = Goodput(settings, [(ON, 4, 0, 0.005), (OFF, 4, 0, 0.005)])
    policy.observe_accept(ON, [1])
    reasons = [policy.decide(4, 0.0).reason for _ in range(1000)]
    probes = [n for n in range(1, 1000) if reasons[n - 1 : n + 1] == ["goodput", "probe"]]
    gaps = {after - before for before, after in itertools.pairwise(probes)}
    assert gaps == {DEFAULT.probe_most_steps + settings.probe_interval}


def test_the_first_probe_is_long_enough_and_later_ones_weigh_the_new_more():
    """64 accept lengths at first, paid by nobody; then what is old counts as 64."""
    settings = Settings(accept_prior=1.0, probe_backoff=1)
    policy = Goodput(settings, [(ON, 4, 0, 0.009), (OFF, 4, 0, 0.005)])
    assert reasons_while(OFF, policy, 4) == ["goodput"] * DEFAULT.dwell
    assert policy.counters()["probe_credit_seconds"] > 0
    for _ in range(250):
        policy.observe_accept(ON, [1] * 4)
    assert reasons_while(ON, policy, 4) == ["probe"] * 15
    reasons_while(OFF, policy, 4)
    assert policy.counters()["probes"] == 2
    policy.observe_accept(ON, [1, 1, 1, 2])
    assert policy.compare(4, 0.0).accept_len == pytest.approx(1 + 1 / (64 + 4))
    assert reasons_while(ON, policy, 4) == ["probe"] * (DEFAULT.probe_steps - 1)


def test_no_probe_without_a_budget():
    world = World(accept=1.1)
    settings = Settings(probe_budget=0.0)
    engine = Engine(Goodput(settings, world.grid()), world, seed=14)
    run(engine, 300, 8)  # what was never seen is probed outside of it
    assert set(run(engine, 2000, 8).modes) == {OFF}


@pytest.mark.parametrize("price", [(None, 0.0), (0.05, 0.0), (0.02, 2e-4)])
def test_drafting_resumes_when_staying_has_cost_the_catchup(price):
    """Steps worked out by hand, a ring of 32 tokens a request, nothing probed."""
    off, on, bs, lens = 0.005, 0.010, 8, 2.5
    settings = Settings(
        accept_prior=1.5,
        catchup_seconds=price[0],
        catchup_seconds_per_token=price[1],
        ring_tokens=32,
        probe_interval=10**6,
    )
    policy = Goodput(settings, [(ON, bs, 0, on), (OFF, bs, 0, off)])
    assert policy.decide(bs, 0.0).mode is OFF
    policy.observe_accept(ON, [2, 3] * 5000)  # late, of before
    assert policy.compare(bs, 0.0).accept_len == pytest.approx(lens, rel=1e-3)
    base = off if price[0] is None else price[0]
    lost_per_step = off * (1 - on / (lens * off))  # 1 ms
    steps = next(
        n
        for n in range(DEFAULT.dwell, 1000)
        if 0.999 * lost_per_step * n >= base + price[1] * bs * min(n, 32)
    )
    reasons = reasons_while(OFF, policy, bs)
    assert len(reasons) + 1 == pytest.approx(steps, abs=1)
    assert reasons[: DEFAULT.dwell - 1] == ["dwell"] * (DEFAULT.dwell - 1)
    assert set(reasons[DEFAULT.dwell - 1 :]) <= {"cost"}
    assert price == (None, 0.0) or len(reasons) > 40


def test_explain_names_the_numbers():
    policy = Goodput(Settings(accept_prior=2.5), [(ON, 4, 0, 0.010), (OFF, 4, 0, 0.005)])
    decision = policy.decide(4, 700.0)
    assert (decision.mode, decision.reason) == (ON, "goodput")
    for number in ("bs 4", "context 700", "2.50 tokens", "10 ms", "1000/s", "5 ms", "800/s"):
        assert number in decision.detail
    assert decision.detail in policy.explain()
    assert "accept length 2.50 over 0 requests" in policy.explain()
    assert "on x1.000 off x1.000" in policy.explain()
    counters = policy.counters()
    reasons = sum(value for key, value in counters.items() if key.startswith("reason_"))
    assert reasons == counters["steps"] == counters["steps_on"] + counters["steps_off"] == 1


def random_world(rng):
    base = rng.uniform(2e-3, 20e-3)
    per_row = base * rng.choice((0.002, 0.01, 0.03, 0.1))
    per_token = per_row * rng.choice((0, 1e-4, 5e-4))
    slower = rng.uniform(1.0, 2.2)
    return World(
        on=(base * slower, per_row * rng.uniform(1, 3), per_token * rng.uniform(1, 1.6)),
        off=(base, per_row, per_token),
        accept=rng.uniform(1.05, 3.8),
        noise=rng.choice((0.01, 0.03, 0.08)),
        delay=rng.choice((0, 1, 2, 3)),
        lost=rng.choice((0.0, 0.0, 0.3)),
        outliers=rng.choice((0.0, 0.0, 0.02)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_never_two_percent_below_the_better_fixed_mode(make, seed):
    """After 800 steps, over 1200 more, catch-ups and probes included; calibrations are wrong."""
    rng = random.Random(seed)
    world = random_world(rng)
    bs, context = rng.choice((1, 2, 4, 16, 64, 128)), rng.choice((200, 2000, 20000))
    errors = {"error_on": rng.uniform(0.75, 1.35), "error_off": rng.uniform(0.75, 1.35)}
    policy = calibrated(world, **errors) if make is calibrated else Goodput()
    engine = Engine(policy, world, seed)
    run(engine, 800, bs, context)
    trace = run(engine, 1200, bs, context)
    assert trace.shortfall() < 0.02
