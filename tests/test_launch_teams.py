"""A real job of workers that have several processes each: what becomes of it when one is killed."""

from __future__ import annotations

import json
import os
import signal
import uuid
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from sharded_job import build, weights_of
from team_job import hash_of
from test_launch import Run, is_alive

from elastane.elastic.checkpoint import CheckpointStore
from elastane.launch.folder import newest_generation
from elastane.protocol import Generation

SCRIPT = Path(__file__).parent / "team_job.py"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("test_launch.LIMIT_S", 240.0)
    one = Run(tmp_path / f"run-{uuid.uuid4().hex[:8]}")
    yield one
    for pids in team_pids(one).values():
        for pid in pids:
            if is_alive(pid):
                os.killpg(pid, signal.SIGKILL)
    one.close()


def team_pids(run: Run) -> dict[int, list[int]]:
    """Return the processes of each worker."""
    found = {}
    for path in (run.run_dir / "agents").glob("*.json"):
        for one in json.loads(path.read_text()).values():
            found[one["worker"]] = [one["pid"], *(each["pid"] for each in one["followers"])]
    return found


def step_of(run: Run) -> int:
    return run.status()["step"] or 0


def wait_for_members(run: Run, *members: int) -> Generation:
    run.until(lambda: set(newest_generation(run.run_dir).members) == {*members})
    return newest_generation(run.run_dir)


def test_a_job_of_two_copies_goes_on_with_one_and_gets_another(run, tmp_path):
    stop = tmp_path / "stop"
    run.start("--workers", "1:2", "--group-size", 2, script=(SCRIPT, stop)).meet()
    begun = wait_for_members(run, 1, 2)
    before = team_pids(run)
    assert {len(pids) for pids in before.values()} == {2}
    run.until(lambda: step_of(run) > 5)
    stays, dies = begun.members
    os.kill(before[dies][1], signal.SIGKILL)
    death = run.generation(begun.number + 1)
    assert (death.members, death.cause, death.lost) == ((stays,), "death", (dies,))
    wait_for_members(run, stays, 3)
    assert not is_alive(before[dies][0])
    assert team_pids(run)[stays] == before[stays]
    reached = step_of(run)
    run.until(lambda: step_of(run) > reached + 5)
    stop.touch()
    assert run.wait() == 0, run.text()
    ends = [line.split("END ")[1] for line in run.text().splitlines() if "END" in line]
    assert len(ends) == 4
    assert len({*ends}) == 1
    _, world_size, weights = ends[0].split()
    assert world_size == "4"
    newest = CheckpointStore(run.run_dir / "checkpoints").newest()
    assert newest is not None
    bare = build(seed=9)
    state = {"model": bare.state_dict()}
    with warnings.catch_warnings():  # torch says that it is alone
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=newest.path)
    bare.load_state_dict(state["model"])
    assert hash_of(weights_of(bare)) == weights
