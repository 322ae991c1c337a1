"""Noise scale from one gradient a step, beside the truth and beside two gradients a step.

    python -m benchmarks.single [--json PATH|-] [--seeds N] [--steps N] [--digits-steps N]

On a quadratic whose noise is known, and on the digits of `examples/digits`, where the two halves
of each batch are measured beside the batch, on one trajectory and with the same averages.
`layers` is what a session takes. The others were tried and are not offered: `pair`, the gradient
of the step before as a second sample; `lag 2`, that of two steps before; `buffer`, the momentum
buffer in its place, which would need no memory.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.output import write_json
from elastane import __version__
from elastane.layers import LayerNorms
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

CANDIDATES = ("layers", "pair", "lag 2", "buffer")
MOMENTA = (0.0, 0.9)
DIGITS_SCALES = (1, 16)
NUM_READINGS = 20
GOAL_QUADRATIC, GOAL_DIGITS, LARGEST_DRIFT = 0.10, 1.5, 0.01
_DIMENSION, _BATCH, _LR, _NOISE = 2_000, 16, 2e-4, 10.0


# Estimators


def pair_moments(gradient: Tensor, other: Tensor, *, product: float, batch: int) -> Moments:
    """Return `s = B |g - g'|^2 / 2` and `mu^2 = g.g'`: two gradients as if at the same weights."""
    distance = _dot(gradient, gradient) + _dot(other, other) - 2 * product
    return Moments(variance=batch / 2 * distance, sqr_norm=product)


def _dot(left: Tensor, right: Tensor) -> float:
    return float(left.double() @ right.double())


@dataclass(kw_only=True)
class Estimators:
    """All candidates on one trajectory; each keeps what it needs of the past."""

    batch: int
    momentum: float
    smoothing: float
    averages: dict[str, MomentAverage] = field(
        default_factory=lambda: dict.fromkeys(CANDIDATES, MomentAverage())
    )
    _past: list[Tensor] = field(default_factory=list)
    _buffer: Tensor | None = None
    _weight: float = 0.0

    def see(self, gradient: Tensor, *, by_layers: Moments) -> None:
        """Take a step's gradient, and what its layers said."""
        self._take("layers", by_layers)
        for name, other in zip(("pair", "lag 2"), reversed(self._past), strict=False):
            self._take(name, self._paired(gradient, other, product=_dot(gradient, other)))
        buffer = self._buffer
        if buffer is not None and self.momentum:
            product = _dot(gradient, buffer) / self._weight
            self._take("buffer", self._paired(gradient, gradient, product=product))
        self._buffer = gradient if buffer is None else self.momentum * buffer + gradient
        self._weight = self.momentum * self._weight + 1
        self._past = [*self._past[-1:], gradient]

    def _paired(self, gradient: Tensor, other: Tensor, *, product: float) -> Moments:
        return pair_moments(gradient, other, product=product, batch=self.batch)

    def _take(self, name: str, moments: Moments) -> None:
        self.averages[name] = self.averages[name].updated(moments, smoothing=self.smoothing)

    def noise_scales(self) -> dict[str, float | None]:
        """Return each candidate's noise scale, `None` where it has none to tell."""
        read = {name: average.read() for name, average in self.averages.items()}
        return {name: None if one is None else noise_scale(one) for name, one in read.items()}


@dataclass(kw_only=True)
class Watched:
    """A model whose weights are one vector, its mean gradient, and what its layers say of it."""

    model: nn.Module

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())
        self._layers = LayerNorms(self.model)
        self.weights = torch.cat([one.detach().reshape(-1) for one in self._parameters])
        parts = self.weights.split([one.numel() for one in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)

    def gradient(self, inputs: Tensor, targets: Tensor, loss: Any) -> Tensor:
        """Return the gradient of the mean loss."""
        parts = torch.autograd.grad(loss(self.model(inputs), targets), self._parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    def told(self, inputs: Tensor, targets: Tensor, loss: Any) -> tuple[Tensor, Moments]:
        """Return the gradient of the mean loss, and the moments that the layers tell."""
        self.model.zero_grad()
        with self._layers.watching():
            self._layers.begin(len(inputs))
            loss(self.model(inputs), targets).backward()
            told = self._layers.told([self._parameters], loss_scale=1.0, scale_of_gradients=1.0)
        moments = self._layers.moments([float(one) for one in told], batch_samples=len(inputs))
        assert moments is not None
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        return torch.cat([one.reshape(-1) for one in gradients]), moments[0]


# The quadratic


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
    variance = _NOISE * _BATCH * _dot(curvature * start, curvature * start)
    deviation = math.sqrt(variance / _dot(curvature, curvature))
    along_noise = float((curvature**3).sum() / (curvature**2).sum())
    estimators = Estimators(batch=_BATCH, momentum=momentum, smoothing=smoothing(1.0))
    truth, drifts, buffer = MomentAverage(), [], torch.zeros_like(task.weights)
    inputs = torch.zeros(_BATCH, 1)
    for _ in range(num_steps):
        mean = curvature * task.weights[_DIMENSION:]
        moments = Moments(variance=variance, sqr_norm=_dot(mean, mean))
        truth = truth.updated(moments, smoothing=smoothing(1.0))
        along = _dot(mean, curvature * mean) / moments.sqr_norm / (1 - momentum)
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
        "met": median <= GOAL_QUADRATIC and drift < LARGEST_DRIFT,
    }


# The digits


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
        weighted_sqr_norm=batch / 2 * (_dot(first, first) + _dot(second, second)),
        mean_sqr_norm=_dot(mean, mean),
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
        "met": largest <= GOAL_DIGITS,
    }


def _rounded(value: float) -> float | None:
    """Return a number for JSON, which knows no infinity."""
    return round(value, 3) if math.isfinite(value) else None


# The program


def draw(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return rows as a table, without their lists."""
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "candidate" else "right")
    for row in rows:
        shown = ("infinite" if row[name] is None else row[name] for name in names)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in shown))
    return table


@click.command(help="Compare noise scales from one gradient a step with known and with usual ones.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(0))
@click.option("--steps", default=200, show_default=True, type=click.IntRange(3))
@click.option("--digits-steps", default=2_500, show_default=True, type=click.IntRange(0))
def main(json_path: str | None, seeds: int, steps: int, digits_steps: int) -> None:
    console = Console(stderr=True)
    result: dict[str, Any] = {
        "benchmark": "single",
        "steps": steps,
        "digits_steps": digits_steps,
        "quadratic": [],
        "digits": [],
        "versions": {
            "elastane": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if seeds:
        result["quadratic"] = quadratic_rows(seeds, num_steps=steps, console=console)
        console.print(draw(f"Quadratic, goal {GOAL_QUADRATIC:g}", result["quadratic"]))
    for scale in DIGITS_SCALES if digits_steps else ():
        rows = digits_rows(scale, num_steps=digits_steps, seed=0)
        result["digits"] += rows
        console.print(draw(f"Digits beside two samples, goal {GOAL_DIGITS:g}", rows))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
