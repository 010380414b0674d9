# SPDX-License-Identifier: Apache-2.0
"""Policies without a world: configuration, fixed policies, step times, accept length, digest."""

import json
import math
import random

import pytest

from specfused.policy import Decision, Forced, Goodput, Mode, Policy, Schedule, Table, from_config
from specfused.policy.accept import AcceptLength
from specfused.policy.times import CLIPPED_IN_A_ROW, StepTimes, Surface

ON, OFF = Mode.ON, Mode.OFF


def modes(policy, batch_sizes):
    return [policy.decide(bs, 1000.0).mode.value for bs in batch_sizes]


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (None, Goodput),
        ("auto", Goodput),
        (" on ", Forced),
        ("off", Forced),
        ("table:1=on,32=off", Table),
        ("threshold:32", Table),
        ("schedule:10", Schedule),
        ({"policy": "on"}, Forced),
        ('{"dwell": 8, "margin": 0}', Goodput),
        ({"policy": "table", "table": {"1": "off"}, "dwell": 3}, Table),
        ({"policy": "threshold", "batch_size": 3, "dwell": 3}, Table),
        ({"policy": "schedule", "pattern": "01"}, Schedule),
    ],
)
def test_config_kinds(config, kind):
    policy = from_config(config)
    assert type(policy) is kind
    assert isinstance(policy, Policy)
    assert policy.uses_times == (kind is Goodput)
    assert isinstance(policy.decide(1, 10.0), Decision)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fast", "configuration must be auto, on, off, .* got 'fast'"),
        ("", "configuration must be auto, .* got ''"),
        ("on:3", "configuration must be auto, .* got 'on:3'"),
        (7, "configuration must be auto, .* got 7"),
        ("{", "configuration must be valid JSON"),
        ({"policy": "fast"}, "policy must be one of .*'threshold'.* got 'fast'"),
        ({"policy": []}, r"policy must be one of .* got \[\]"),
        ({"policy": "auto", "dwel": 3}, "a parameter must be one of .*'dwell'.* got 'dwel'"),
        ({"policy": "on", "dwell": 3}, r"a parameter must be one of \['policy'\], got 'dwell'"),
        ("threshold:0", "threshold must be an integer >= 1, got '0'"),
        ("threshold:", "threshold must be an integer >= 1, got ''"),
        ("threshold:many", "threshold must be an integer >= 1, got 'many'"),
        ({"policy": "threshold"}, "threshold must be an integer >= 1, got None"),
        ({"policy": "threshold", "batch_size": True}, "threshold must .* got True"),
        ("table:", "a batch size of the table must be an integer >= 1, got ''"),
        ("table:1=on,2", "table entry 2 must be on or off, got ''"),
        ("table:1=yes", "table entry 1 must be on or off, got 'yes'"),
        ("table:1=on,01=off", "table must name each batch size once"),
        ("table:-1=on", "a batch size of the table must be an integer >= 1, got '-1'"),
        ({"policy": "table"}, "table must map batch sizes"),
        ({"policy": "table", "table": {}}, "table must have an entry"),
        ({"policy": "table", "table": {"1": "on"}, "dwell": 0}, "dwell must .* got 0"),
        ("schedule:", "schedule must be a string of 0 and 1"),
        ("schedule:1x", "schedule must be a string of 0 and 1.* got '1x'"),
        ({"policy": "schedule"}, "schedule must .* got None"),
        ({"dwell": 0}, "dwell must be an integer >= 1, got 0"),
        ({"dwell": 2.5}, "dwell must be an integer >= 1, got 2.5"),
        ({"dwell": 3}, "dwell must be >= min_dwell 4, got 3"),
        ({"probe_most_steps": 5}, "probe_most_steps must be >= probe_steps 6, got 5"),
        ({"margin": -0.1}, "margin must be a number >= 0, got -0.1"),
        ({"margin": math.nan}, "margin must be a number >= 0, got nan"),
        ({"accept_prior": 0.5}, "accept_prior must be from 1 to 64, got 0.5"),
        ({"catchup_seconds": "x"}, "catchup_seconds must be a number >= 0, got 'x'"),
        ({"calibration": "x"}, "calibration must be a list of points, got 'x'"),
        ({"calibration": []}, "calibration must have a point of mode on"),
        ({"calibration": [["on", 1, 10, 0.1]]}, "calibration must have a point of mode off"),
        ({"calibration": [["on", 1, 10]]}, "a calibration point must be .mode, batch_size"),
        ({"calibration": [["up", 1, 10, 0.1]]}, "mode of a calibration point must be on or off"),
        ({"calibration": [["on", 0, 10, 0.1]]}, "batch_size of a point must .* got 0"),
        ({"calibration": [["on", 1, -1, 0.1]]}, "context of a point must .* got -1"),
        (
            {"calibration": [["on", 1, 1, 0.0]]},
            "seconds of a point must be from 1e-06 to 3600, got 0.0",
        ),
        ({"calibration": [["on", 1, 1, 0.1]] * 2}, "a calibration point must be given once"),
    ],
)
def test_config_errors(config, message):
    with pytest.raises(ValueError, match=f"^policy: {message}"):
        from_config(config)
    if isinstance(config, dict):
        with pytest.raises(ValueError, match=f"^policy: {message}"):
            from_config(json.dumps(config))


