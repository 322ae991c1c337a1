"""A model is sharded over one mesh after another in its own place, and nothing is kept twice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_job import FLOAT64, build, oracle, session_of, train, weights_of, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import run_workers

from elastane import GlobalBatch, WeightAverage
from elastane._compat import HashStore
from elastane.elastic.cut import cut, put_together
from elastane.elastic.resharding import Resharding
from elastane.errors import ArgumentError, UnsupportedError

GRID = GlobalBatch(24, micro_batches=6)


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Ties two weights, and has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.there = nn.Linear(5, 5)
        self.back = nn.Linear(5, 5)
        self.back.weight = self.there.weight
        self.last = nn.Linear(5, 3)
        self.register_buffer("shift", torch.arange(3.0, dtype=FLOAT64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.there(torch.tanh(self.first(inputs))))
        return self.last(torch.tanh(self.back(hidden))) + self.shift


def shard(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def net() -> Net:
    torch.manual_seed(0)
    model = Net().to(FLOAT64)
    model.last.bias.requires_grad_(False)
    model.there.eval()
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: Net) -> torch.optim.Optimizer:
    own = {id(p) for p in model.first.parameters()}
    others = [p for p in reversed(list(model.parameters())) if id(p) not in own]
    groups = [{"params": others, "lr": 0.02}, {"params": list(model.first.parameters())}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


# The model that users hold


def test_a_model_that_is_sharded_and_then_sharded_anew_trains_as_the_bare_one() -> None:
    inputs = torch.randn(7, 6, dtype=FLOAT64)
    bare, model = net(), net()
    optimizers = optimizer_of(bare), optimizer_of(model)  # in another order than the model's
    for one, optimizer in zip((bare, model), optimizers, strict=True):
        trained(one, optimizer, inputs)
    with mesh_of_one() as mesh:
        reshard = Resharding(model, optimizer=optimizers[1], shard=shard)
        reshard(mesh)
        for one, optimizer in zip((bare, model), optimizers, strict=True):
            trained(one, optimizer, inputs)
        state = {"model": model.state_dict(), "optimizer": optimizers[1].state_dict()}
        part = cut(state, num_parts=1, wanted=[0])[0]
        reshard(mesh)
        names = [{id(p): n for n, p in one.named_parameters()} for one in (model, bare)]
        own, others = optimizers[1].param_groups, optimizers[0].param_groups
        for new, old in zip(own, others, strict=True):
            ordered = [names[0][id(p)] for p in new["params"]]
            assert ordered == [names[1][id(p)] for p in old["params"]]
        filled = put_together(part, mesh=mesh, device=torch.device("cpu"))
        model.load_state_dict(filled["model"])
        model.shift.copy_(bare.shift)
        optimizers[1].load_state_dict(filled["optimizer"])
        for one, optimizer in zip((bare, model), optimizers, strict=True):
            trained(one, optimizer, inputs)
        assert torch.equal(weights_of(model), weights_of(bare))
        assert torch.equal(model(inputs), bare(inputs))
        assert model.back.weight is model.there.weight
        assert [m.training for m in model.modules()] == [m.training for m in bare.modules()]
        frozen = [p.requires_grad for p in model.parameters()]
        assert frozen == [p.requires_grad for p in bare.parameters()]


def test_neither_bare_weights_nor_earlier_shards_stay_in_memory() -> None:
    inputs = torch.randn(7, 6, dtype=FLOAT64)
    model = net()
    optimizer = optimizer_of(model)
    trained(model, optimizer, inputs)
    gc.collect()
    gc.disable()  # what a cycle holds counts as kept
    try:
        with mesh_of_one() as mesh:
            held = [bytes_held()]
            reshard = Resharding(model, optimizer=optimizer, shard=shard)
            for _ in range(3):
                reshard(mesh)
                trained(model, optimizer, inputs)
                held.append(bytes_held())
    finally:
        gc.enable()
    of_weights = sum(p.numel() for p in model.parameters()) * 8
    assert held[2] == held[1] == held[3]
    assert held[1] - held[0] < of_weights / 2


def bytes_held() -> int:
    """Return the memory of all float64 tensors that are alive, each storage once."""
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    storages = [
        t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.dtype == FLOAT64
    ]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


# Sessions whose workers stay


def work(steps: int) -> dict[str, Any]:
    """Train a model of another seed on each rank; rank 0's weights are for all."""
    model = build(seed=dist.get_rank() if dist.is_initialized() else 0)
    session, _ = session_of(model, batch=GRID, shard=shard_in_three)
    with session:
        record = train(session, steps=steps)
        return record | {"by the user's name": weights_of(model)}


def shard_in_three(model: Any, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_that_stay_shard_rank_0s_model_and_train_as_one(
    tmp_path: Path, world_size: int
) -> None:
    wanted = oracle(GRID, world_size=1, steps=10)
    for record in run_workers(work, 10, world_size=world_size, folder=tmp_path, timeout_s=500):
        for name in ("gain", "norm"):
            assert record[name] == pytest.approx(wanted[name], rel=1e-9)
        assert torch.allclose(record["weights"], wanted["weights"], rtol=1e-9, atol=1e-12)
        assert torch.equal(record["by the user's name"], record["weights"])


def test_an_average_that_was_whole_is_split_as_the_model_is() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    average = WeightAverage(model, decay=0.5)
    state = {"version": 1, "position": 8, "progress": 1.0, "weights": {}}
    values = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    average.load_state_dict(state | {"weights": values})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mesh_of_one() as mesh:
        Resharding(model, optimizer=optimizer, shard=lambda m, mesh: fully_shard(m, mesh=mesh))(
            mesh
        )
        present = {name: whole(p) for name, p in model.named_parameters()}
        with average.applied():
            assert {name: whole(p) for name, p in model.named_parameters()}.keys() == values.keys()
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter), values[name])
        assert all(torch.equal(whole(p), present[n]) for n, p in model.named_parameters())
        assert all(isinstance(weight, DTensor) for weight in average.weights.values())


# What is refused


def test_a_model_that_is_sharded_already_is_not_sharded_by_the_session() -> None:
    with mesh_of_one() as mesh:
        model = fully_shard(nn.Linear(64, 10).to(FLOAT64), mesh=mesh)
        with pytest.raises(ArgumentError, match="sharded already"):
            session_of(model, shard=shard)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 10), nn.SyncBatchNorm(10)), "all workers' batches"),
        (lambda: torch.compile(nn.Linear(64, 10), backend="eager"), "compiled already"),
    ],
)
def test_what_a_model_sharded_anew_would_lose_is_refused(model: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        session_of(model(), shard=shard)


def test_arguments_of_ddp_are_refused_with_a_model_that_the_session_shards() -> None:
    with pytest.raises(ArgumentError, match="ddp"):
        session_of(build(), shard=shard, ddp={"find_unused_parameters": True})


def test_what_shards_must_be_a_function() -> None:
    with pytest.raises(ArgumentError, match="shard"):
        session_of(build(), shard="fsdp")


def test_a_function_that_leaves_parameters_out_is_told_so() -> None:
    session, _ = session_of(build(), shard=lambda m, mesh: fully_shard(m[0], mesh=mesh))
    with pytest.raises(UnsupportedError, match="is not sharded"), session:
        pass
