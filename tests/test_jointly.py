"""The weights around SyncBatchNorm: what goes in is multiplied, what comes out divided again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import Digits, session_over

from benchmarks.oracle.models import JointSyncBatchNorm, jointly_normalized
from elastane import AdaScale, GlobalBatch, Linear, LocalBatch
from elastane.batching import World
from elastane.errors import UsageError
from elastane.jointly import communicates_in_forward, weighted_joint_norms


class Doubling(JointSyncBatchNorm):
    """Mixes gradients as if another worker, whose weight is 1, asked for the same again."""

    def forward(self, input):
        output = super().forward(input)
        if output.requires_grad:
            output.register_hook(
                lambda grad: grad + torch.linspace(0, 3, grad.numel()).view_as(grad)
            )
        return output


def gradients(model, *, share=None):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 64), torch.arange(6)
    model.zero_grad()
    if share is None:
        F.cross_entropy(model(inputs), targets).backward()
    else:
        with weighted_joint_norms(model, share=lambda: share):
            F.cross_entropy(model(inputs), targets).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("share", [0.25, 1.0, 3.0])
def test_alone_the_weight_cancels_for_every_parameter(share):
    model = jointly_normalized()
    wanted = gradients(model)
    for own, right in zip(gradients(model, share=share), wanted, strict=True):
        assert torch.allclose(own, right, rtol=1e-5, atol=1e-7)


def test_what_others_ask_for_counts_by_their_weight_over_ones_own():
    model = nn.Sequential(Doubling(64), nn.Linear(64, 10))
    torch.manual_seed(0)
    one, twice = (gradients(model, share=share)[:2] for share in (1.0, 2.0))
    alone = gradients(nn.Sequential(JointSyncBatchNorm(64), model[1]))[:2]
    for first, second, own in zip(one, twice, alone, strict=True):
        assert (first - own).abs().max() > 0.1
        assert torch.allclose(second - own, (first - own) / 2, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_frozen_at_first_is_weighted_when_it_trains():
    model = jointly_normalized()
    model[1].requires_grad_(False)
    with weighted_joint_norms(model, share=lambda: 3.0):
        model(torch.randn(4, 64)).sum().backward()
        model[1].requires_grad_(True)
        own = gradients(model)
    wanted = gradients(model)
    for one, right in zip(own, wanted, strict=True):
        assert torch.allclose(one, right, rtol=1e-5, atol=1e-7)


def test_nothing_is_left_on_the_model_after_the_block():
    model = jointly_normalized()
    gradients(model, share=3.0)
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks
    assert not model[1].weight._backward_hooks


def test_a_micro_batch_of_no_weight_is_refused():
    model = jointly_normalized()
    session = session_over(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=Digits(),
        num_steps=10,
        batch=GlobalBatch(16, micro_batches=2),
    )
    with session, pytest.raises(UsageError, match="weight 0 can't be left out where SyncBatchNorm"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels), weight=0)
            session.step()


def test_layers_of_other_libraries_are_known_by_their_name():
    class ApexSyncBatchNorm(nn.BatchNorm1d):
        pass

    assert communicates_in_forward(nn.Sequential(ApexSyncBatchNorm(3)))
    assert communicates_in_forward(nn.Sequential(nn.Sequential(nn.SyncBatchNorm(3))))
    assert not communicates_in_forward(nn.Sequential(nn.BatchNorm1d(3)))


@pytest.mark.parametrize(("rule", "warned"), [(AdaScale(), True), (Linear(), False)], ids=repr)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rule_that_looks_at_the_gain_is_warned_of_where_workers_are_tied(
    rule, warned, world_size, monkeypatch
):
    world = World(rank=0, world_size=world_size)
    monkeypatch.setattr("elastane.assembly.discover_world", lambda: world)
    model = jointly_normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = pytest.warns(UserWarning, match="the noise measured between them is too large")
    with told if warned and world_size > 1 else nullcontext():
        session_over(
            model,
            optimizer=optimizer,
            num_steps=10,
            batch=LocalBatch(16, micro_batches=2),
            rule=rule,
        )