def test_json_parameters_arrive():
    points = [["on", 1, 100, 0.02], ["off", 1, 100, 0.01]]
    policy = from_config(json.dumps({"dwell": 9, "accept_prior": 3, "calibration": points}))
    assert policy.settings.dwell == 9
    now = policy.compare(1, 100.0)
    assert now.seconds == {ON: 0.02, OFF: 0.01}
    assert now.goodput == {ON: pytest.approx(150), OFF: pytest.approx(100)}


# -- policies without measurement -----------------------------------------------------------------


def test_forced():
    for mode in Mode:
        policy = from_config(mode.value)
        decision = policy.decide(5, 1.0)
        assert (decision.mode, decision.reason) == (mode, "forced")
        assert modes(policy, [1, 200, 3]) == [mode.value] * 3
        assert policy.counters()["switches"] == 0


def test_schedule_repeats():
    policy = from_config("schedule:100")
    assert modes(policy, [1] * 7) == ["on", "off", "off", "on", "off", "off", "on"]
    assert policy.counters()["switches"] == 4


def test_table_takes_the_entry_at_or_below():
    policy = Table({30: OFF, 4: ON, 100: ON}, dwell=1)
    sizes = [1, 4, 29, 30, 99, 100, 5000]
    assert modes(policy, sizes) == ["on", "on", "on", "off", "off", "on", "on"]


def test_threshold_is_included():
    assert modes(from_config("threshold:32"), [32]) == ["on"]
    assert modes(from_config("threshold:32"), [33]) == ["off"]


def test_table_dwells():
    policy = Table({1: ON, 33: OFF}, dwell=4)
    assert modes(policy, [32, 33, 33, 33]) == ["on"] * 4
    assert policy.counters()["reason_dwell"] == 3
    assert modes(policy, [33, 32, 32, 32, 32, 32]) == ["off"] * 4 + ["on"] * 2
    assert policy.counters()["switches"] == 2


def test_idle_batch_changes_nothing():
    policy = from_config("schedule:10")
    assert modes(policy, [1, 0, 1, 0, 1]) == ["on", "on", "off", "off", "on"]
    assert policy.counters()["steps"] == 3
    assert policy.decide(0, math.nan).reason == "idle"


def test_counters_and_explain():
    policy = from_config("table:1=on,8=off")
    assert policy.explain() == "table: no decision yet"
    policy.decide(3, 10.0)
    policy.observe_accept(ON, [2, 4])
    policy.observe_accept(OFF, [1])
    policy.observe_step(ON, 2, 10.0, 0.25)
    counters = policy.counters()
    assert (counters["tokens_on"], counters["requests_on"], counters["tokens_off"]) == (6, 2, 1)
    assert (counters["seconds_on"], counters["steps_on"], counters["reason_table"]) == (0.25, 1, 1)
    assert list(counters) == sorted(counters)
    assert "batch size 3" in policy.explain() and "1=on" in policy.explain()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-300, 1e6, math.nan, math.inf])
def test_bad_step_times_are_counted_and_ignored(seconds):
    policy = Goodput(calibration=[(ON, 1, 10, 0.02), (OFF, 1, 10, 0.01)])
    policy.decide(1, 10.0)
    before = policy.state_digest()
    policy.observe_step(ON, 1, 10.0, seconds)
    policy.observe_step(ON, 0, 10.0, 0.02)
    policy.observe_step(ON, 1, math.nan, 0.02)
    policy.observe_accept(ON, [])
    policy.observe_accept(ON, [2, 0])
    assert policy.counters()["bad_observations"] == 4
    assert policy.state_digest() == before


