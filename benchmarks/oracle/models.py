"""Small models of the kinds that people train; plain PyTorch, always with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Branching",
    "Checkpointed",
    "JointSyncBatchNorm",
    "Rivals",
    "Tied",
    "branching",
    "checkpointed",
    "jointly_normalized",
    "normalized",
    "perceptron",
    "rivals",
    "rivals_loss",
    "tied",
]

WIDTH = 24


def perceptron() -> nn.Module:
    """Return a network with one hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))


def normalized() -> nn.Module:
    """Return a network with batch statistics."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*layers)


def jointly_normalized() -> nn.Module:
    """Return the same network with batch statistics of all ranks."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), JointSyncBatchNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """Two layers with one weight, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.there = nn.Linear(WIDTH, WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 10)
        self.back.weight = self.there.weight

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = torch.tanh(self.there(torch.tanh(self.first(images))))
        return self.last(torch.tanh(self.there(torch.tanh(self.back(hidden)))))


def tied() -> nn.Module:
    """Return a model with a tied weight and a shared layer."""
    torch.manual_seed(0)
    return Tied()


class Branching(nn.Module):
    """A layer that some micro-batches use, one that hardly any uses, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.some = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, indices: Tensor) -> Tensor:
        """Return the logits; indices decide what is used."""
        hidden = torch.tanh(self.first(images))
        if bool((indices % 11 == 0).any()):
            hidden = hidden + torch.tanh(self.some(hidden))
        if bool((indices % 151 == 0).any()):
            hidden = hidden + torch.tanh(self.rare(hidden))
        return self.last(hidden)


def branching() -> nn.Module:
    """Return a model whose parameters are not all used."""
    torch.manual_seed(0)
    return Branching()


class Checkpointed(nn.Module):
    """A module whose middle layers are computed again in backward.

    Args:
        layers: first layer, those in the middle, and last.
        reentrant: which of the two kinds of checkpointing.
    """

    def __init__(self, layers: nn.Sequential, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = layers
        self._reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.layers[0](images)
        for layer in list(self.layers)[1:-1]:
            hidden = checkpoint(layer, hidden, use_reentrant=self._reentrant)
        return self.layers[-1](hidden)


def checkpointed() -> nn.Sequential:
    """Return layers deep enough to be checkpointed."""
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(64, WIDTH), *middle, nn.Linear(WIDTH, 10))


class Rivals(nn.Module):
    """One network that makes images, and one that judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64))
        self.judge = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of two losses, each of one network's parameters alone."""
        made = self.maker(images[:, 26:32])
        judged = self.judge(images), self.judge(made.detach())
        loss = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
        self.judge.requires_grad_(False)
        loss = loss + F.softplus(-self.judge(made)).mean()
        self.judge.requires_grad_(True)
        return loss


def rivals() -> nn.Module:
    """Return two networks in one module; large weights, so that the samples' gradients differ."""
    torch.manual_seed(0)
    model = Rivals()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(2.0 if name.endswith("weight") else 1.0)
    return model


def rivals_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of both."""
    return model(batch[0])


class _Sum(torch.autograd.Function):
    """A tensor's sum over the ranks, and the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class JointSyncBatchNorm(nn.BatchNorm1d):
    """SyncBatchNorm's arithmetic on the CPU, where torch has none.

    Statistics and their gradients are summed over the ranks, as torch's own kernels do on a GPU.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalized over all ranks."""
        if not self.training:
            return super().forward(input)
        sums = torch.cat([input.new_full((1,), len(input)), input.sum(0), input.square().sum(0)])
        if dist.is_initialized():
            sums = cast("Tensor", _Sum.apply(sums))
        count = sums[0].detach()
        mean, mean_square = (sums[1:] / count).chunk(2)
        variance = mean_square - mean.square()
        self._follow(mean.detach(), (variance * count / (count - 1)).detach())
        return (input - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
