"""Checkpoints of sharded runs: whole, for any number of ranks, and for plain torch alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_torch import read_by_torch_alone
from sharded_job import build, oracle, session_of, shard, train, weights_of
from workers import run_workers

from elastane import Checkpointing, GlobalBatch
from elastane.elastic.checkpoint import CheckpointStore
from elastane.elastic.whole import gathered

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

GRID = GlobalBatch(24, micro_batches=6)  # steps that don't depend on the number of ranks


def resumed(
    kind: str, world_size: int, folder: Path, *, steps: int, total: float, every: int
) -> dict[str, Any]:
    """Go on for so many steps from what the folder holds."""
    model = build(seed=1 if list(folder.glob("step-*")) else 0)
    if kind != "bare":
        model = shard(model, kind, world_size=world_size)
    average = Average(model)
    session, optimizer = session_of(
        model,
        batch=GRID,
        num_steps=total,
        checkpoint=Checkpointing(every_s=None, every_steps=every, folder=folder),
        stateful={"average": average},
    )
    with session:
        before = session.position
        average.update_parameters(model)
        record = train(session, steps=steps)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    parts = gathered(momenta, keep=True)
    flat = torch.cat([one.reshape(-1) for one in parts])
    found = {"before": before, "after": session.position, "momenta": flat}
    return record | found | {"average": average.total()}


class Average:
    """A state of the user's own that holds shards."""

    def __init__(self, model: Any) -> None:
        self._sum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    @torch.no_grad()
    def update_parameters(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            self._sum[name] += parameter

    def total(self) -> torch.Tensor:
        return torch.cat([one.reshape(-1) for one in gathered(list(self._sum.values()), keep=True)])

    def state_dict(self) -> dict[str, Any]:
        return {"sum": dict(self._sum)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["sum"].items():
            self._sum[name].copy_(value)


def run(kind: str, world_size: int, kept: Path, **options: Any) -> list[dict[str, Any]]:
    work = partial(resumed, kind, world_size, kept, **options)
    return run_workers(work, world_size=world_size, folder=kept.parent, timeout_s=600)


def test_a_sharded_run_goes_on_with_another_number_of_ranks_and_loads_without_elastane(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    wanted = oracle(GRID, world_size=1, steps=40)
    done, position, average = 0, 0, weights_of(build())
    for kind, world_size in (("fsdp", 2), ("fsdp", 3), ("fsdp", 2), ("bare", 1)):
        records = run(kind, world_size, kept, steps=10, total=1e9, every=10)
        for record in records:
            assert record["before"] == position
            assert torch.equal(record["weights"], records[0]["weights"])
        assert torch.allclose(records[0]["average"], average, rtol=1e-12)
        average += records[0]["weights"]
        position = records[0]["after"]
        done += 10
        assert records[0]["gain"] == pytest.approx(wanted["gain"][done - 10 : done], rel=1e-9)
        if done == 30:
            newest = CheckpointStore(kept).newest()
            assert newest is not None
            read = read_by_torch_alone(newest.path, build, folder=tmp_path)
            assert torch.equal(read["weights"], records[0]["weights"])
            assert torch.equal(read["momenta"], records[0]["momenta"])
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=1e-9, atol=1e-12)


def test_a_sharded_run_of_two_copies_ends_with_a_last_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    records = run("hsdp", 4, kept, steps=1000, total=12.0, every=5)
    steps = len(records[0]["gain"])
    newest = CheckpointStore(kept).newest()
    assert newest is not None
    assert newest.manifest.step == steps
    assert steps % 5
    state, _ = CheckpointStore(kept).load(newest)
    saved = torch.cat([one.reshape(-1) for one in state["model"].values()])
    assert torch.equal(saved, records[0]["weights"])
