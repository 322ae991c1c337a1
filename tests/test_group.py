"""The model's wrapper over a group: letting go of it."""

from __future__ import annotations

from datetime import timedelta
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import run_workers

from elastane.errors import CommunicationError
from elastane.gradients import GradientTap
from elastane.group import Wrapping
from elastane.peers import Breaker, Peers
from elastane.replica import Replica

INPUTS = torch.ones(2, 3)


def backward(model):
    model(INPUTS).sum().backward()
    return model.inner.weight.grad


def catch_a_thread_in_the_wrapper():
    model = Replica(nn.Linear(3, 1))
    tap = GradientTap([list(model.parameters())])
    wrapping = Wrapping(model, tap=tap, ddp={})
    breaker = Breaker()
    wrapping.use(Peers(dist.group.WORLD, breaker=breaker))
    tap.begin(batch_samples=4.0)
    tap.begin_micro_batch(2.0)
    backward(model)
    tap.settle()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():  # alive, and taking no part
        store.wait(["done"], timedelta(seconds=60))
        return None
    Timer(0.2, breaker.give_up, args=("a peer hangs",)).start()
    with pytest.raises(CommunicationError, match="a peer hangs"):
        wrapping.settle()
    wrapping.drop()
    model.zero_grad()
    gradient = backward(model)
    store.set("done", "")
    return gradient


def freeze(model):
    model.inner[0].bias.requires_grad_(False)


def add_a_layer(model):
    model.inner.append(nn.Linear(3, 1))


def replace_a_layer(model):
    model.inner[0] = nn.Linear(3, 3)


def replace_a_parameter(model):
    model.inner[1].weight = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    "change", [freeze, add_a_layer, replace_a_layer, replace_a_parameter, lambda _model: None]
)
def test_the_model_is_wrapped_anew_when_other_parameters_train(change):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Replica(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        wrapping = Wrapping(model, tap=GradientTap([list(model.parameters())]), ddp={})
        wrapping.use(Peers(dist.group.WORLD))
        before = wrapping._wrapper
        change(model)
        wrapping.refresh()
        trainable = [p for p in model.inner.parameters() if p.requires_grad]
        assert (wrapping._wrapper is before) == (len(trainable) == 4 and change.__name__[0] == "<")
        wrapped = {id(p) for p in wrapping._wrapper._module_parameters}
        assert wrapped >= {id(p) for p in trainable}
    finally:
        wrapping.drop()
        dist.destroy_process_group()


# [22]
@pytest.mark.processes
def test_a_wrapper_in_which_a_thread_is_caught_holds_up_no_later_backward(tmp_path):
    gradient, _ = run_workers(
        catch_a_thread_in_the_wrapper, world_size=2, folder=tmp_path, timeout_s=30
    )
    assert gradient.tolist() == [[2.0, 2.0, 2.0]]
