"""LANS against its formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from elastane.errors import ArgumentError, UnsupportedError
from elastane.lans import LANS


def norm(values):
    return math.sqrt(sum(one * one for one in values))


def block(direction, x, *, decay):
    decayed = [d + decay * one for d, one in zip(direction, x, strict=True)]
    if norm(x) == 0 or norm(decayed) == 0:
        return decayed
    return [norm(x) / norm(decayed) * one for one in decayed]


def twin(x, gradients, *, lr, betas, eps, decay):
    """Algorithm 2 of the paper in plain floats, of one block."""
    first, second = betas
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, g in enumerate(gradients, start=1):
        unit = [one / norm(g) if norm(g) else 0.0 for one in g]
        m = [first * a + (1 - first) * b for a, b in zip(m, unit, strict=True)]
        v = [second * a + (1 - second) * b * b for a, b in zip(v, unit, strict=True)]
        root = [math.sqrt(one / (1 - second**t)) + eps for one in v]
        by_mean = [a / (1 - first**t) / r for a, r in zip(m, root, strict=True)]
        by_gradient = [a / r for a, r in zip(unit, root, strict=True)]
        moves = zip(block(by_mean, x, decay=decay), block(by_gradient, x, decay=decay), strict=True)
        x = [one - lr * (first * a + (1 - first) * b) for one, (a, b) in zip(x, moves, strict=True)]
    return x


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("start", ["random", "zero"])
def test_steps_are_those_of_the_paper(decay, start):
    torch.manual_seed(0)
    shape, options = (3, 2), {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}
    first = torch.randn(shape).double() if start == "random" else torch.zeros(shape).double()
    gradients = [torch.randn(shape).double() * scale for scale in (1, 100, 0, 1e-3, 2)]
    weight = nn.Parameter(first.clone())
    optimizer = LANS([weight], weight_decay=decay, **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    wanted = twin(
        first.flatten().tolist(), [g.flatten().tolist() for g in gradients], decay=decay, **options
    )
    assert weight.detach().flatten().tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_the_scale_of_the_gradient_does_not_matter():
    steps = []
    for scale in (1.0, 1e4):
        weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = LANS([weight], lr=0.1)
        for gradient in ([0.5, 1.0], [-1.0, 0.2]):
            weight.grad = torch.tensor(gradient) * scale
            optimizer.step()
        steps.append(weight.detach())
    assert torch.allclose(*steps, rtol=1e-6)


def test_a_saved_state_goes_on_to_the_bit_and_loads_safely(tmp_path):
    def run(optimizer, weight, gradients):
        for gradient in gradients:
            weight.grad = torch.tensor(gradient)
            optimizer.step()

    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = LANS([weight], lr=0.1)
    run(optimizer, weight, [[0.5, 1.0]])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    again = nn.Parameter(weight.detach().clone())
    resumed = LANS([again], lr=0.1)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for one, other in ((optimizer, weight), (resumed, again)):
        run(one, other, [[-1.0, 0.2], [0.3, 0.3]])
    assert torch.equal(weight, again)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = LANS([weight], lr=0.1, weight_decay=0.0)

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr"),
        ({"eps": -1.0}, "eps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_what_breaks_a_rule_is_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        LANS([nn.Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        LANS(layer.parameters()).step()
