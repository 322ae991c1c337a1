"""The large-batch optimizers of another library, number by number against their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.optimizers.catalogue import CATALOGUE

Vector = list[float]


def norm(values: Vector) -> float:
    return math.sqrt(sum(one * one for one in values))


def lars(x: Vector, gradients: list[Vector], *, lr: float, decay: float) -> Vector:
    """You, Gitman, Ginsburg (2017), algorithm 1, with the coefficient and momentum of the row."""
    trust, momentum = 0.02, 0.9
    velocity = [0.0] * len(x)
    for g in gradients:
        length, own = norm(x), norm(g)
        local = trust * length / (own + decay * length) if length and own else 1.0
        force = [local * (a + decay * b) for a, b in zip(g, x, strict=True)]
        velocity = [momentum * a + b for a, b in zip(velocity, force, strict=True)]
        x = [a - lr * b for a, b in zip(x, velocity, strict=True)]
    return x


def lamb(x: Vector, gradients: list[Vector], *, lr: float, decay: float) -> Vector:
    """You et al. (2020), algorithm 2, with phi(z) = min(z, 10)."""
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, g in enumerate(gradients, start=1):
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        c1, c2 = 1 - 0.9**t, 1 - 0.999**t
        u = [a / c1 / (math.sqrt(b / c2) + 1e-30) for a, b in zip(m, v, strict=True)]
        # The library corrects neither moment: their common factor cancels in the ratio, but not
        # against the decay, so that is given in the library's units.
        u = [one * c1 / math.sqrt(c2) + decay * b for one, b in zip(u, x, strict=True)]
        ratio = min(norm(x), 10.0) / norm(u) if norm(x) and norm(u) else 1.0
        x = [a - lr * ratio * b for a, b in zip(x, u, strict=True)]
    return x


def novograd(x: Vector, gradients: list[Vector], *, lr: float, decay: float) -> Vector:
    """Ginsburg et al. (2019), algorithm 1."""
    m, v = [0.0] * len(x), 0.0
    for t, g in enumerate(gradients):
        v = 0.98 * v + 0.02 * norm(g) ** 2 if t else norm(g) ** 2
        force = [a / (math.sqrt(v) + 1e-8) + decay * b for a, b in zip(g, x, strict=True)]
        m = [0.95 * a + b for a, b in zip(m, force, strict=True)] if t else force
        x = [a - lr * b for a, b in zip(x, m, strict=True)]
    return x


def stepped(name: str, first: torch.Tensor, gradients: list[torch.Tensor], **more: Any) -> Vector:
    weight = nn.Parameter(first.clone())
    kind = CATALOGUE[name]
    holder = nn.ParameterList([weight])
    optimizer = kind.build(holder)
    for group in optimizer.param_groups:
        group.update(more)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach().flatten().tolist()


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(("name", "twin"), [("LARS", lars), ("LAMB", lamb), ("NovoGrad", novograd)])
def test_steps_are_those_of_the_paper(name, twin, decay):
    torch.manual_seed(0)
    first = torch.randn(4, 3).double()
    gradients = [torch.randn(4, 3).double() * scale for scale in (1, 30, 1e-2, 2, 5)]
    found = stepped(name, first, gradients, lr=0.05, weight_decay=decay)
    flat = [one.flatten().tolist() for one in gradients]
    wanted = twin(first.flatten().tolist(), flat, lr=0.05, decay=decay)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_lambs_first_step_is_as_long_as_the_learning_rate_says():
    """By the library's defaults it is ten times as long: `CATALOGUE` sets `adam_debias`."""
    first = torch.full((2, 2), 2.0).double()
    moved = stepped("LAMB", first, [torch.ones(2, 2).double()], lr=0.01, weight_decay=0.0)
    assert norm([2.0 - one for one in moved]) == pytest.approx(0.01 * norm([2.0] * 4), rel=1e-3)
