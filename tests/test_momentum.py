"""Momentum compensation: equation 6, chains of changes, and the noise that the model predicts."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.errors import ArgumentError
from elastane.momentum import (
    MomentumRamp,
    NoiseMatchedRamp,
    RampState,
    compensated_factor,
    eight_per_ratio,
    kept_velocity,
    noise_matched_factor,
    one_time_constant,
    outlasting_length,
    ramp_position,
)

always = partial(settings, derandomize=True, deadline=None, database=None)

MOMENTUM = 0.9
ratios = st.floats(1 / 64, 64)


def factors(compensation, batches, *, momentum=MOMENTUM, base=16, targets=None, state=None):
    """What is applied step by step under the linear rule, starting settled at the base batch."""
    if state is None:
        state = compensation(RampState(), target=1.0, batch_samples=base, momentum=momentum)
    applied = []
    for step, batch in enumerate(batches):
        target = batch / base if targets is None else targets[step]
        state = compensation(state, target=target, batch_samples=batch, momentum=momentum)
        applied.append(state.applied)
    return applied


def buffer_variances(batches, *, momentum=MOMENTUM, base=16):
    """Variance of the momentum buffer step by step, in units of that of the base batch."""
    variance, variances = 1.0, []
    for batch in batches:
        variance = momentum**2 * variance + (1 - momentum**2) * base / batch
        variances.append(variance)
    return variances


# Equation 6


@always(max_examples=200)
@given(ratio=ratios, length=st.floats(1, 1000))
def test_gamma_runs_from_one_to_the_ratio_and_never_turns(ratio, length):
    def gamma(steps):
        return compensated_factor(1.0, ratio, position=ramp_position(steps, length=length))

    path = [gamma(steps) for steps in range(math.ceil(length) + 3)]
    assert path[0] == 1.0
    assert gamma(length) == path[-1] == ratio
    assert path == sorted(path, reverse=ratio < 1)
    assert gamma(length / 4) == pytest.approx(1 + (ratio - 1) / 4)


def test_gamma_is_one_for_a_ratio_of_one():
    for steps in range(20):
        assert compensated_factor(1.0, 1.0, position=ramp_position(steps, length=8)) == 1.0


def test_a_ramp_shorter_than_one_step_is_none():
    for length in (-1, 0, 0.5, 0.999):
        assert ramp_position(0, length=length) == 1.0
    assert ramp_position(0, length=1) == 0.0


@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_the_default_ramp_is_equation_six_with_eight_per_ratio(ratio):
    found = factors(MomentumRamp(), [16 * ratio] * (8 * ratio + 5))
    expected = [1 + min(t / (8 * ratio), 1) * (ratio - 1) for t in range(8 * ratio + 5)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] == 1.0
    assert found[8 * ratio - 1] < ratio
    assert found[8 * ratio :] == [ratio] * 5


def test_the_slope_of_the_default_ramp_is_an_eighth_for_large_ratios():
    found = factors(MomentumRamp(), [16 * 64] * 100)
    assert np.diff(found) == pytest.approx(63 / 64 / 8)


def test_a_steady_batch_never_starts_a_ramp():
    for compensation in (MomentumRamp(), NoiseMatchedRamp()):
        assert factors(compensation, [16] * 50) == [1.0] * 50


def test_the_first_step_applies_the_rule_whatever_the_batch():
    for compensation in (MomentumRamp(), NoiseMatchedRamp()):
        state = compensation(RampState(), target=7.5, batch_samples=480, momentum=0.9)
        assert state.applied == 7.5
        again = compensation(state, target=7.5, batch_samples=480, momentum=0.9)
        assert again.applied == 7.5


def test_a_settled_ramp_follows_a_rule_that_moves():
    targets = [1.0, 3.0, 0.5, 2.0, 2.5]
    for compensation in (MomentumRamp(), NoiseMatchedRamp()):
        assert factors(compensation, [16] * 5, targets=targets) == targets


def test_a_ramp_in_progress_follows_a_rule_that_moves():
    targets = [2.0, 3.0, 2.0, 5.0, 3.0, 1.5]
    found = factors(MomentumRamp(length=4), [32] * 6, targets=targets)
    assert found == [1.0, 1.5, 1.5, 4.0, 3.0, 1.5]


def test_a_ramp_that_ended_does_not_come_back():
    state = MomentumRamp(length=2)(
        RampState(batch_samples=16, applied=1.0), target=2.0, batch_samples=32, momentum=0.9
    )
    assert (state.applied, state.length) == (1.0, 2.0)
    found = factors(MomentumRamp(length=2), [32] * 6, targets=[2, 2, 5, 5, 9, 1], state=state)
    assert found == [1.5, 2, 5, 5, 9, 1]
    for _ in range(2):
        state = MomentumRamp(length=2)(state, target=2.0, batch_samples=32, momentum=0.9)
    assert (state.applied, state.length) == (2.0, 0.0)


# Chains of changes


def test_a_change_in_the_middle_of_a_ramp_starts_where_the_ramp_is():
    ramp = MomentumRamp(length=4)
    found = factors(ramp, [32] * 3 + [64] * 6)
    assert found == [1.0, 1.25, 1.5, 1.5, 2.125, 2.75, 3.375, 4.0, 4.0]


def test_a_chained_change_takes_its_length_from_the_batches_or_from_what_is_still_to_go():
    asked = []

    def length(ratio, momentum):
        asked.append((ratio, momentum))
        return 3

    factors(MomentumRamp(length=length, shrink="ramp"), [32, 32, 96, 96, 96, 96, 24])
    # At the second change the ramp stands at 4/3 of 2 and goes to 6: 4.5 times, not 3.
    assert asked == [(2.0, 0.9), (pytest.approx(4.5), 0.9), (0.25, 0.9)]


def test_a_step_back_in_the_middle_of_growth_does_not_make_the_rest_of_the_way_steep():
    # 16 -> 256, and two steps later -> 128: the way from 1.1 to 8 still takes 8 * 8 / 1.1 steps.
    found = factors(MomentumRamp(), [256, 256] + [128] * 200)
    assert max(b / a for a, b in itertools.pairwise(found)) < 1.12
    assert found[-1] == 8.0


def test_a_shrink_drops_at_once_by_default_and_ramps_on_request():
    batches = [64] * 40 + [16] * 6
    assert factors(MomentumRamp(), batches)[39:] == [4.0] + [1.0] * 6
    ramped = factors(MomentumRamp(length=3, shrink="ramp"), batches)[39:]
    assert ramped == pytest.approx([4.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0])


def test_a_shrink_in_the_middle_of_growth_drops_if_the_rule_asks_for_less():
    found = factors(MomentumRamp(length=4), [64] * 4 + [16] * 2)
    assert found == [1.0, 1.75, 2.5, 3.25, 1.0, 1.0]


def test_a_shrink_to_where_the_rule_asks_for_more_goes_on_upwards():
    found = factors(MomentumRamp(length=4), [128, 128, 64, 64, 64, 64, 64])
    assert found[:2] == [1.0, 2.75]
    assert found[2:] == pytest.approx([2.75, 3.0625, 3.375, 3.6875, 4.0])


@pytest.mark.parametrize(
    "compensation",
    [MomentumRamp(), MomentumRamp(length=8, shrink="ramp"), NoiseMatchedRamp()],
    ids=repr,
)
def test_the_factor_returns_to_the_bit_after_twenty_changes(compensation):
    rng = np.random.default_rng(4)
    batches = [int(b) for b in rng.integers(1, 500, size=20).repeat(7)]
    state = compensation(RampState(), target=0.1, batch_samples=16, momentum=0.9)
    for batch in batches:
        state = compensation(state, target=0.1 * batch / 16, batch_samples=batch, momentum=0.9)
    for _ in range(400):
        state = compensation(state, target=0.1, batch_samples=16, momentum=0.9)
    assert state.applied == 0.1


# BC-39
@pytest.mark.parametrize("stop", range(1, 30, 4))
@pytest.mark.parametrize(
    "compensation",
    [MomentumRamp(), MomentumRamp(length=5, shrink="ramp"), NoiseMatchedRamp()],
    ids=repr,
)
def test_saving_in_the_middle_of_a_ramp_changes_nothing(compensation, stop):
    batches = [32] * 9 + [96] * 12 + [48] * 12
    straight = compensation(RampState(), target=1.0, batch_samples=16, momentum=0.9)
    states = []
    for batch in batches:
        straight = compensation(straight, target=batch / 16, batch_samples=batch, momentum=MOMENTUM)
        states.append(straight)
    saved = asdict(states[stop])
    assert all(type(value) in (int, float) for value in saved.values())
    rest = factors(compensation, batches[stop + 1 :], state=RampState(**saved))
    assert rest == [state.applied for state in states[stop + 1 :]]


@pytest.mark.parametrize("compensation", [MomentumRamp(), NoiseMatchedRamp()], ids=repr)
def test_a_call_leaves_the_state_it_was_given_alone(compensation):
    state = compensation(RampState(), target=1.0, batch_samples=16, momentum=0.9)
    before = asdict(state)
    one = compensation(state, target=2.0, batch_samples=32, momentum=0.9)
    two = compensation(state, target=2.0, batch_samples=32, momentum=0.9)
    assert one == two
    assert asdict(state) == before


@pytest.mark.parametrize(
    "compensation",
    [MomentumRamp(), MomentumRamp(length=100, shrink="ramp"), NoiseMatchedRamp()],
    ids=repr,
)
def test_without_momentum_there_is_no_ramp(compensation):
    batches = [32, 32, 512, 16, 64]
    found = factors(compensation, batches, momentum=0.0)
    assert found == [batch / 16 for batch in batches]


def test_without_momentum_no_length_is_asked_for():
    def length(ratio, momentum):
        raise AssertionError((ratio, momentum))

    assert factors(MomentumRamp(length=length), [32, 32], momentum=0.0) == [2.0, 2.0]


# u-form and v-form


# BC-44
@pytest.mark.parametrize("compensation", [MomentumRamp(), NoiseMatchedRamp()], ids=repr)
def test_a_factor_on_the_rate_is_the_v_form_with_a_buffer_rescaled_in_every_step(compensation):
    rng = np.random.default_rng(5)
    batches = [16] * 3 + [64] * 20 + [32] * 10 + [256] * 40
    applied = factors(compensation, batches)
    rate = 0.05
    u_weights, v_weights = rng.standard_normal(4), None
    v_weights = u_weights.copy()
    u, v, before = np.zeros(4), np.zeros(4), applied[0]
    for factor in applied:
        noise = rng.standard_normal(4)
        u = MOMENTUM * u + (u_weights + noise)
        u_weights = u_weights - rate * factor * u
        v = (factor / before) * MOMENTUM * v + rate * factor * (v_weights + noise)
        v_weights = v_weights - v
        before = factor
        assert u_weights == pytest.approx(v_weights, rel=1e-9, abs=1e-12)
    assert max(applied) > 10  # the ramp did move


# The noise model (docs: "What the model says")
#
# The table lets t - t0 be the number of new gradients in the buffer: equation 6 with t0 the last
# step before the change. Our ramps call the first step after the change t0, one step later.

TABLE = {  # ratio: at once, T = 8, T = 8 k, velocity kept
    2: ((1.81, 1), (1.19, 8), (1.03, 16), (1.00, None)),
    4: ((3.43, 1), (1.56, 8), (1.00, None), (1.00, None)),
    16: ((13.2, 1), (3.78, 8), (1.00, None), (1.00, None)),
    1 / 2: ((1.00, None), (2.09, 1), (1.82, 1), (1.81, 1)),
    1 / 4: ((1.00, None), (5.37, 2), (2.45, 1), (3.43, 1)),
    1 / 16: ((1.00, None), (57.8, 2), (1.00, None), (13.2, 1)),
}


def update_noise(applied, batches):
    """Variance of each update over the value at which the linear rule settles."""
    pairs = zip(applied, buffer_variances(batches), batches, strict=True)
    return [factor**2 * variance * 16 / batch for factor, variance, batch in pairs]


def peak(noise):
    """The largest noise above 1 and the number of new gradients at it."""
    worst = max(noise)
    return (worst, noise.index(worst) + 1) if worst > 1.004 else (1.0, None)


def table_noise(ramp, ratio):
    batches = [16 * ratio] * 400
    applied = factors(ramp, [16 * ratio] * 401)
    return update_noise(applied[1:], batches)  # [1:] since the table counts one step less


@pytest.mark.parametrize("ratio", TABLE)
@pytest.mark.parametrize(
    ("column", "ramp"),
    [
        (0, MomentumRamp(length=0, shrink="ramp")),
        (1, MomentumRamp(length=8, shrink="ramp")),
        (2, MomentumRamp(length=eight_per_ratio, shrink="ramp")),
    ],
)
def test_the_ramps_have_the_noise_of_the_table(ratio, column, ramp):
    expected, step = TABLE[ratio][column]
    worst, at = peak(table_noise(ramp, ratio))
    digit = 0.1 if expected >= 10 else 0.01
    assert worst == pytest.approx(expected, abs=digit * 0.51 + 1e-2 * (expected == 5.37))
    assert at == step


@pytest.mark.parametrize("ratio", TABLE)
def test_keeping_the_velocity_has_the_noise_of_the_table(ratio):
    variances = [
        MOMENTUM ** (2 * j) / ratio**2 + (1 - MOMENTUM ** (2 * j)) / ratio for j in range(1, 400)
    ]
    expected, step = TABLE[ratio][3]
    worst, at = peak([ratio * variance for variance in variances])
    assert worst == pytest.approx(expected, abs=0.051 if expected > 10 else 0.0051)
    assert at == step


@pytest.mark.parametrize("ratio", TABLE)
def test_the_default_ramp_stays_near_its_target_noise_for_growth_and_shrink(ratio):
    batches = [16 * ratio] * 400
    worst, _ = peak(update_noise(factors(MomentumRamp(), batches), batches))
    assert worst < 1.03


def test_the_model_is_what_momentum_sgd_does_on_white_noise():
    rng = np.random.default_rng(6)
    num_chains, growth, shrink = 40_000, [64] * 30, [8] * 12
    ramp = MomentumRamp(length=8, shrink="ramp")
    applied = factors(ramp, growth + shrink)
    predicted = [
        factor**2 * variance
        for factor, variance in zip(applied, buffer_variances(growth + shrink), strict=True)
    ]
    buffer = rng.standard_normal(num_chains) / math.sqrt(1 - MOMENTUM**2)  # settled
    settled = 1 / (1 - MOMENTUM**2)
    for batch, factor, expected in zip(growth + shrink, applied, predicted, strict=True):
        gradient = rng.standard_normal(num_chains) * math.sqrt(16 / batch)
        buffer = MOMENTUM * buffer + gradient
        found = np.var(factor * buffer) / settled
        assert found == pytest.approx(expected, rel=0.035)  # five standard errors


# The noise-matched ramp


@always(max_examples=150)
@given(
    momentum=st.floats(0, 0.999),
    changes=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 12)), min_size=1, max_size=12),
)
def test_the_noise_matched_ramp_holds_the_update_noise_through_any_chain(momentum, changes):
    batches = [batch for batch, steps in changes for _ in range(steps)]
    applied = factors(NoiseMatchedRamp(), batches, momentum=momentum)
    variances = buffer_variances(batches, momentum=momentum)
    for factor, variance, batch in zip(applied, variances, batches, strict=True):
        assert factor**2 * variance * 16 / batch == pytest.approx(1.0, rel=1e-7)


@pytest.mark.parametrize("ratio", [2, 16, 1 / 2, 1 / 16])
def test_the_noise_matched_ramp_is_its_formula_from_the_root_to_the_ratio(ratio):
    found = factors(NoiseMatchedRamp(), [16 * ratio] * 300)
    expected = [noise_matched_factor(ratio, momentum=MOMENTUM, steps=j) for j in range(1, 301)]
    assert found == pytest.approx(expected, rel=1e-8)
    assert noise_matched_factor(ratio, momentum=MOMENTUM, steps=0) == math.sqrt(ratio)
    assert noise_matched_factor(ratio, momentum=0, steps=0) == math.sqrt(ratio)
    assert noise_matched_factor(ratio, momentum=0, steps=1) == ratio
    assert found == sorted(found, reverse=ratio < 1)
    assert found[-1] == ratio
    assert found[0] != ratio


def test_the_noise_matched_ramp_starts_near_the_root_with_much_momentum():
    for ratio in (4, 1 / 4):
        first = factors(NoiseMatchedRamp(), [16 * ratio], momentum=0.9999)[0]
        assert first == pytest.approx(math.sqrt(ratio), rel=1e-3)


def test_the_noise_matched_ramp_scales_any_rule():
    linear = factors(NoiseMatchedRamp(), [64] * 50)
    rooted = factors(NoiseMatchedRamp(), [64] * 50, targets=[2.0] * 50)
    assert rooted == pytest.approx([factor / 2 for factor in linear], rel=1e-12)


# Velocity


def states(compensation, batches, *, momentum=MOMENTUM, targets=None):
    """The states of all steps, starting settled at a batch of 16."""
    state = compensation(RampState(), target=1.0, batch_samples=16, momentum=momentum)
    found = []
    for step, batch in enumerate(batches):
        target = batch / 16 if targets is None else targets[step]
        state = compensation(state, target=target, batch_samples=batch, momentum=momentum)
        found.append(state)
    return found


def test_the_velocity_is_kept_by_what_the_factor_grows_by():
    assert kept_velocity(2.0, 8.0) == 0.25
    assert kept_velocity(8.0, 2.0) == kept_velocity(2.0, 2.0) == kept_velocity(0.0, 2.0) == 1.0


@always(max_examples=50)
@given(
    batches=st.lists(st.sampled_from([8, 16, 24, 64, 256]), min_size=1, max_size=6),
    length=st.sampled_from([None, 0, 3, 8]),
    seed=st.integers(0, 1000),
)
def test_growth_with_the_velocity_kept_is_plain_momentum_in_displacements(batches, length, seed):
    batches = [batch for batch in sorted(batches) for _ in range(12)]  # growth alone
    gradients = np.random.default_rng(seed).standard_normal(len(batches))
    gradient_sum = displacement = 0.0
    for one, gradient in zip(states(MomentumRamp(length=length), batches), gradients, strict=True):
        gradient_sum = MOMENTUM * one.buffer_factor * gradient_sum + gradient
        displacement = MOMENTUM * displacement + one.applied * gradient
        if batches[0] >= 16:
            assert one.applied * gradient_sum == pytest.approx(displacement, abs=1e-9)


def test_a_shrink_a_rule_that_moves_and_no_momentum_leave_the_buffer_alone():
    down = states(MomentumRamp(), [8] * 5)
    moving = states(MomentumRamp(), [16] * 4, targets=[1.0, 2.0, 3.0, 4.0])
    without = states(MomentumRamp(), [64] * 40, momentum=0.0)
    plain = states(MomentumRamp(keep_velocity=False), [64] * 40)
    for one in (*down, *moving, *without, *plain):
        assert one.buffer_factor == 1.0


def test_the_velocity_is_kept_to_the_end_of_the_ramp_and_not_longer():
    found = states(MomentumRamp(length=4), [32] * 7, targets=[2.0] * 5 + [3.0, 4.0])
    assert [one.applied for one in found] == [1, 1.25, 1.5, 1.75, 2, 3, 4]
    expected = [1, 1 / 1.25, 1.25 / 1.5, 1.5 / 1.75, 1.75 / 2, 1, 1]
    assert [one.buffer_factor for one in found] == pytest.approx(expected)


# Options


def test_the_two_lengths():
    assert eight_per_ratio(4, 0.9) == 32
    assert eight_per_ratio(0.25, 0.99) == 2
    assert one_time_constant(4, 0.9) == pytest.approx(10)
    assert one_time_constant(16, 0.99) == pytest.approx(100)
    assert one_time_constant(16, 0) == 1


@pytest.mark.parametrize(
    ("ratio", "momentum", "length"), [(4, 0.9, 32), (2, 0.99, 100), (4, 0.99, 100), (16, 0.99, 128)]
)
def test_a_ramp_that_enlarges_old_gradients_lasts_the_longer_of_the_two(ratio, momentum, length):
    assert outlasting_length(ratio, momentum) == pytest.approx(length)
    ramp = MomentumRamp(keep_velocity=False)
    found = factors(ramp, [16 * ratio] * (length + 2), momentum=momentum)
    assert found[length - 1] < ratio
    assert found[length + 1] == ratio
    kept = factors(MomentumRamp(), [16 * ratio] * (8 * ratio + 1), momentum=momentum)
    assert kept[8 * ratio - 1] < kept[8 * ratio] == ratio


@pytest.mark.parametrize("bad", [-1, -0.001, math.nan, math.inf, "8"])
def test_an_impossible_length_is_refused_when_it_is_given(bad):
    with pytest.raises(ArgumentError, match="finite number of optimizer steps") as caught:
        MomentumRamp(length=bad)
    assert str(caught.value).startswith(f"length={bad!r}")


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, None])
def test_an_impossible_length_from_a_function_is_refused_at_the_change(bad):
    ramp = MomentumRamp(length=lambda *_: bad)
    state = ramp(RampState(), target=1.0, batch_samples=16, momentum=0.9)
    with pytest.raises(ArgumentError, match=r"function of \(k, momentum\)") as caught:
        ramp(state, target=2.0, batch_samples=32, momentum=0.9)
    assert str(caught.value).startswith(f"length={bad!r}")


def test_a_length_may_be_a_number_of_numpy():
    for length in (np.int64(2), np.float32(2), lambda *_: np.int64(2)):
        assert factors(MomentumRamp(length=length), [32] * 3) == [1.0, 1.5, 2.0]


def test_an_unknown_shrink_is_refused_with_the_choices():
    with pytest.raises(ArgumentError, match="shrink='drop'") as caught:
        MomentumRamp(shrink="drop")
    assert "'immediate', 'ramp'" in str(caught.value)


def documented_peaks():
    page = Path(__file__).parents[1] / "docs" / "mathematics.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines()]
    return {
        row[0]: [float(cell) for cell in row[1:]]
        for row in rows
        if len(row) == 6 and row[0] in {"2", "4", "16", "1/2", "1/4", "1/16"}
    }


@pytest.mark.parametrize(("ratio", "written"), documented_peaks().items())
def test_the_peaks_in_the_documentation_are_what_the_ramps_do(ratio, written):
    ratio = float(Fraction(ratio))
    lengths = (0, 8, eight_per_ratio)
    ramps = [MomentumRamp(length=length, shrink="ramp", keep_velocity=False) for length in lengths]
    kinds = [*ramps, NoiseMatchedRamp(), MomentumRamp()]
    for kind, peak in zip(kinds, written, strict=True):
        variance, worst = 1.0, 0.0
        state = kind(RampState(), target=1.0, batch_samples=16, momentum=0.9)
        for _ in range(300):
            state = kind(state, target=ratio, batch_samples=16 * ratio, momentum=0.9)
            variance = 0.81 * state.buffer_factor**2 * variance + 0.19 / ratio
            worst = max(worst, state.applied**2 * variance / ratio)
        assert worst == pytest.approx(peak, abs=0.0051)


def test_the_documentation_has_all_rows_of_the_table():
    assert len(documented_peaks()) == 6