@pytest.mark.parametrize("learning", [True, False])
def test_no_input_breaks_it(learning):
    """Nonsense of every size: a mode comes out, and all numbers stay finite."""
    rng = random.Random(learning)
    points = [(mode, bs, c, 1e-5) for mode in Mode for bs in (1, 1 << 40) for c in (0, 1e9)]
    policy = Goodput(calibration=None if learning else points)
    sizes = (-1, 0, 1, 3, 1 << 20, 1 << 60)
    numbers = (-1.0, 0.0, 1e-6, 0.01, 3600.0, 1e300, math.nan, math.inf, -math.inf)
    for _ in range(3000):
        assert policy.decide(rng.choice(sizes), rng.choice(numbers)).mode in Mode
        mode, size = rng.choice(list(Mode)), rng.choice(sizes)
        policy.observe_step(mode, size, rng.choice(numbers), rng.choice(numbers))
        policy.observe_accept(mode, [rng.choice((0, 1, 2, 64))] * rng.choice((0, 1, 9)))
    now = policy.compare(4, 100.0)
    assert all(0 < value < math.inf for value in (*now.seconds.values(), *now.goodput.values()))
    assert math.isfinite(policy.counters()["probe_credit_seconds"])


# -- step times -----------------------------------------------------------------------------------


def test_surface_is_exact_for_a_bilinear_truth():
    def truth(bs, context):
        return 0.004 + 1e-4 * bs + 2e-9 * bs * context

    grid = [(bs, c, truth(bs, c)) for bs in (1, 8, 64) for c in (128, 1024, 4096)]
    surface = Surface(grid)
    for bs in (1, 3, 8, 30, 64, 100):
        for context in (128, 700, 4096, 50000):
            assert surface.at(bs, context) == pytest.approx(truth(bs, context), rel=1e-9)
    assert surface.at(1, 0.0) == surface.at(1, 128.0)  # clamped below


def test_surface_of_a_ragged_grid_scales_the_context_slope():
    surface = Surface([(8, 1000, 0.010), (8, 2000, 0.012), (64, 1000, 0.020)])
    slope = 0.002 / 1000
    assert surface.at(64, 3000.0) == pytest.approx(0.020 + 2000 * slope * 8)
    assert surface.at(8, 3000.0) == pytest.approx(0.014)
    assert surface.at(4, 1000.0) == 0.010
    assert surface.at(64, 0.0) == pytest.approx(0.010)  # no less than one half


def test_surface_never_extrapolates_downwards():
    surface = Surface([(1, 100, 0.02), (1, 200, 0.01), (2, 100, 0.01)])
    assert surface.at(1, 9999.0) == 0.01
    assert surface.at(9, 100.0) == 0.01
    assert surface.at(1, 150.0) == pytest.approx(0.015)
    assert Surface([(4, 100, 0.03)]).at(900, 9999.0) == 0.03


def calibrated_times():
    times = StepTimes()
    times.calibrate([(mode, bs, 0, 0.01) for mode in Mode for bs in (1, 128)])
    return times


@pytest.mark.parametrize("error", [0.7, 1.3, 2.5])
def test_correction_reaches_its_region_and_informs_neighbours(error):
    times = calibrated_times()
    for _ in range(80):
        times.observe(ON, 16, 100.0, 0.01 * error)
    assert times.seconds(ON, 16, 100.0) == pytest.approx(0.01 * error, rel=0.01)
    assert times.seconds(ON, 100, 100.0) == times.seconds(ON, 16, 100.0)
    assert times.seconds(OFF, 16, 100.0) == 0.01
    for _ in range(60):
        times.observe(ON, 1, 100.0, 0.01)
    assert times.seconds(ON, 16, 100.0) == pytest.approx(0.01 * error, rel=0.01)
    between = times.seconds(ON, 4, 100.0)  # halfway in octaves
    assert between == pytest.approx(0.01 * (1 + error) / 2, rel=0.01)


def test_outliers_move_little_and_a_new_level_is_learned():
    times = calibrated_times()
    for step in range(200):
        times.observe(ON, 8, 100.0, 0.2 if step % 20 == 7 else 0.01)
    assert times.seconds(ON, 8, 100.0) == pytest.approx(0.01, rel=0.03)
    for step in range(CLIPPED_IN_A_ROW):
        times.observe(ON, 8, 100.0, 0.6 if step == 3 else 0.03)
    assert times.seconds(ON, 8, 100.0) == pytest.approx(0.03, rel=0.01)


def test_first_step_of_a_server_is_forgotten():
    times = StepTimes()
    times.observe(ON, 8, 100.0, 9.0)
    assert not times.known(ON)
    for _ in range(2):
        times.observe(ON, 8, 100.0, 0.01)
    assert times.known(ON, 8) and times.known(ON) and not times.known(ON, 16)
    assert not times.known(OFF)
    assert times.seconds(ON, 8, 100.0) == pytest.approx(0.01)


# -- accept length --------------------------------------------------------------------------------


