"""The oracle: momentum SGD under AdaScale written out, in one process and in float64.

Holds every micro-batch's gradient and follows the formulas. Plain PyTorch; must not know elastane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.oracle.adam import AdamState, adam_descend, preconditioned
from benchmarks.oracle.formulas import Averages, Ramp, gain_of, ramped
from benchmarks.oracle.job import (
    AVERAGE,
    BASE_BATCH,
    Batch,
    Group,
    Job,
    MicroBatch,
    Trace,
    Window,
    digits,
    schedule,
)
from benchmarks.oracle.joint import joint_gradients

__all__ = ["follow"]

Gradient = Mapping[str, Tensor]
"""A gradient by the names of the parameters that were used."""


@dataclass(slots=True)
class _State:
    """All that one step hands to the next."""

    averages: list[Averages]
    ramps: list[Ramp]
    progress: float = 0.0
    step: int = 0
    velocity: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    first_statistics: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    adam: AdamState = field(default_factory=AdamState)


def follow(job: Job, windows: Iterable[Window]) -> Trace:
    """Train on the samples of the windows, and return what it comes to."""
    model = job.model().double()
    parameters = dict(model.named_parameters())
    start = _vector(parameters)
    num_groups = len(job.groups) if job.gain_per_group else 1
    state = _State([Averages() for _ in range(num_groups)], [Ramp() for _ in range(num_groups)])
    state.first_statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gains, moments, batches = [], [], []
    for window in windows:
        if window.number not in job.poisoned:
            batches.append(float(sum(len(one.indices) for one in window.micro_batches)))
            known = _known(state.averages)
            moments.append(None if known is None else _sum(known))
            gains.append(_step(job, model, window, state=state))
    return Trace(
        gains=gains,
        moments=moments,
        batches=batches,
        weights=_vector(parameters),
        start=start,
        others=_others(job, state),
    )


def _step(job: Job, model: nn.Module, window: Window, *, state: _State) -> float:
    """Make one step, and return its gain."""
    batches = [_samples(job, micro_batch) for micro_batch in window.micro_batches]
    gradients = _gradients(job, model, window.micro_batches, batches, state=state)
    samples = float(sum(len(micro_batch.indices) for micro_batch in window.micro_batches))
    given = [job.weight(batch) for batch in batches]
    weights = [weight * samples / sum(given) for weight in given]
    mean = _mean(gradients, weights)

    gain, factors, progress = _decide(job, state, samples=samples, nominal=window.nominal_samples)
    if state.step % job.measured_every == 0:
        _measure(job, state, gradients, weights, mean)
    multiplier = schedule(state.progress)
    buffers = _each([ramp.buffer for ramp in state.ramps], len(job.groups))
    each = _each(factors, len(job.groups))
    for group, factor, buffer in zip(job.groups, each, buffers, strict=True):
        lr, clipped = group.lr * multiplier * factor, _clipping(mean, job.max_norm)
        if job.adam is not None:
            adam_descend(
                job.adam,
                state.adam,
                group=group,
                model=model,
                mean=mean,
                clipped=clipped,
                gradients=gradients,
                weights=weights,
                lr=lr,
                scale=window.nominal_samples / BASE_BATCH,
                worth=progress / factor,
            )
            continue
        force = {name: clipped * value for name, value in mean.items()}
        _descend(group, model, force, lr=lr, velocity=state.velocity, buffer=buffer)
    if job.average_decay is not None:
        keep = job.average_decay ** (samples / BASE_BATCH)
        for name, parameter in model.named_parameters():
            before = state.average.get(name, parameter.detach())
            state.average[name] = keep * before + (1 - keep) * parameter.detach()
    state.progress += progress
    state.step += 1
    return gain


def _samples(job: Job, micro_batch: MicroBatch) -> Batch:
    images, labels = digits(job.num_samples)
    indices = torch.tensor(micro_batch.indices)
    return images[indices], labels[indices], indices


def _gradients(
    job: Job,
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    batches: Sequence[Batch],
    *,
    state: _State,
) -> list[dict[str, Tensor]]:
    """Return each micro-batch's gradient of its mean loss, of the parameters that were used."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(job.trains(name, state.step))
    if job.joint_norm:
        ranks = [micro_batch.rank for micro_batch in micro_batches]
        weights = [job.weight(batch) for batch in batches]
        return joint_gradients(model, batches, ranks=ranks, weights=weights)
    gradients = []
    for micro_batch, batch in zip(micro_batches, batches, strict=True):
        _use_statistics_of(micro_batch.rank, model, state)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        loss = job.loss(model, batch)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named, found, strict=True)
        gradients.append({name: value for name, value in pairs if value is not None})
    return gradients


