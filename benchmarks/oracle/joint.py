"""The oracle's gradients where batch statistics are those of all ranks together.

Plain PyTorch for one small model, written out; must not know elastane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.oracle.job import Batch

__all__ = ["joint_gradients"]


def joint_gradients(
    model: nn.Module, batches: Sequence[Batch], *, ranks: Sequence[int], weights: Sequence[float]
) -> list[dict[str, Tensor]]:
    """Return what of the mean loss's gradient went through each micro-batch, for a mean of them.

    The ranks' first micro-batches are normalized together, then their second ones, and so on. With
    `L = sum w_j L_j / sum w` the gradient through micro-batch i, times `sum w / w_i`.

    Args:
        model: linear, batch norm, tanh, linear.
        batches: the micro-batches of all ranks.
        ranks: whose they are.
        weights: of their mean losses.
    """
    found: list[dict[str, Tensor]] = [{} for _ in batches]
    turns = [ranks[:place].count(rank) for place, rank in enumerate(ranks)]
    for turn in range(max(turns) + 1):
        places = [place for place, at in enumerate(turns) if at == turn]
        each = [_leaves(model) for _ in places]
        losses = _losses([batches[place] for place in places], each)
        shares = torch.tensor([weights[place] for place in places], dtype=torch.float64)
        total = shares @ torch.stack(losses)
        for place, parameters in zip(places, each, strict=True):
            grads = torch.autograd.grad(total, list(parameters.values()), retain_graph=True)
            through = [grad / weights[place] for grad in grads]
            found[place] = dict(zip(parameters, through, strict=True))
    return found


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def _losses(batches: Sequence[Batch], each: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Return the ranks' mean losses; each computes with parameters of its own."""
    hidden = [
        F.linear(batch[0], own["0.weight"], own["0.bias"])
        for batch, own in zip(batches, each, strict=True)
    ]
    together = torch.cat(hidden)
    mean, variance = together.mean(0), together.var(0, correction=0)
    losses = []
    for batch, own, part in zip(batches, each, hidden, strict=True):
        normal = (part - mean) / torch.sqrt(variance + 1e-5) * own["1.weight"] + own["1.bias"]
        output = F.linear(torch.tanh(normal), own["3.weight"], own["3.bias"])
        losses.append(F.cross_entropy(output, batch[1]))
    return losses
