"""Adam written out for the oracle, with moments that know their own weight.

Written from the mathematics alone, in float64; must not know elastane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.oracle.job import BASE_BATCH, Adam, Group

__all__ = ["AdamState", "adam_descend", "preconditioned"]

Gradient = Mapping[str, Tensor]


@dataclass(slots=True)
class AdamState:
    """Sums of gradients and of squares by name, and the weight in each of them."""

    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    first_weight: dict[str, float] = field(default_factory=dict)
    second_weight: dict[str, float] = field(default_factory=dict)


def preconditioned(adam: Adam, state: AdamState, gradient: Gradient) -> Gradient:
    """Return `g / (sqrt v + eps)`, of the parameters that have a `v` already."""
    return {
        name: value / ((state.second[name] / state.second_weight[name]).sqrt() + adam.eps)
        for name, value in gradient.items()
        if name in state.second
    }


@torch.no_grad()
def adam_descend(
    adam: Adam,
    state: AdamState,
    *,
    group: Group,
    model: nn.Module,
    mean: Gradient,
    clipped: float,
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    lr: float,
    scale: float,
    worth: float,
) -> None:
    """Take one step of Adam with decoupled decay.

    Args:
        adam: its numbers at the base batch.
        state: its moments.
        group: whose parameters move.
        model: the model.
        mean: `g`,
        clipped: and what it, and each gradient, is multiplied by.
        gradients: of the micro-batches,
        weights: and their weights, which add up to the batch.
        lr: of this step.
        scale: nominal batch over the base batch.
        worth: base steps that the step is worth, over the factor on the learning rate.
    """
    keep = adam.beta1**scale if adam.first_follows else adam.beta1
    keep_squares = adam.beta2**scale if adam.second_follows else adam.beta2
    eps = adam.eps / math.sqrt(scale) if adam.eps_follows else adam.eps
    decay = group.weight_decay * worth if adam.decay_follows else group.weight_decay
    for name, parameter in model.named_parameters():
        if name not in mean or not name.startswith(group.prefix):
            continue
        force = mean[name] * clipped
        squares = force.square()
        if adam.base_squares and len(gradients) > 1:
            squares = _of_base_batches([g[name] * clipped for g in gradients], weights)
        for sums, weight, new, kept in (
            (state.first, state.first_weight, force, keep),
            (state.second, state.second_weight, squares, keep_squares),
        ):
            sums[name] = kept * sums.get(name, torch.zeros_like(new)) + (1 - kept) * new
            weight[name] = kept * weight.get(name, 0.0) + 1 - kept
        root = (state.second[name] / state.second_weight[name]).sqrt()
        parameter *= 1 - lr * decay
        parameter -= lr * (state.first[name] / state.first_weight[name]) / (root + eps)


def _of_base_batches(gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return what the squares of base batches' gradients are expected to be."""
    batch = sum(weights)
    pairs = list(zip(gradients, weights, strict=True))
    mean = sum((weight * one for one, weight in pairs), torch.zeros_like(gradients[0])) / batch
    deviations = [weight * (one - mean).square() for one, weight in pairs]
    variance = sum(deviations, torch.zeros_like(mean)) / (len(pairs) - 1)
    return (mean.square() + variance * (1 / BASE_BATCH - 1 / batch)).clamp(min=0)
