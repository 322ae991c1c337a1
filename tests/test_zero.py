"""ZeroRedundancyOptimizer in a session: it trains, saves and resumes as a plain optimizer does."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from training import Digits, build_model, session_over, train, weights_of
from workers import run_workers

from elastane import AdamScale, Checkpointing, GlobalBatch, Session
from elastane._env import ElasticLaunch
from elastane.elastic.checkpoint import CheckpointStore
from elastane.errors import UnsupportedError
from elastane.optim import scale_momentum
from elastane.zero import is_zero

FLOAT64 = torch.float64
SAVED_AT, NUM_STEPS = 6, 12


def zero(parameters: Any, optimizer_class: Any = SGD, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own import of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, optimizer_class, **options)


def session_of(model: nn.Module, optimizer: Any, **options: Any) -> Session:
    defaults: dict[str, Any] = {
        "dataset": Digits(304, dtype=FLOAT64),
        "num_steps": 60,
        "batch": GlobalBatch(16, micro_batches=4),
        "schedule": lambda progress: 0.99**progress,
    }
    return session_over(model, optimizer=optimizer, **(defaults | options))


def run_of(model: nn.Module, optimizer: Any, *, steps: int, **options: Any) -> dict[str, Any]:
    with session_of(model, optimizer, **options) as session:
        return train(session, max_steps=steps)


def groups_of(model: Any) -> list[dict[str, Any]]:
    first = {"params": list(model[0].parameters()), "lr": 0.1}
    return [first, {"params": list(model[2].parameters()), "lr": 0.02}]


def plain_and_zero(optimizer_class: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the records of both, the second with what the parts of the wrapper hold."""
    records = []
    for wrapped in (False, True):
        model = build_model(FLOAT64)
        make = (lambda groups, **o: zero(groups, optimizer_class, **o)) if wrapped else None
        optimizer = (make or optimizer_class)(groups_of(model), **options)
        rule = {"rule": AdamScale()} if optimizer_class is AdamW else {}
        movers = {"schedule": CosineAnnealingLR(optimizer, T_max=60)}
        record = run_of(model, optimizer, steps=NUM_STEPS, **rule, **movers)
        record["lrs"] = [group["lr"] for group in optimizer.param_groups]
        if wrapped:
            record["held"] = sum(
                value.numel() > 1
                for state in optimizer.optim.state.values()
                for value in state.values()
            )
            record["copies"] = len(optimizer.state)
        records.append(record)
    return records


def with_plain_beside() -> list[dict[str, Any]]:
    records = []
    for wrapped in (False, True):
        model: Any = build_model(FLOAT64)
        first = (zero if wrapped else SGD)(model[0].parameters(), lr=0.1, momentum=0.9)
        pair = [first, SGD(model[2].parameters(), lr=0.02, momentum=0.9)]
        records.append(run_of(model, pair, steps=NUM_STEPS))
    return records


