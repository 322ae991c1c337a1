"""What a session makes of sharded models in one process, and which of them it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_job import build, session_of, train, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from training import session_over

from elastane import GlobalBatch, Measuring
from elastane._env import ElasticLaunch
from elastane.batching import LocalBatch, World
from elastane.elastic.checkpoint import CheckpointStore
from elastane.errors import UnsupportedError
from elastane.planning import InStep, plan_step
from elastane.sharding import is_sharded, local_of, sharding_of, units_of

IN_STEP: tuple[InStep | None, ...] = (None, "company")


@pytest.fixture
def mesh() -> Any:
    """A mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_model_that_is_sharded_over_one_worker_trains_as_the_bare_one(mesh: DeviceMesh) -> None:
    records = []
    for sharded in (False, True):
        model: Any = build()
        if sharded:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        session, _ = session_of(model, batch=GlobalBatch(24, micro_batches=4))
        with session:
            records.append(train(session, steps=20))
    bare, shard = records
    assert max(bare["gain"]) > 1
    assert shard["gain"] == pytest.approx(bare["gain"], rel=1e-11)
    assert torch.allclose(shard["weights"], bare["weights"], rtol=1e-11)


def test_a_parameter_belongs_to_the_innermost_unit_around_it(mesh: DeviceMesh) -> None:
    model: Any = build()
    assert not is_sharded(model)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    units = {name: parameters for name, _, parameters in units_of(model)}
    assert list(units) == ["", "2"]
    assert [id(p) for p in units["2"]] == [id(p) for p in model[2].parameters()]
    assert len(units[""]) == 4


def test_a_shards_local_part_shares_its_memory(mesh: DeviceMesh) -> None:
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    local_of(model.weight).fill_(3.0)
    assert torch.equal(model.weight.full_tensor(), torch.full((2, 2), 3.0))


def test_a_parameter_that_is_left_out_is_named(mesh: DeviceMesh) -> None:
    model: Any = build()
    fully_shard(model[2], mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"model\.0\.weight is not sharded.*model last"):
        session_of(model)


def test_another_split_than_over_the_workers_once_is_named(mesh: DeviceMesh) -> None:
    model: Any = fully_shard(build(), mesh=mesh)
    weight = distribute_tensor(torch.zeros(13, 64), mesh, [Replicate()])
    model[0].weight = nn.Parameter(weight)
    with pytest.raises(UnsupportedError, match=r"model\.0\.weight has the placements"):
        sharding_of(model, world_size=1)


def test_a_mesh_of_other_ranks_or_of_whole_copies_is_named(mesh: DeviceMesh) -> None:
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"ranks \[0\] and the session has 2 workers"):
        sharding_of(model, world_size=2)
    names = ("replicate", "shard")
    flat = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
    with pytest.raises(UnsupportedError, match="shard dimension of 1"):
        session_of(fully_shard(build(), mesh=flat))


def test_a_unit_of_several_groups_or_of_none_is_named(mesh: DeviceMesh) -> None:
    model: Any = fully_shard(build(), mesh=mesh)
    session, _ = session_of(model, groups=True, measuring=Measuring(per="param_group"))
    with pytest.raises(UnsupportedError, match=r"parameters of model are in several groups"):
        session.__enter__()
    model = fully_shard(build(), mesh=mesh)
    session = session_over(
        model, optimizer=torch.optim.SGD(list(model.parameters())[1:], lr=0.1), num_steps=5
    )
    with pytest.raises(UnsupportedError, match="not in the optimizer: freeze it"):
        session.__enter__()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_workers_in_step_have_as_many_micro_batches_and_the_same_samples(world_size: int) -> None:
    policy = GlobalBatch(26, micro_batches=5)
    for position in (0, 286):
        plans = [
            [
                plan_step(
                    policy,
                    position=position,
                    num_samples=301,
                    world=World(rank=rank, world_size=world_size),
                    in_step=in_step,
                ).micro_batches
                for rank in range(world_size)
            ]
            for in_step in IN_STEP
        ]
        most = max(len(one) for one in plans[0])
        assert [len(one) for one in plans[1]] == [most] * world_size
        for loose, even in zip(*plans, strict=True):
            counted = [one for one in even if one.weight]
            assert counted == [one for one in loose if one.weight]
            assert even[: len(counted)] == tuple(counted)
            assert len({id(one) for one in even}) == most


def test_workers_in_step_change_nothing_where_all_have_the_same_number() -> None:
    for rank in range(3):
        world = World(rank=rank, world_size=3)
        plans = [
            plan_step(
                LocalBatch(8, micro_batches=2),
                position=0,
                num_samples=301,
                world=world,
                in_step=in_step,
            )
            for in_step in IN_STEP
        ]
        assert plans[0] == plans[1]


def test_under_elastane_run_a_sharded_model_has_workers_that_stay_and_says_so(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"store": "localhost:1", "job": "j", "worker": 0, "agent": "a", "slot": 0}
    launch = ElasticLaunch(**said, run_dir=str(tmp_path), expected_workers=2, max_workers=4)
    for name, value in launch.environment().items():
        monkeypatch.setenv(name, value)
    model: Any = fully_shard(build(), mesh=mesh)
    with pytest.warns(UserWarning, match="any change of the workers ends all of them"):
        session, _ = session_of(model, batch=GlobalBatch(24, micro_batches=4), num_steps=3.0)
    assert session.world.world_size == 1
    with session:
        steps = len(train(session, steps=100)["gain"])
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.step == steps
    state, _ = CheckpointStore(tmp_path / "checkpoints").load(newest)
    weights = [whole(parameter) for parameter in model.parameters()]
    assert all(map(torch.equal, state["model"].values(), weights))
