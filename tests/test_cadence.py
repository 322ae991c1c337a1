"""How often gradients are measured: as seldom as the gain allows."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.cadence import (
    MOST,
    Cadence,
    gain_influence,
    measuring_interval,
    standard_error,
)
from elastane.controller import StepController
from elastane.errors import ArgumentError, StateError
from elastane.measuring import Measuring
from elastane.momentum import MomentumRamp
from elastane.noise import Moments, gain
from elastane.scaling import AdaScale

AVERAGE = Moments(variance=40.0, sqr_norm=0.3)
POSITIVE = st.floats(0.01, 100)


@given(POSITIVE, POSITIVE, st.floats(1.01, 200), st.floats(-1, 1), st.floats(-1, 1))
def test_the_influence_is_the_gains_own_slope(variance, sqr_norm, scale, by_noise, by_signal):
    average = Moments(variance=variance, sqr_norm=sqr_norm)
    small = 1e-6
    sample = Moments(
        variance=variance * (1 + small * by_noise), sqr_norm=sqr_norm * (1 + small * by_signal)
    )
    before, after = (gain(one, scale=scale, base_batch_size=8) for one in (average, sample))
    found = gain_influence(sample, average, scale=scale, base_batch_size=8)
    assert found == pytest.approx(math.log(after / before), rel=1e-3, abs=1e-10)


@pytest.mark.parametrize(
    "average", [Moments(variance=0.0, sqr_norm=1.0), Moments(variance=1.0, sqr_norm=-0.1)]
)
def test_a_gain_at_its_limit_moves_nowhere(average):
    assert gain_influence(AVERAGE, average, scale=16, base_batch_size=8) == 0


def averaged_error(*, smoothing, every, scatter, seed=0):
    """Return the standard deviation over time of such an average of white noise."""
    source = random.Random(seed)
    kept = smoothing**every
    average, seen = 0.0, []
    for step in range(60_000):
        average = kept * average + (1 - kept) * source.gauss(0, scatter)
        if step > 3_000:
            seen.append(average)
    return statistics.pstdev(seen)


@pytest.mark.parametrize(("smoothing", "every"), [(0.9, 1), (0.984, 4), (0.996, 16)])
def test_the_standard_error_is_that_of_an_average_of_independent_samples(smoothing, every):
    wanted = averaged_error(smoothing=smoothing, every=every, scatter=0.5)
    found = standard_error(0.5, smoothing=smoothing, every=every)
    assert found == pytest.approx(wanted, rel=0.05)


@given(st.floats(0, 10), st.floats(0.5, 0.9999), st.floats(1e-4, 0.5))
def test_the_interval_is_the_longest_that_keeps_the_bound(influence, smoothing, error):
    interval = measuring_interval(influence, smoothing=smoothing, error=error)
    assert 1 <= interval <= MOST
    if interval > 1:
        assert standard_error(influence, smoothing=smoothing, every=interval) <= error
    if interval < MOST:
        longer = standard_error(influence, smoothing=smoothing, every=interval + 1)
        assert longer > error


def controller(**options):
    return StepController(
        AdaScale(),
        base_batch_size=8,
        num_steps=1e9,
        compensation=MomentumRamp(),
        measuring=Measuring(**options),
    )


def noisy(source, *, scatter):
    return [
        Moments(
            variance=AVERAGE.variance * (1 + scatter * source.gauss(0, 1)),
            sqr_norm=AVERAGE.sqr_norm * (1 + 2 * scatter * source.gauss(0, 1)),
        )
    ]


def train(one, steps, *, scatter, source, batch=128):
    """Return which steps were measured, and the gains."""
    measured, gains = [], []
    for _ in range(steps):
        measured.append(one.wants_measurement(batch))
        samples = noisy(source, scatter=scatter) if measured[-1] else None
        decision = one.decide(samples, batch_samples=batch, nominal_samples=batch, momentum=0.9)
        gains.append(decision.gain)
        one.commit(decision)
    return measured, gains


@pytest.mark.parametrize(("scatter", "share"), [(0.05, 0.2), (0.1, 0.5)])
def test_the_gain_stays_as_sure_as_was_asked_for_with_few_measurements(scatter, share):
    one = controller(every="auto", error=0.02)
    measured, gains = train(one, 20_000, scatter=scatter, source=random.Random(3))
    wanted = gain(AVERAGE, scale=16, base_batch_size=8)
    later = [value / wanted - 1 for value in gains[500:]]
    assert statistics.pstdev(later) < 0.02 * 1.15
    assert statistics.fmean(later) == pytest.approx(0, abs=0.01)
    assert sum(measured) < share * len(measured)


def test_the_first_ten_steps_at_each_scale_are_measured():
    one, source = controller(every="auto"), random.Random(1)
    measured, _ = train(one, 60, scatter=0.01, source=source)
    assert all(measured[:10])
    assert sum(measured[10:]) <= 50 / MOST + 1
    measured, _ = train(one, 60, scatter=0.01, source=source, batch=256)
    assert all(measured[:10])
    assert sum(measured[10:]) <= 50 / MOST + 1


def test_a_short_batch_at_an_epochs_end_leaves_the_cadence_as_it_is():
    one, source = controller(every="auto"), random.Random(1)
    train(one, 11, scatter=0.01, source=source)
    assert not one.wants_measurement(128)
    one.commit(
        one.decide(noisy(source, scatter=0.01), batch_samples=24, nominal_samples=128, momentum=0.9)
    )
    measured, _ = train(one, MOST, scatter=0.01, source=source)
    assert measured == [False] * (MOST - 1) + [True]


def test_gradients_without_noise_are_measured_every_16th_step():
    measured, _ = train(controller(every="auto"), 100, scatter=0.0, source=random.Random(0))
    places = [step for step, is_measured in enumerate(measured) if is_measured]
    assert places == [*range(10), *range(9 + MOST, 100, MOST)]


def test_noise_that_is_too_much_for_the_bound_is_measured_in_every_step():
    measured, _ = train(
        controller(every="auto", error=1e-4), 100, scatter=0.3, source=random.Random(0)
    )
    assert all(measured)


def test_a_step_that_can_not_be_measured_leaves_the_next_one_due():
    one = controller(every=4)
    train(one, 1, scatter=0.1, source=random.Random(0))
    for _ in range(8):
        one.commit(one.decide(None, batch_samples=8, nominal_samples=8, momentum=0.9))
    assert one.wants_measurement(8)


@pytest.mark.parametrize("every", [1, 3])
def test_the_averages_forget_as_much_a_step_however_seldom_they_are_fed(every):
    one = controller(every=every, smoothing=0.9)
    before, after = Moments(variance=1.0, sqr_norm=1.0), Moments(variance=2.0, sqr_norm=1.0)
    for step in range(300 + 12 + 1):
        samples = [before if step < 300 else after] if one.wants_measurement(8) else None
        decision = one.decide(samples, batch_samples=8, nominal_samples=8, momentum=0.9)
        one.commit(decision)
    (average,) = one.state_dict()["averages"]
    found = average["variance"] / average["weight"]
    assert found == pytest.approx(2 - 0.9 ** (13 if every == 1 else 15), rel=1e-6)


def test_a_run_goes_on_with_the_same_cadence_after_it_was_saved():
    one, other = controller(every="auto"), controller(every="auto")
    train(one, 37, scatter=0.1, source=random.Random(5))
    other.load_state_dict(one.state_dict())
    again = [train(it, 50, scatter=0.1, source=random.Random(6)) for it in (one, other)]
    assert again[0] == again[1]


def test_a_state_with_other_fields_is_refused():
    state = Cadence().state_dict()
    assert Cadence.from_state_dict(state) == Cadence()
    with pytest.raises(StateError, match="cadence"):
        Cadence.from_state_dict(state | {"age": 3})
    assert replace(Cadence(), since=3, interval=2).is_due(1)


@pytest.mark.parametrize("options", [{"every": "often"}, {"every": 0}, {"error": 0.0}])
def test_another_cadence_is_refused_with_the_way_out(options):
    (name,) = options
    with pytest.raises(ArgumentError, match=name):
        Measuring(**options)