def accept_lens(rng, mean, count):
    """Lengths 1 to 4 of that mean, as far apart as can be."""
    return [4 if rng.random() < (mean - 1) / 3 else 1 for _ in range(count)]


@pytest.mark.parametrize("bs", [1, 4, 64])
def test_accept_length_follows_a_change_and_is_steady_without(bs):
    rng = random.Random(bs)
    accept = AcceptLength(2.0)
    for mean in (3.4, 1.2, 2.6):
        for _ in range(400 // bs + 8):
            accept.add(accept_lens(rng, mean, bs))
        assert accept.mean == pytest.approx(mean, rel=0.15)
        last = []
        for _ in range(1500 // bs):
            accept.add(accept_lens(rng, mean, bs))
            last.append(accept.mean)
        del last[: len(last) // 2]
        assert sum(last) / len(last) == pytest.approx(mean, rel=0.06)


def test_requests_that_are_alike_count_as_one():
    """Simulated acceptance draws one length a step for all: 128 times the same is no certainty."""
    rng, accept, seen = random.Random(7), AcceptLength(2.0), []
    for _ in range(1000):
        accept.add([rng.choice([2, 3])] * 128)
        seen.append(accept.mean)
    assert min(seen[100:]) > 2.2 and max(seen[100:]) < 2.8
    for _ in range(16):
        accept.add([1] * 128)
    assert accept.mean < 1.3


def test_old_accept_lengths_count_for_less_after_a_pause():
    def after(pause):
        accept = AcceptLength(2.0)
        for _ in range(1000):
            accept.add([1, 1, 1, 1, 2])  # 1.2
        if pause:
            accept.age()
        for _ in range(4):
            accept.add([1, 1, 2, 2])
        return accept.mean

    assert after(pause=False) == pytest.approx(1.2 + 0.3 * 16 / (512 + 16), rel=0.01)
    assert after(pause=True) == pytest.approx(1.2 + 0.3 * 16 / (64 + 16), rel=0.01)


# -- the same on every rank -----------------------------------------------------------------------


def script(seed):
    """Calls as an engine makes them."""
    rng = random.Random(seed)
    for _ in range(300):
        bs = rng.choice((1, 4, 5, 90))
        yield "decide", (bs, rng.uniform(10, 9000))
        if rng.random() < 0.9:
            mode = rng.choice(list(Mode))
            yield "observe_step", (mode, bs, 50.0, rng.uniform(0.004, 0.02))
            yield "observe_accept", (ON, [rng.randint(1, 4) for _ in range(bs)])


@pytest.mark.parametrize("config", ["auto", "on", "threshold:4", "schedule:110"])
def test_same_calls_same_decisions_and_digest(config):
    ranks = [from_config(config), from_config(config)]
    digests = set()
    for method, arguments in script(3):
        first, second = (getattr(rank, method)(*arguments) for rank in ranks)
        assert first == second
        if method == "decide":
            digests.add(ranks[0].state_digest())
            assert ranks[1].state_digest() == ranks[0].state_digest()
    assert len(digests) == 300
    assert ranks[0].counters() == ranks[1].counters()


def test_digest_does_not_depend_on_the_order_of_points():
    points = [(mode, bs, 0, 0.01 * bs) for mode in Mode for bs in (1, 8, 64)]
    assert Goodput(calibration=points).state_digest() == (
        Goodput(calibration=points[::-1]).state_digest()
    )


@pytest.mark.parametrize(
    "divergence",
    [
        lambda rank: rank.observe_step(ON, 4, 50.0, 0.0100000001),
        lambda rank: rank.observe_accept(ON, [2]),
        lambda rank: rank.decide(4, 50.0),
        lambda rank: rank.calibrate([(ON, 1, 0, 0.01), (OFF, 1, 0, 0.01)]),
    ],
)
def test_digest_names_a_divergence(divergence):
    ranks = [Goodput(), Goodput()]
    for rank in ranks:
        for method, arguments in script(4):
            getattr(rank, method)(*arguments)
    before = ranks[0].state_digest()
    assert len(before) == 16 and ranks[1].state_digest() == before
    divergence(ranks[1])
    assert ranks[1].state_digest() != before
    assert from_config({"dwell": 17}).state_digest() != Goodput().state_digest()


def test_digest_covers_every_number_of_the_state():
    policy = Goodput()
    for method, arguments in script(5):
        getattr(policy, method)(*arguments)
    before, numbers = policy.state_digest(), 0
    for part in (policy, policy._accept):
        for field, value in list(vars(part).items()):
            if isinstance(value, (int, float)):
                setattr(part, field, value + 1)
                assert policy.state_digest() != before, field
                setattr(part, field, value)
                numbers += 1
    assert numbers > 12 and policy.state_digest() == before
