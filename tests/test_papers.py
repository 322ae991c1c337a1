"""The papers' claims on problems with a known answer: noisy quadratics and Rosenbrock."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from elastane.controller import StepController
from elastane.measuring import Measuring
from elastane.momentum import MomentumRamp
from elastane.noise import Moments, estimate_moments
from elastane.scaling import AdaScale, Linear

# A noisy quadratic, F(w) = beta |w|^2 / 2, whose base gradient has the noise variance V. After
# enough steps AdaScale's loss is beta * eta V / (2 beta (2 - eta beta)) for any S (theorems 1 and
# 2), and the linear rule's is larger by (2 - eta beta) / (2 - S eta beta) (theorem 3).

BETA, RATE, NOISE_VARIANCE, DIM, STEPS = 1.0, 0.2, 4.0, 60, 3000
PLATEAU = RATE * NOISE_VARIANCE / (2 * (2 - RATE * BETA))


def controller(rule, *, num_steps, compensation=None, num_groups=1, **measuring):
    return StepController(
        rule,
        base_batch_size=1,
        num_steps=num_steps,
        compensation=compensation,
        measuring=Measuring(**measuring),
        num_groups=num_groups,
    )


def moments_of(gradients):
    """Moments of base-batch gradients of shape (S, dim), and their mean."""
    mean = gradients.mean(0)
    moments = estimate_moments(
        weighted_sqr_norm=float(np.vdot(gradients, gradients)),
        mean_sqr_norm=float(mean @ mean),
        batch_samples=len(gradients),
        num_gradients=len(gradients),
    )
    return moments, mean


def descend(rule, *, scale, num_steps=STEPS, seed=0, start=3.0, rate=RATE):
    """Train the quadratic to `num_steps` of progress; return (progress, loss) of each step."""
    rng = np.random.default_rng([seed, scale])
    one = controller(rule, num_steps=num_steps)
    weights = np.full(DIM, start / math.sqrt(DIM))
    path = []
    while not one.finished and np.abs(weights).max() < 1e6:
        noise = rng.standard_normal((scale, DIM)) * math.sqrt(NOISE_VARIANCE / DIM)
        moments, mean = moments_of(BETA * weights + noise)
        decision = one.decide(
            None if moments is None else [moments],
            batch_samples=scale,
            nominal_samples=scale,
            momentum=0.0,
        )
        weights = weights - rate * decision.factors[0] * mean
        one.commit(decision)
        path.append((one.progress, BETA * float(weights @ weights) / 2))
    return np.array(path)


def plateau(path):
    """Mean loss over the second half of the progress."""
    return path[path[:, 0] > path[-1, 0] / 2, 1].mean()


@pytest.mark.parametrize("scale", [1, 2, 4, 8, 16])
def test_adascale_reaches_the_same_loss_at_any_scale(scale):
    path = descend(AdaScale(), scale=scale)
    assert plateau(path) == pytest.approx(PLATEAU, rel=0.06)
    assert STEPS / scale <= len(path) <= STEPS
    assert STEPS <= path[-1, 0] < STEPS + scale
    if scale >= 4:
        assert len(path) < 0.5 * STEPS  # it was worth it


@pytest.mark.parametrize("scale", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_steps", [10, 20, 40])
def test_adascale_keeps_the_bound_of_the_theorem_on_the_way_down(scale, num_steps):
    losses = [
        descend(AdaScale(), scale=scale, num_steps=num_steps, seed=seed)[-1, 1]
        for seed in range(20)
    ]
    gamma = RATE * BETA * (2 - RATE * BETA)  # alpha = beta for this F
    bound = BETA * 9 / 2 * math.exp(-gamma * num_steps) + PLATEAU
    slack = 3 * np.std(losses) / math.sqrt(len(losses))
    assert np.mean(losses) < bound + slack


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_the_linear_rule_is_worse_by_the_factor_of_theorem_three(scale):
    path = descend(Linear(), scale=scale, num_steps=8 * STEPS)
    worse = (2 - RATE * BETA) / (2 - scale * RATE * BETA)
    assert plateau(path) == pytest.approx(worse * PLATEAU, rel=0.06)


def test_the_linear_rule_diverges_where_the_theorem_ends_and_adascale_does_not():
    for scale in (12, 16):  # 2 / (S beta) is 0.17 and 0.125, below the rate of 0.2
        assert descend(Linear(), scale=scale)[-1, 1] > 1e6
        assert descend(AdaScale(), scale=scale)[-1, 1] < 3 * PLATEAU
    assert descend(Linear(), scale=9)[-1, 1] < 50 * PLATEAU  # just inside


def test_without_noise_adascale_is_the_identity_and_with_noise_alone_it_is_linear():
    for noise, factor in (
        (Moments(variance=0.0, sqr_norm=2.0), 1.0),
        (Moments(variance=2.0, sqr_norm=0.0), 8.0),
    ):
        one = controller(AdaScale(), num_steps=100)
        for _ in range(3):
            decision = one.decide([noise], batch_samples=8, nominal_samples=8, momentum=0.0)
            one.commit(decision)
        assert decision.factors == (factor,)
        assert decision.progress == factor


def test_an_elastic_run_ends_at_the_same_loss_too():
    scales, rng = [2, 8, 4, 16, 1, 3], np.random.default_rng(3)
    one = controller(AdaScale(), num_steps=2 * STEPS, compensation=MomentumRamp())
    weights, losses = np.full(DIM, 3.0 / math.sqrt(DIM)), []
    while not one.finished:
        scale = scales[int(one.progress // 200) % len(scales)]
        noise = rng.standard_normal((scale, DIM)) * math.sqrt(NOISE_VARIANCE / DIM)
        moments, mean = moments_of(BETA * weights + noise)
        samples = None if moments is None else [moments]
        decision = one.decide(samples, batch_samples=scale, nominal_samples=scale, momentum=0.0)
        weights = weights - RATE * decision.factors[0] * mean
        one.commit(decision)
        losses.append((BETA * float(weights @ weights) / 2, decision.progress))
    losses, worth = np.array(losses[len(losses) // 5 :]).T
    assert np.average(losses, weights=worth) == pytest.approx(PLATEAU, rel=0.06)


# AdaptDL's acceptance problem: Rosenbrock's valley, from (1, 1.5) to the minimum at (1, 1).


def rosenbrock_gradient(x, y, first, second):
    """Gradient of `first (1 - x)^2 + second 100 (y - x^2)^2`."""
    slope = 200 * second * (y - x * x)
    return -2 * first * (1 - x) - 2 * slope * x, slope


@pytest.mark.parametrize(
    ("spread", "num_groups", "scale"),
    [(0.0, 1, 1), (0.0, 1, 4), (0.2, 1, 1), (0.2, 1, 4), (0.2, 2, 4), (0.2, 2, 2)],
)
def test_rosenbrock_ends_at_its_minimum(spread, num_groups, scale):
    rng = np.random.default_rng(scale)
    parameters = [torch.tensor([1.0, 1.5], dtype=torch.float64)]
    if num_groups == 2:
        parameters = [torch.tensor([value], dtype=torch.float64) for value in (1.0, 1.5)]
    optimizer = torch.optim.SGD(
        [{"params": [one], "lr": 1e-3} for one in parameters], lr=1e-3, foreach=False
    )
    per = "model" if num_groups == 1 else "param_group"
    one = controller(
        AdaScale(), num_steps=100_000, num_groups=num_groups, per=per, current=num_groups == 2
    )
    while one.step < 12_000:
        x, y = torch.cat(parameters).tolist()
        if max(abs(x - 1), abs(y - 1)) < 0.005:
            break
        weights = (1 + spread * rng.standard_normal((scale, 2))).tolist()
        gradients = [rosenbrock_gradient(x, y, *pair) for pair in weights]
        coordinates = list(zip(*gradients, strict=True))
        mean = [sum(values) / scale for values in coordinates]
        groups = [[0, 1]] if num_groups == 1 else [[0], [1]]
        samples = [
            estimate_moments(
                weighted_sqr_norm=sum(value * value for i in group for value in coordinates[i]),
                mean_sqr_norm=sum(mean[i] ** 2 for i in group),
                batch_samples=scale,
                num_gradients=scale,
            )
            for group in groups
        ]
        decision = one.decide(
            None if scale == 1 else samples,
            batch_samples=scale,
            nominal_samples=scale,
            momentum=0.0,
        )
        for group, indices, factor in zip(
            optimizer.param_groups, groups, decision.factors, strict=True
        ):
            group["lr"] = 1e-3 * factor
            group["params"][0].grad = torch.tensor([mean[i] for i in indices], dtype=torch.float64)
        optimizer.step()
        one.commit(decision)
    assert torch.cat(parameters).tolist() == pytest.approx([1.0, 1.0], abs=0.01)
    assert one.step > 100
    assert not one.finished