def skipping() -> dict[str, Any]:
    """Make the first step's gradients infinite on one rank, under a scaler."""
    model = build_model(FLOAT64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session = session_of(model, zero(model.parameters(), lr=0.1, momentum=0.9), scaler=scaler)
    moved: list[bool] = []
    with session:
        for images, labels, _ in session:
            before = weights_of(model)
            loss = F.cross_entropy(session.model(images), labels)
            poisoned = not moved and session.world.rank == 1
            session.backward(loss * float("inf") if poisoned else loss)
            if session.step() is not None:
                moved.append(not torch.equal(weights_of(model), before))
                if len(moved) == 3:
                    break
    return {"moved": moved, "scale": scaler.get_scale(), "weights": weights_of(model)}


def saving(folder: Path, *, steps: int, seed: int = 0) -> dict[str, Any]:
    model = build_model(FLOAT64, seed=seed)
    optimizer = zero(groups_of(model), momentum=0.9)
    checkpoint = Checkpointing(every_s=None, every_steps=steps, folder=folder)
    record = run_of(model, optimizer, steps=steps, checkpoint=checkpoint)
    record["copies"] = len(optimizer.state)
    return record


def refusals() -> dict[str, str]:
    said = {}
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for name, options in {
        "overlap": {"overlap_with_ddp": True},
        "group": {"process_group": group},
    }.items():
        model = build_model(FLOAT64)
        try:
            session_of(model, zero(model.parameters(), lr=0.1, **options), schedule=None)
        except UnsupportedError as error:
            said[name] = str(error)
    return said


def all_runs(folder: Path) -> dict[str, Any]:
    found = {
        "sgd": plain_and_zero(SGD, momentum=0.9, weight_decay=1e-3),
        "adamw": plain_and_zero(AdamW),
        "beside": with_plain_beside(),
        "skipping": skipping(),
        "whole": saving(folder / "whole", steps=NUM_STEPS),
        "first": saving(folder / "parts", steps=SAVED_AT),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "parts", folder / "kept")
    dist.barrier()
    found["rest"] = saving(folder / "parts", steps=NUM_STEPS - SAVED_AT, seed=1)
    found["refusals"] = refusals()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    return run_workers(all_runs, folder, world_size=2, folder=folder, timeout_s=110)


processes = pytest.mark.processes


# BC-45
@processes
@pytest.mark.parametrize("name", ["sgd", "adamw", "beside"])
def test_it_trains_as_the_plain_optimizer_to_the_bit(runs: Any, name: str) -> None:
    for plain, wrapped in (run[name] for run in runs):
        assert max(plain["gain"]) > 1
        for key in ("gain", "progress", "lr", "loss", "position", "grad_norm"):
            assert wrapped[key] == plain[key], key
        assert torch.equal(wrapped["weights"], plain["weights"])
        assert plain.get("lrs") == wrapped.get("lrs")


@processes
def test_each_worker_holds_the_state_of_its_part_only(runs: Any) -> None:
    held = [run["sgd"][1]["held"] for run in runs]
    assert sum(held) == 4
    assert min(held) > 0


@processes
def test_a_step_that_is_not_finite_on_one_worker_is_skipped_on_all(runs: Any) -> None:
    for run in runs:
        assert run["skipping"]["moved"] == [False, True, True]
        assert run["skipping"]["scale"] == 2.0**9
        assert torch.equal(run["skipping"]["weights"], runs[0]["skipping"]["weights"])


@processes
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(runs: Any) -> None:
    for run in runs:
        assert run["rest"]["gain"] == run["whole"]["gain"][SAVED_AT:]
        assert torch.equal(run["rest"]["weights"], run["whole"]["weights"])
        assert run["rest"]["copies"] == 0


@processes
def test_its_checkpoint_is_the_plain_optimizers_in_plain_torch_and_in_another_world(
    runs: Any, folder: Path
) -> None:
    store = CheckpointStore(folder / "kept", keep=3)
    newest = store.newest()
    assert newest is not None
    state, _ = store.load(newest)
    model = build_model(FLOAT64, seed=2)
    optimizer = SGD(groups_of(model), lr=0.1, momentum=0.9)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())

    checkpoint = Checkpointing(every_s=None, every_steps=SAVED_AT, folder=folder / "kept")
    alone = build_model(FLOAT64, seed=3)
    optimizer = SGD(groups_of(alone), lr=0.1, momentum=0.9)
    record = run_of(alone, optimizer, steps=NUM_STEPS - SAVED_AT, checkpoint=checkpoint)
    whole = runs[0]["whole"]
    assert record["gain"] == pytest.approx(whole["gain"][SAVED_AT:], rel=1e-10)
    assert torch.allclose(record["weights"], whole["weights"], rtol=0, atol=1e-11)


@processes
def test_forms_that_can_not_be_measured_or_saved_are_refused_by_name(runs: Any) -> None:
    for run in runs:
        assert "overlap_with_ddp=True) steps inside DDP's backward" in run["refusals"]["overlap"]
        assert "a group of 1 workers and the session 2" in run["refusals"]["group"]


@pytest.fixture
def group_of_one() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_under_elastane_run_it_is_refused_and_fsdp2_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"store": "localhost:1", "job": "j", "worker": 0, "agent": "a", "slot": 0}
    launch = ElasticLaunch(**said, run_dir=str(tmp_path), expected_workers=2, max_workers=4)
    for name, value in launch.environment().items():
        monkeypatch.setenv(name, value)
    model = build_model(FLOAT64)
    with pytest.raises(UnsupportedError, match=r"shard the model with FSDP2 \(fully_shard\)"):
        session_of(model, zero(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("group_of_one")
def test_a_sharded_model_wants_a_plain_optimizer() -> None:
    model: Any = build_model(FLOAT64)
    optimizer = zero(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(UnsupportedError, match="pass a plain optimizer in place of"):
        session_of(model, optimizer)


@pytest.mark.usefixtures("group_of_one")
def test_on_one_worker_it_is_the_plain_optimizer() -> None:
    plain, wrapped = plain_and_zero(SGD, momentum=0.9)
    assert torch.equal(wrapped["weights"], plain["weights"])
    assert is_zero(zero(build_model().parameters(), lr=0.1))
    assert not is_zero(SGD(build_model().parameters(), lr=0.1))


@pytest.mark.usefixtures("group_of_one")
def test_its_momentum_buffers_are_scaled_where_they_are_held() -> None:
    plain, wrapped = build_model(FLOAT64), build_model(FLOAT64)
    moved = []
    for model, make in ((plain, SGD), (wrapped, zero)):
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scale_momentum(optimizer, [0.25])
        optimizer.step()
        moved.append(weights_of(model))
    assert torch.equal(*moved)
    assert torch.allclose(moved[0], weights_of(build_model(FLOAT64)) - 0.1 * (1 + 1.225))
