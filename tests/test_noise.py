"""Moments: unbiased, averaged raw, right at once after a change; and a gain within bounds."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane import noise
from elastane.errors import ArgumentError, StateError
from elastane.noise import (
    MomentAverage,
    Moments,
    critical_batch,
    efficiency,
    estimate_moments,
    noise_scale,
    smoothing,
    total_moments,
)
from elastane.noise import gain as gain_of

always = partial(settings, derandomize=True, deadline=None, database=None)

huge = st.floats(allow_nan=False, allow_infinity=False)  # subnormal to 1.8e308, both signs
scales = st.floats(min_value=1e-6, max_value=1e6)


def gain(variance, sqr_norm, *, scale, base_batch_size=1):
    moments = Moments(variance=variance, sqr_norm=sqr_norm)
    return gain_of(moments, scale=scale, base_batch_size=base_batch_size)


def moments_of(gradients, samples):
    """Moments of gradients of shape (..., num_gradients, dim), each over `samples[i]` samples."""
    samples = np.asarray(samples)
    weighted = np.einsum("...nd,...nd,n->...", gradients, gradients, samples)
    mean = np.einsum("...nd,n->...d", gradients, samples) / samples.sum()
    return estimate_moments(
        weighted_sqr_norm=weighted,
        mean_sqr_norm=np.einsum("...d,...d->...", mean, mean),
        batch_samples=int(samples.sum()),
        num_gradients=len(samples),
    )


def draws(rng, *, num_draws, samples, sqr_norm, variance, dim):
    """Gaussian gradients of shape (num_draws, num_gradients, dim)."""
    shape = (num_draws, len(samples), dim)
    spread = np.sqrt(variance / dim / np.asarray(samples))[:, None]
    return math.sqrt(sqr_norm / dim) + spread * rng.standard_normal(shape)


# The estimator


# BC-25
@pytest.mark.parametrize(
    "samples", [[4, 4], [4, 4, 4, 4], [1, 7], [3, 1, 8, 20], [5, 5, 2], [16, 1, 1, 1, 1]]
)
def test_the_moments_are_unbiased_also_when_micro_batches_are_unequal(samples):
    rng = np.random.default_rng(len(samples) * 100 + samples[0])
    found = moments_of(
        draws(rng, num_draws=40_000, samples=samples, sqr_norm=0.3, variance=6.0, dim=8), samples
    )
    for values, truth in ((found.variance, 6.0), (found.sqr_norm, 0.3)):
        standard_error = values.std() / math.sqrt(len(values))
        assert standard_error < 0.02 * truth + 0.005  # else the next line would say nothing
        assert abs(values.mean() - truth) < 4 * standard_error


def test_an_unweighted_estimate_of_unequal_micro_batches_is_visibly_biased():
    # The same check would not pass for the formula that forgets the weights.
    samples = np.array([1, 7])
    rng = np.random.default_rng(0)
    gradients = draws(rng, num_draws=40_000, samples=samples, sqr_norm=0.3, variance=6.0, dim=8)
    as_if_equal = moments_of(gradients, [4, 4])
    error = as_if_equal.variance.std() / 200
    assert abs(as_if_equal.variance.mean() - 6.0) > 20 * error


def test_equal_micro_batches_give_the_formulas_of_the_paper():
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((5, 3)) + 1
    base, scale = 6, 5
    found = moments_of(gradients, [base] * scale)
    sum_sqr = float((gradients**2).sum())
    mean_sqr = float((gradients.mean(0) ** 2).sum())
    sigma2 = sum_sqr / (scale - 1) - scale / (scale - 1) * mean_sqr
    assert found.variance / base == pytest.approx(sigma2, rel=1e-12)
    assert found.sqr_norm == pytest.approx(mean_sqr - sigma2 / scale, rel=1e-12)


@always(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    base=st.integers(1, 64),
    num_gradients=st.integers(2, 9),
    signal=st.floats(0.5, 5),
)
def test_the_unclamped_gain_of_base_batches_is_a_ratio_of_norms(seed, base, num_gradients, signal):
    gradients = np.random.default_rng(seed).standard_normal((num_gradients, 4)) + signal
    found = moments_of(gradients, [base] * num_gradients)
    sigma2 = found.variance / base
    ratio = (sigma2 + found.sqr_norm) / (sigma2 / num_gradients + found.sqr_norm)
    expected = (gradients**2).sum(1).mean() / (gradients.mean(0) ** 2).sum()
    assert ratio == pytest.approx(expected, rel=1e-9)
    if found.sqr_norm > 0:
        read = gain_of(found, scale=num_gradients, base_batch_size=base)
        assert read == pytest.approx(expected, rel=1e-9)


def test_one_gradient_tells_nothing():
    found = estimate_moments(
        weighted_sqr_norm=8.0, mean_sqr_norm=1.0, batch_samples=8, num_gradients=1
    )
    assert found is None


def test_identical_gradients_have_no_variance_and_gain_one():
    found = moments_of(np.full((4, 3), 2.0), [1, 2, 3, 10])
    assert found == Moments(variance=0.0, sqr_norm=12.0)
    assert gain_of(found, scale=4, base_batch_size=4) == 1.0


def test_orthogonal_gradients_are_pure_noise_and_gain_the_scale():
    found = moments_of(np.eye(4), [1, 1, 1, 1])
    assert found == Moments(variance=1.0, sqr_norm=0.0)
    assert gain_of(found, scale=4, base_batch_size=1) == 4.0
    assert gain_of(found, scale=4 / 3, base_batch_size=3) == 4 / 3


def test_all_zero_gradients_gain_one():
    found = moments_of(np.zeros((3, 2)), [1, 2, 3])
    assert found == Moments(variance=0.0, sqr_norm=0.0)
    for scale in (0.25, 1, 8):
        assert gain_of(found, scale=scale, base_batch_size=1) == 1.0


def test_opposite_gradients_give_a_negative_squared_norm_that_is_kept():
    found = moments_of(np.array([[-1.0, 1.0], [1.0, -1.0]]), [1, 1])
    assert found == Moments(variance=4.0, sqr_norm=-2.0)
    assert gain_of(found, scale=2, base_batch_size=1) == 2.0


@pytest.mark.parametrize(
    ("batch_samples", "num_gradients", "shown"),
    [(0, 2, "batch_samples=0"), (-4, 2, "batch_samples=-4"), (8, 0, "num_gradients=0")],
)
def test_a_batch_without_samples_or_gradients_is_refused(batch_samples, num_gradients, shown):
    with pytest.raises(ArgumentError, match="must be positive") as caught:
        estimate_moments(
            weighted_sqr_norm=1.0,
            mean_sqr_norm=1.0,
            batch_samples=batch_samples,
            num_gradients=num_gradients,
        )
    assert shown in str(caught.value)


def test_tensors_give_the_same_moments_and_gain_as_floats():
    for weighted, mean, samples, count in ((8.0, 1.5, 4, 2), (3.0, 0.1, 16, 4), (0.0, 0.0, 2, 2)):
        plain = estimate_moments(
            weighted_sqr_norm=weighted,
            mean_sqr_norm=mean,
            batch_samples=samples,
            num_gradients=count,
        )
        lazy = estimate_moments(
            weighted_sqr_norm=torch.tensor(weighted, dtype=torch.float64),
            mean_sqr_norm=torch.tensor(mean, dtype=torch.float64),
            batch_samples=samples,
            num_gradients=count,
        )
        assert isinstance(lazy.variance, torch.Tensor)
        assert (float(lazy.variance), float(lazy.sqr_norm)) == (plain.variance, plain.sqr_norm)
        for scale in (0.5, 1, 4):
            assert float(gain_of(lazy, scale=scale, base_batch_size=2)) == gain_of(
                plain, scale=scale, base_batch_size=2
            )
        assert float(noise_scale(lazy)) == noise_scale(plain)


def test_the_moments_of_groups_add_up_without_clamping():
    parts = [Moments(variance=1.0, sqr_norm=-2.0), Moments(variance=-0.25, sqr_norm=3.0)]
    assert total_moments(parts) == Moments(variance=0.75, sqr_norm=1.0)
    assert total_moments(iter(parts)) == total_moments(parts)


# The gain


@pytest.mark.parametrize(
    ("scale", "gains"),
    [
        (0.5, [0.5, 1.0, 0.5, 0.6]),
        (1, [1, 1.0, 1, 1]),
        (2, [2, 1.0, 2, 1.5]),
        (4, [4, 1.0, 4, 2]),
        (10, [10, 1.0, 10, 2.5]),
    ],
)
def test_the_gains_of_adaptdl_come_out_but_for_zero_gradients(scale, gains):
    # AdaptDL answers S where both moments are 0. Nothing moves then; we call that gain 1.
    found = [gain(v, m, scale=scale) for v, m in ((1, -1), (0, 0), (0, -1), (2, 1))]
    assert found == pytest.approx(gains, rel=1e-15)


def test_the_gain_is_clamped_at_its_ends():
    assert gain(-1.0, 0.0, scale=2) == 2.0  # no squared norm above 0
    assert gain(-1.0, 3.0, scale=2) == 1.0  # no variance above 0
    assert gain(1e305, 1.0, scale=1e-6) == 1e-6  # an overflow on the way


def test_variance_three_and_norm_one_gain_two_at_scale_three():
    assert gain(3.0, 1.0, scale=3) == 2.0


@always(max_examples=400)
@given(variance=huge, sqr_norm=huge, scale=scales, base=st.integers(1, 2**20))
def test_the_gain_lies_between_one_and_the_scale(variance, sqr_norm, scale, base):
    found = gain(variance, sqr_norm, scale=scale, base_batch_size=base)
    assert min(1, scale) <= found <= max(1, scale)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("variance", [5e-324, 1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("sqr_norm", [5e-324, 1e-300, 1e300, 1.7e308])
def test_the_gain_is_right_for_moments_at_the_ends_of_floating_point(variance, sqr_norm, scale):
    v, m, s = map(Fraction, (variance, sqr_norm, scale))
    expected = float((v + m) / (v / s + m))
    assert gain(variance, sqr_norm, scale=scale) == pytest.approx(expected, rel=1e-12)


@always(max_examples=200)
@given(
    variance=st.floats(1e-6, 1e6),
    sqr_norm=st.floats(1e-6, 1e6),
    scale=st.floats(0.01, 1000),
    base=st.integers(1, 4096),
)
def test_gain_over_scale_is_the_efficiency_beside_that_of_the_base_batch(
    variance, sqr_norm, scale, base
):
    moments = Moments(variance=variance, sqr_norm=sqr_norm)
    ratio = efficiency(moments, batch_samples=scale * base) / efficiency(
        moments, batch_samples=base
    )
    found = gain_of(moments, scale=scale, base_batch_size=base)
    assert found / scale == pytest.approx(ratio, rel=1e-9)
    phi = noise_scale(moments)
    assert found == pytest.approx(scale * (phi + base) / (phi + scale * base), rel=1e-9)


def test_the_gain_rises_with_the_noise_and_with_the_scale():
    by_noise = [gain(v, 1.0, scale=8) for v in (0, 0.1, 1, 10, 1000)]
    by_scale = [gain(1.0, 1.0, scale=s) for s in (0.1, 0.5, 1, 2, 100)]
    assert by_noise == sorted(set(by_noise))
    assert by_scale == sorted(set(by_scale))


# Noise scale, efficiency, critical batch


def test_the_noise_scale_is_clamped_where_it_is_read():
    assert noise_scale(Moments(variance=50.0, sqr_norm=0.5)) == 100.0
    assert noise_scale(Moments(variance=1.0, sqr_norm=0.0)) == math.inf
    assert noise_scale(Moments(variance=1.0, sqr_norm=-1.0)) == math.inf
    assert noise_scale(Moments(variance=-1.0, sqr_norm=1.0)) == 0.0
    assert noise_scale(Moments(variance=0.0, sqr_norm=0.0)) == 0.0


def test_efficiency_falls_from_one_to_one_half_at_the_noise_scale():
    moments = Moments(variance=64.0, sqr_norm=2.0)
    assert efficiency(moments, batch_samples=1e-9) == pytest.approx(1.0)
    assert efficiency(moments, batch_samples=32) == 0.5
    assert efficiency(moments, batch_samples=96) == 0.25
    assert efficiency(Moments(variance=1.0, sqr_norm=0.0), batch_samples=1e9) == 1.0
    assert efficiency(Moments(variance=0.0, sqr_norm=1.0), batch_samples=1) == 0.0


@pytest.mark.parametrize("wanted", [0.01, 0.25, 0.5, 0.9])
def test_a_critical_batch_has_the_efficiency_that_was_asked_for(wanted):
    moments = Moments(variance=64.0, sqr_norm=2.0)
    batch = critical_batch(moments, efficiency=wanted)
    assert efficiency(moments, batch_samples=batch) == pytest.approx(wanted, rel=1e-12)
    assert critical_batch(moments) == 32.0


@pytest.mark.parametrize("wanted", [0, 1, -0.5, 2, math.nan])
def test_an_efficiency_outside_zero_and_one_is_refused(wanted):
    with pytest.raises(ArgumentError, match="strictly between 0 and 1") as caught:
        critical_batch(Moments(variance=1.0, sqr_norm=1.0), efficiency=wanted)
    assert f"efficiency={wanted!r}" in str(caught.value)


# Averages


@pytest.mark.parametrize(
    ("scale", "theta"),
    [(0.5, 0.9995), (1, 0.999), (2, 0.998), (99, 0.901), (100, 0.9), (999, 0.9), (1e5, 0.9)],
)
def test_smoothing_follows_the_scale_and_keeps_at_least_ten_steps(scale, theta):
    assert smoothing(scale) == pytest.approx(theta, rel=1e-12)


@always(max_examples=100)
@given(
    averaging=st.sampled_from(noise.AVERAGES),
    thetas=st.lists(st.floats(0, 0.9999), min_size=1, max_size=30),
    variance=st.floats(-1e6, 1e6),
    sqr_norm=st.floats(-1e6, 1e6),
)
def test_a_constant_reads_back_whatever_the_smoothing(averaging, thetas, variance, sqr_norm):
    average = MomentAverage(averaging=averaging)
    assert average.read() is None
    for count, theta in enumerate(thetas, start=1):
        sample = Moments(variance=variance, sqr_norm=sqr_norm)
        average = average.updated(sample, smoothing=theta)
        found = average.read()
        assert found.variance == pytest.approx(variance, rel=1e-10, abs=1e-300)
        assert found.sqr_norm == pytest.approx(sqr_norm, rel=1e-10, abs=1e-300)
        assert average.count == count


@always(max_examples=100)
@given(
    averaging=st.sampled_from(noise.AVERAGES),
    steps=st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 0.999)), min_size=1, max_size=30),
)
def test_an_average_stays_within_what_it_has_seen(averaging, steps):
    average = MomentAverage(averaging=averaging)
    for value, theta in steps:
        average = average.updated(Moments(variance=value, sqr_norm=-value), smoothing=theta)
    seen = [value for value, _ in steps]
    assert min(seen) - 1e-9 <= average.read().variance <= max(seen) + 1e-9
    assert average.read().sqr_norm == pytest.approx(-average.read().variance, rel=1e-12)


def test_the_debiased_average_weighs_by_age_under_a_smoothing_that_varies():
    values, thetas = [3.0, -1.0, 4.0, 10.0], [0.9, 0.5, 0.998, 0.25]
    average = MomentAverage(averaging="debiased")
    for value, theta in zip(values, thetas, strict=True):
        average = average.updated(Moments(variance=value, sqr_norm=2 * value), smoothing=theta)
    weights = [(1 - thetas[i]) * math.prod(thetas[i + 1 :]) for i in range(4)]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert average.read().variance == pytest.approx(expected, rel=1e-12)
    assert average.read().sqr_norm == pytest.approx(2 * expected, rel=1e-12)


def test_the_paper_average_is_a_plain_mean_and_then_moves_with_theta():
    theta, values = 0.9, list(np.random.default_rng(2).standard_normal(40))
    average, expected = MomentAverage(averaging="paper"), 0.0
    for count, value in enumerate(values, start=1):
        average = average.updated(Moments(variance=value, sqr_norm=0.0), smoothing=theta)
        if count <= 10:
            expected = float(np.mean(values[:count]))
        else:
            expected = theta * expected + (1 - theta) * value
        assert average.read().variance == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_paper_average_goes_on_as_a_mean_when_theta_grows():
    values = [1.0, 2.0, 6.0, 7.0, 9.0]
    average = MomentAverage(averaging="paper")
    for value, theta in zip(values, [0.5, 0.5, 0.99, 0.99, 0.99], strict=True):
        average = average.updated(Moments(variance=value, sqr_norm=0.0), smoothing=theta)
    # 1.5 after two; then 1/3, 1/4 and 1/5 of each newcomer.
    assert average.read().variance == pytest.approx(np.mean(values), rel=1e-12)


# BC-03
def test_an_average_keeps_negative_values_raw():
    for averaging in noise.AVERAGES:
        average = MomentAverage(averaging=averaging)
        for value in (-4.0, 2.0):
            average = average.updated(Moments(variance=value, sqr_norm=value), smoothing=0.999)
        assert average.read().variance == pytest.approx(-1.0, abs=2e-3)


def test_updating_an_average_leaves_the_old_one_as_it_was():
    before = MomentAverage().updated(Moments(variance=1.0, sqr_norm=1.0), smoothing=0.9)
    copy = before.state_dict()
    before.updated(Moments(variance=100.0, sqr_norm=1.0), smoothing=0.9)
    assert before.state_dict() == copy


# BC-12
@pytest.mark.parametrize("averaging", noise.AVERAGES)
def test_an_average_survives_a_checkpoint_that_loads_weights_only(averaging):
    rng = np.random.default_rng(3)
    samples = [Moments(variance=float(v), sqr_norm=float(m)) for v, m in rng.random((20, 2))]
    straight = MomentAverage(averaging=averaging)
    for sample in samples[:9]:
        straight = straight.updated(sample, smoothing=0.95)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed = MomentAverage.from_state_dict(torch.load(file, weights_only=True))
    assert resumed == straight
    for sample in samples[9:]:
        straight = straight.updated(sample, smoothing=0.7)
        resumed = resumed.updated(sample, smoothing=0.7)
    assert resumed == straight


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("weight"),
        lambda state: state.pop("averaging"),
        lambda state: state.update(mean=1.0),
        lambda state: state.update(averaging="median"),
        dict.clear,
    ],
)
def test_a_state_with_other_fields_is_refused(change):
    state = MomentAverage().updated(Moments(variance=1.0, sqr_norm=1.0), smoothing=0.9).state_dict()
    change(state)
    with pytest.raises(StateError, match="moment average"):
        MomentAverage.from_state_dict(state)


def test_an_unknown_average_is_refused_by_name():
    with pytest.raises(ArgumentError, match="averaging='mean'") as caught:
        MomentAverage(averaging="mean")
    assert "'debiased', 'paper'" in str(caught.value)


# Known faults of other programs


NOISY = {"sqr_norm": 0.01, "variance": 1.0, "dim": 100, "samples": [1, 1]}


# BC-03
def test_a_plain_mean_of_raw_moments_finds_the_noise_scale():
    rng = np.random.default_rng(11)
    parts = [moments_of(draws(rng, num_draws=20_000, **NOISY), [1, 1]) for _ in range(10)]
    variance = np.concatenate([part.variance for part in parts])
    sqr_norm = np.concatenate([part.sqr_norm for part in parts])
    raw = Moments(variance=float(variance.mean()), sqr_norm=float(sqr_norm.mean()))
    assert noise_scale(raw) == pytest.approx(100, rel=0.05)
    clamped = Moments(
        variance=float(variance.clip(min=1e-6).mean()), sqr_norm=float(sqr_norm.clip(min=0).mean())
    )
    assert noise_scale(clamped) == pytest.approx(22, rel=0.05)


def test_the_average_of_the_paper_finds_the_noise_scale_too():
    num_seeds, num_steps = 50, 4000
    rng = np.random.default_rng(12)
    average = MomentAverage(averaging="paper")
    for _ in range(num_steps // 100):
        found = moments_of(
            draws(rng, num_draws=100 * num_seeds, **NOISY).reshape(100, num_seeds, 2, 100), [1, 1]
        )
        for variance, sqr_norm in zip(found.variance, found.sqr_norm, strict=True):
            sample = Moments(variance=variance, sqr_norm=sqr_norm)  # (num_seeds,) each
            average = average.updated(sample, smoothing=smoothing(2))
    read = average.read()
    scales = [
        noise_scale(Moments(variance=float(v), sqr_norm=float(m)))
        for v, m in zip(read.variance, read.sqr_norm, strict=True)
    ]
    assert len(scales) == num_seeds
    assert np.median(scales) == pytest.approx(100, rel=0.10)


# BC-02
@pytest.mark.parametrize(("before", "after"), [(2, 8), (4, 16), (8, 2)])
@pytest.mark.parametrize("averaging", noise.AVERAGES)
def test_the_gain_is_right_at_once_after_a_change_of_scale(before, after, averaging):
    rng = np.random.default_rng(before)
    average = MomentAverage(averaging=averaging)
    for _ in range(15):
        found = moments_of(
            draws(rng, num_draws=100, samples=[1] * before, sqr_norm=0.05, variance=1.0, dim=1000),
            [1] * before,
        )
        for variance, sqr_norm in zip(found.variance, found.sqr_norm, strict=True):
            sample = Moments(variance=float(variance), sqr_norm=float(sqr_norm))
            average = average.updated(sample, smoothing=smoothing(before))
    expected = (1 + 0.05) / (1 / after + 0.05)
    found = gain_of(average.read(), scale=after, base_batch_size=1)
    assert found == pytest.approx(expected, rel=0.025)  # the noise of the averages is 1 %
    # The correction that fairscale makes would be visible here.
    read = average.read()
    rescaled = Moments(variance=read.variance * before / after, sqr_norm=read.sqr_norm)
    wrong = gain_of(rescaled, scale=after, base_batch_size=1)
    assert abs(wrong / expected - 1) > 0.025