def _use_statistics_of(rank: int, model: nn.Module, state: _State) -> None:
    """Have the model's buffers be one rank's: each worker has running statistics of its own."""
    if rank not in state.statistics:
        state.statistics[rank] = {name: b.clone() for name, b in state.first_statistics.items()}
    for path, value in state.statistics[rank].items():
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, value)


def _mean(gradients: Sequence[Gradient], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return `g = sum w_i g_i / sum w_i`; what a micro-batch does not use counts as zero."""
    mean: dict[str, Tensor] = {}
    for gradient, weight in zip(gradients, weights, strict=True):
        for name, value in gradient.items():
            mean[name] = mean.get(name, torch.zeros_like(value)) + weight * value / sum(weights)
    return mean


def _measure(
    job: Job,
    state: _State,
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    mean: Gradient,
) -> None:
    """Add the step's raw moments to each group's averages; one gradient tells none."""
    number, samples = sum(weight > 0 for weight in weights), sum(weights)
    if job.adam is not None and job.adam.preconditions:
        gradients = [preconditioned(job.adam, state.adam, one) for one in gradients]
        mean = preconditioned(job.adam, state.adam, mean)
    if number < 2 or not mean:
        return
    steps = job.measured_every if state.step else 1  # that the sample stands for
    theta = max(1 - samples / BASE_BATCH / 1000, 0.9) ** steps
    prefixes = [group.prefix for group in job.groups] if job.gain_per_group else [""]
    for averages, prefix in zip(state.averages, prefixes, strict=True):
        pairs = zip(gradients, weights, strict=True)
        weighted = sum(weight * _sqr_norm(gradient, prefix) for gradient, weight in pairs)
        of_mean = _sqr_norm(mean, prefix)
        variance = (weighted - samples * of_mean) / (number - 1)
        averages.add(variance, of_mean - variance / samples, theta=theta)


def _sqr_norm(gradient: Gradient, prefix: str) -> float:
    values = [v.square().sum() for name, v in gradient.items() if name.startswith(prefix)]
    return float(sum(values))


def _known(averages: Sequence[Averages]) -> list[tuple[float, float]] | None:
    if not averages[0].weight:
        return None
    return [(one.variance / one.weight, one.sqr_norm / one.weight) for one in averages]


def _sum(moments: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(s for s, _ in moments), sum(m for _, m in moments)


def _decide(
    job: Job, state: _State, *, samples: float, nominal: float
) -> tuple[float, list[float], float]:
    """Return gain, factors and progress from the moments of earlier steps."""
    known = _known(state.averages)
    scale, usual = samples / BASE_BATCH, nominal / BASE_BATCH
    if known is None:
        gain, targets, lasting = 1.0, [1.0] * len(state.ramps), [1.0] * len(state.ramps)
    else:
        gain = gain_of(*_sum(known), scale=scale)
        targets = [gain_of(*moments, scale=scale) for moments in known]
        lasting = [gain_of(*moments, scale=usual) for moments in known]
    if job.adam is not None:
        targets, lasting = [math.sqrt(one) for one in targets], [math.sqrt(one) for one in lasting]
    pairs = zip(state.ramps, lasting, strict=True)
    held = [ramped(ramp, target, batch=nominal) / target for ramp, target in pairs]
    factors = [target * share for target, share in zip(targets, held, strict=True)]
    return gain, factors, gain * sum(min(share, 1.0) for share in held) / len(held)


def _clipping(gradient: Gradient, max_norm: float | None) -> float:
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (math.sqrt(_sqr_norm(gradient, "")) + 1e-6))


@torch.no_grad()
def _descend(
    group: Group,
    model: nn.Module,
    gradient: Gradient,
    *,
    lr: float,
    velocity: dict[str, Tensor],
    buffer: float,
) -> None:
    """Take `u <- m c u + g + d w`, `w <- w - lr u`; what has no gradient only takes `u <- c u`.

    Args:
        group: whose parameters move.
        model: the model.
        gradient: `g`.
        lr: of this step.
        velocity: `u` by name.
        buffer: `c`.
    """
    for name, parameter in model.named_parameters():
        if name in velocity and name.startswith(group.prefix):
            velocity[name] = buffer * velocity[name]
        if name in gradient and name.startswith(group.prefix):
            force = gradient[name] + group.weight_decay * parameter
            before = velocity.get(name, torch.zeros_like(force))
            velocity[name] = group.momentum * before + force
            parameter -= lr * velocity[name]


def _each(factors: Sequence[float], count: int) -> Sequence[float]:
    return list(factors) * count if len(factors) == 1 else factors


def _vector(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).clone()


def _others(job: Job, state: _State) -> dict[str, Tensor]:
    others = {}
    if job.average_decay is not None:
        others[AVERAGE] = _vector(state.average)
    for rank, statistics in state.statistics.items():
        for name, value in statistics.items():
            if value.ndim:
                others[f"rank {rank} {name}"] = value
    return others
