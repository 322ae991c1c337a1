"""The candidates on the digits of `examples/digits`, beside the two halves of each batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.single.estimators import CANDIDATES, Estimators, Watched, dot
from elastane.noise import (
    MomentAverage,
    Moments,
    estimate_moments,
    gain,
    noise_scale,
    smoothing,
)
from examples.digits.data import load_digits
from examples.digits.train import BASE_BATCH_SIZE, BASE_LR, build_model

__all__ = ["GOAL", "SCALES", "digits_rows"]

SCALES = (1, 16)
GOAL = 1.5
NUM_READINGS = 20


def digits(scale: int, *, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Train as `examples/digits` does; return all noise scales at each twentieth of the run.

    The learning rate follows the gain of the two-sample moments, which alone steer the run.
    """
    train_set, _ = load_digits()
    images, labels = train_set.tensors
    torch.manual_seed(seed)
    task, theta, batch = Watched(model=build_model()), smoothing(scale), scale * BASE_BATCH_SIZE
    estimators = Estimators(batch=batch, momentum=0.9, smoothing=theta)
    two, buffer, tau = MomentAverage(), torch.zeros_like(task.weights), 0.0
    readings: list[dict[str, Any]] = []
    for samples in _batches(len(train_set), batch=batch, seed=seed):
        factor = _gain(two, scale=scale)
        mean, by_layers = task.told(images[samples], labels[samples], F.cross_entropy)
        half = samples[: batch // 2]
        first = task.gradient(images[half], labels[half], F.cross_entropy)
        two = two.updated(_moments_of_halves(first, mean, batch=batch), smoothing=theta)
        estimators.see(mean, by_layers=by_layers)
        buffer = 0.9 * buffer + mean
        lr = BASE_LR * (1 + math.cos(math.pi * math.floor(tau) / num_steps)) / 2
        task.weights.sub_(lr * factor * buffer)
        tau += factor
        if NUM_READINGS * tau / num_steps >= len(readings) + 1:
            readings.append(_reading(two, estimators, scale=scale))
        if tau >= num_steps:
            return readings
    raise AssertionError("the batches never end")


def _batches(num_samples: int, *, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_samples, generator=generator)
        yield from (one for one in order.split(batch) if len(one) == batch)


def _moments_of_halves(first: Tensor, mean: Tensor, *, batch: int) -> Moments:
    second = 2 * mean - first
    moments = estimate_moments(
        weighted_sqr_norm=batch / 2 * (dot(first, first) + dot(second, second)),
        mean_sqr_norm=dot(mean, mean),
        batch_samples=batch,
        num_gradients=2,
    )
    assert moments is not None
    return moments


def _gain(average: MomentAverage, *, scale: float) -> float:
    moments = average.read()
    if moments is None:
        return 1.0
    return gain(moments, scale=scale, base_batch_size=BASE_BATCH_SIZE)


def _reading(two: MomentAverage, estimators: Estimators, *, scale: int) -> dict[str, Any]:
    """Return noise scales, and gains at the run's scale, or at 2 where that is 1."""
    moments, scale = two.read(), max(scale, 2)
    assert moments is not None
    return {
        "two": noise_scale(moments),
        "gain of two": _gain(two, scale=scale),
        "noise scales": estimators.noise_scales(),
        "gains": {name: _gain(one, scale=scale) for name, one in estimators.averages.items()},
    }


def digits_rows(scale: int, *, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each candidate: how far it is from two samples along the run."""
    readings = digits(scale, num_steps=num_steps, seed=seed)
    return [_digits_row(name, readings, scale=scale, seed=seed) for name in CANDIDATES]


def _digits_row(
    name: str, readings: Sequence[dict[str, Any]], *, scale: int, seed: int
) -> dict[str, Any]:
    ratios = [one["noise scales"][name] / one["two"] for one in readings]
    factors = [max(ratio, 1 / ratio) for ratio in ratios if ratio > 0]
    largest = max(factors) if len(factors) == len(ratios) else math.inf
    gains = [one["gains"][name] / one["gain of two"] for one in readings]
    return {
        "candidate": name,
        "batch": scale * BASE_BATCH_SIZE,
        "seed": seed,
        "readings": len(readings),
        "two_samples": [_rounded(one["two"]) for one in readings],
        "ratios": [_rounded(ratio) for ratio in ratios],
        "largest_factor": _rounded(largest),
        "largest_gain_error": round(max(abs(one - 1) for one in gains), 4),
        "met": largest <= GOAL,
    }


def _rounded(value: float) -> float | None:
    """Return a number for JSON, which knows no infinity."""
    return round(value, 3) if math.isfinite(value) else None
