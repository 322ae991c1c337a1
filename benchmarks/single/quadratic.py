"""The candidates on a quadratic whose noise is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.single.estimators import CANDIDATES, Estimators, Watched, dot
from elastane.noise import MomentAverage, Moments, noise_scale, smoothing

__all__ = ["GOAL", "quadratic", "quadratic_rows"]

MOMENTA = (0.0, 0.9)
GOAL, LARGEST_DRIFT = 0.10, 0.01
_DIMENSION, _BATCH, _LR, _NOISE = 2_000, 16, 2e-4, 10.0


def quadratic(seed: int, *, momentum: float, num_steps: int) -> dict[str, Any]:
    """Return each candidate's relative error on a quadratic, and the largest drift on the way.

    A sample's loss is `sum h (w - z)^2 / 2` with curvatures `h` from 0.1 to 1 and Gaussian `z`;
    in a batch the noise is ten times the signal's square at first. Drift is what a pair loses of
    `mu^2` in expectation, to first order: `lr (h / (1 - m) + h_s s / (B mu^2))`.
    """
    generator = torch.Generator().manual_seed(seed)
    curvature = torch.logspace(-1, 0, _DIMENSION)[torch.randperm(_DIMENSION, generator=generator)]
    task = Watched(model=nn.Linear(1, _DIMENSION))
    task.weights.zero_()
    start = torch.randn(_DIMENSION, generator=generator)
    task.weights[_DIMENSION:] = start  # the bias; the weight sees inputs of 0 alone
    variance = _NOISE * _BATCH * dot(curvature * start, curvature * start)
    deviation = math.sqrt(variance / dot(curvature, curvature))
    along_noise = float((curvature**3).sum() / (curvature**2).sum())
    estimators = Estimators(batch=_BATCH, momentum=momentum, smoothing=smoothing(1.0))
    truth, drifts, buffer = MomentAverage(), [], torch.zeros_like(task.weights)
    inputs = torch.zeros(_BATCH, 1)
    for _ in range(num_steps):
        mean = curvature * task.weights[_DIMENSION:]
        moments = Moments(variance=variance, sqr_norm=dot(mean, mean))
        truth = truth.updated(moments, smoothing=smoothing(1.0))
        along = dot(mean, curvature * mean) / moments.sqr_norm / (1 - momentum)
        drifts.append(_LR * (along + along_noise * variance / _BATCH / moments.sqr_norm))
        targets = deviation * torch.randn(_BATCH, _DIMENSION, generator=generator)
        gradient, by_layers = task.told(
            inputs, targets, lambda w, z: (curvature * (w - z).square()).sum(1).mean() / 2
        )
        estimators.see(gradient, by_layers=by_layers)
        buffer = momentum * buffer + gradient
        task.weights.sub_(_LR * buffer)
    known = truth.read()
    assert known is not None
    errors = {
        name: None if found is None else abs(found / noise_scale(known) - 1)
        for name, found in estimators.noise_scales().items()
    }
    return {"errors": errors, "drift": max(drifts)}


def quadratic_rows(seeds: int, *, num_steps: int, console: Console) -> list[dict[str, Any]]:
    """Return a row for each candidate and momentum."""
    rows = []
    for momentum in MOMENTA:
        found = [quadratic(seed, momentum=momentum, num_steps=num_steps) for seed in range(seeds)]
        console.print(f"quadratic, momentum {momentum:g}: {seeds} seeds done")
        drift = max(one["drift"] for one in found)
        for name in CANDIDATES:
            errors = [one["errors"][name] for one in found if one["errors"][name] is not None]
            if errors:
                rows.append(_quadratic_row(name, momentum=momentum, errors=errors, drift=drift))
    return rows


def _quadratic_row(
    name: str, *, momentum: float, errors: Sequence[float], drift: float
) -> dict[str, Any]:
    median = statistics.median(errors)
    return {
        "candidate": name,
        "momentum": momentum,
        "seeds": len(errors),
        "median_error": round(median, 4),
        "largest_error": round(max(errors), 4),
        "drift": round(drift, 5),
        "met": median <= GOAL and drift < LARGEST_DRIFT,
    }
