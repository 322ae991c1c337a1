"""Sharded models whose workers change in place: the state is cut anew, and nothing else changes."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_audit import audit, check_events, discarded
from plain_torch import read_by_torch_alone
from supervisor import Record, Supervisor, supervising
from test_elastic_membership import wait_blocked
from torch import nn

from elastane.elastic.checkpoint import CheckpointStore
from elastane.telemetry import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TOLERANCE = 1e-9  # float64; the order of sums differs with the number of workers
CHUNK = 160
FLOAT64 = torch.float64


def alone(folder: Path, **options: Any) -> tuple[list[Record], Record]:
    """Return the steps and the end of a run that one worker makes with the model whole."""
    folder.mkdir()
    with supervising(folder) as supervisor:
        supervisor.begin(1, **options)
        assert supervisor.exit_code(1) == 0
        return supervisor.records(1, "step"), supervisor.records(1, "end")[0]


def resize(supervisor: Supervisor, **options: Any) -> list[Record]:
    """Have 2 workers become 3 and then 2 others, at gates; return the committed steps."""
    supervisor.start(3, **options, chunk=CHUNK)
    supervisor.begin(1, 2, **options, chunk=CHUNK)
    supervisor.wait_ready(3)
    supervisor.wait_held(0, 1, 2)
    supervisor.open_gate(0)
    supervisor.wait_held(1, 1, 2)
    supervisor.publish(1, 2, 3)
    supervisor.open_gate(1)
    supervisor.wait_held(2, 1, 2, 3)
    supervisor.publish(2, 3, cause="leave", dismissed=(1,))
    supervisor.open_gate(2)
    for gate in range(3, 100):
        supervisor.open_gate(gate)
    assert [supervisor.exit_code(worker) for worker in (1, 2, 3)] == [0, 0, 0]
    return audit(supervisor)


def test_a_sharded_model_goes_from_2_workers_to_3_to_2_in_place_and_ends_as_without(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"batch": "grid", "num_steps": 240, "dtype": "float64", "width": 25}
    options |= {"seed": 7, "schedule": "cosine", "average_decay": 0.98, "checkpoint_every": 25}
    steps, end = alone(tmp_path / "alone", **options)
    (tmp_path / "resized").mkdir()
    with supervising(tmp_path / "resized") as supervisor:
        committed = resize(supervisor, **options, sharded=True)
        check_events(supervisor, committed)
        assert discarded(supervisor) == []
        assert supervisor.complaints(1, 2, 3) == []
        openings = supervisor.all_records("generation")
        ends = supervisor.all_records("end")
        events = read_events(supervisor.folder / "run")
    assert [one["world_size"] for one in sorted(openings, key=lambda one: one["generation"])] == (
        [2] * 2 + [3] * 3 + [2] * 2
    )
    digests = {step["position"]: step["digest"] for step in committed}
    for opening in openings:
        if opening["position"]:
            assert opening["digest"] == digests[opening["position"]]
    for name in ("norm", "gain", "progress", "lr", "loss"):
        found = [step[name] for step in committed]
        assert found == pytest.approx([step[name] for step in steps], rel=TOLERANCE), name
    assert len(ends) == 2
    for one in ends:
        for name in ("weights", "optimizer", "average"):
            difference = torch.tensor(one[name]) - torch.tensor(end[name])
            assert difference.abs().max() < TOLERANCE, name
    changes = [event for event in events if event["event"] == "membership"]
    assert [(one["cause"], one["world_size"]) for one in changes] == [("join", 3), ("leave", 2)]
    print("pauses in s:", *((one["cause"], one["pause_s"]) for one in changes))

    newest = CheckpointStore(tmp_path / "resized" / "run" / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.step == len(committed)
    read = read_by_torch_alone(newest.path, bare, folder=tmp_path)
    assert read["weights"].tolist() == ends[0]["weights"]
    assert read["momenta"].tolist() == ends[0]["optimizer"]


def test_workers_change_right_after_an_evaluation_which_leaves_whole_weights_behind(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"batch": "grid", "num_steps": 120, "dtype": "float64", "seed": 7}
    _, end = alone(tmp_path / "alone", **options)
    (tmp_path / "resized").mkdir()
    with supervising(tmp_path / "resized") as supervisor:
        supervisor.open_gate("evaluation")
        resize(supervisor, **options, sharded=True, evaluate_every=1)
        ends = supervisor.all_records("end")
    assert len(ends) == 2
    for one in ends:
        for name in ("weights", "optimizer"):
            difference = torch.tensor(one[name]) - torch.tensor(end[name])
            assert difference.abs().max() < TOLERANCE, name


def test_a_sharded_model_is_whole_on_one_worker_and_spread_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": "grid", "num_steps": 200, "dtype": "float64"}
    options |= {"seed": 7, "optimizer": "adam", "rule": "linear"}
    _, end = alone(tmp_path / "alone", **options)
    (tmp_path / "resized").mkdir()
    with supervising(tmp_path / "resized") as supervisor:
        options |= {"sharded": True, "chunk": CHUNK}
        supervisor.start(2, **options)
        supervisor.begin(1, **options)
        supervisor.wait_ready(2)
        for gate, members, dismissed in ((0, (1, 2), ()), (1, (2,), (1,)), (2, (2, 3), ())):
            if gate == 1:
                supervisor.start(3, **options)
                supervisor.wait_ready(3)
            supervisor.wait_held(gate, *supervisor.generation.members)
            supervisor.publish(*members, dismissed=dismissed)
            supervisor.open_gate(gate)
        for gate in range(3, 100):
            supervisor.open_gate(gate)
        assert [supervisor.exit_code(worker) for worker in (1, 2, 3)] == [0, 0, 0]
        committed = audit(supervisor)
        assert discarded(supervisor) == []
        assert supervisor.complaints(1, 2, 3) == []
        openings = supervisor.all_records("generation")
        ends = supervisor.all_records("end")
    digests = {step["position"]: step["digest"] for step in committed}
    later = [opening for opening in openings if opening["position"]]
    assert [one["digest"] for one in later] == [digests[one["position"]] for one in later]
    assert {one["world_size"] for one in later} == {1, 2}
    for one, name in product(ends, ("weights", "optimizer")):
        difference = torch.tensor(one[name]) - torch.tensor(end[name])
        assert difference.abs().max() < TOLERANCE, name


def test_a_joiner_that_does_not_come_to_the_meeting_costs_sharded_workers_nothing(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"sharded": True, "dtype": "float64", "seed": 7}
    with supervising(tmp_path) as supervisor:
        supervisor.start(3, **options)
        supervisor.begin(1, 2, **options)
        supervisor.wait_ready(3)
        supervisor.let_train(1)
        supervisor.send_signal(signal.SIGSTOP, 3)
        supervisor.publish(1, 2, 3)
        wait_blocked(supervisor, 1)
        supervisor.change(1, 2)
        supervisor.let_train(1, 2)
        supervisor.finish()
        audit(supervisor)
        assert discarded(supervisor) == []


def test_all_that_is_sharded_goes_into_one_checkpoint_when_everybody_leaves(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"sharded": True, "checkpoint_every": 1000}
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, 2, **options)
        supervisor.let_train(1, 2)
        supervisor.publish(cause="stop", dismissed=(1, 2))
        assert [supervisor.exit_code(worker) for worker in (1, 2)] == [0, 0]
        assert supervisor.complaints(1, 2) == []
        last = max(supervisor.all_records("step"), key=lambda step: step["step"])
        supervisor.begin(3, 4, 5, **options)
        supervisor.let_train(3, steps=2)
        supervisor.finish()
        begun = supervisor.records(3, "generation")[0]
        audit(supervisor)
    assert (begun["position"], begun["digest"]) == (last["position"], last["digest"])


def test_running_statistics_of_sharded_workers_are_merged_when_one_joins(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sharded": True, "batch_norm": True, "step_s": 0.01}
    with supervising(tmp_path) as supervisor:
        supervisor.start(3, **options)
        supervisor.begin(1, 2, **options)
        supervisor.wait_ready(3)
        supervisor.let_train(1, 2, steps=3)
        supervisor.change(1, 2, 3)
        supervisor.let_train(3, steps=3)
        supervisor.finish()
        audit(supervisor)
        openings = supervisor.all_records("generation")
        steps = supervisor.records(1, "step"), supervisor.records(2, "step")
    before = [[one for one in own if one["generation"] == 1][-1]["statistics"] for own in steps]
    after = [one["statistics"] for one in openings if one["generation"] == 2]
    means = torch.tensor([of_worker[0] for of_worker in before]).mean(0)
    assert len(after) == 3
    assert before[0] != before[1]
    for of_worker in after:
        assert torch.allclose(torch.tensor(of_worker[0]), means, rtol=1e-6)


def test_the_loss_of_a_shard_ends_all_workers_and_others_go_on_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"sharded": True, "checkpoint_every": 5, "step_s": 0.01}
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, 2, 3, **options)
        supervisor.let_train(1, 2, steps=15)
        supervisor.kill(2)
        supervisor.publish(1, 3, cause="death", lost=(2,))
        assert all(supervisor.exit_code(worker) != 0 for worker in (1, 3))
        supervisor.begin(4, 5, **options)
        supervisor.let_train(4, steps=2)
        supervisor.finish()
        begun = supervisor.records(4, "generation")[0]
        audit(supervisor)
    of_saved = [one["digest"] for one in supervisor.records(1, "step") if one["step"] % 5 == 0]
    assert begun["digest"] in of_saved


def bare() -> nn.Module:
    layers = [nn.Linear(64, 25), nn.Tanh(), nn.Linear(25, 10)]
    return nn.Sequential(*layers).to(FLOAT64)
