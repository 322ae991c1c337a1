"""Sharded models whose workers change in place: the state is cut anew, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_audit import audit, check_events, discarded
from supervisor import Record, Supervisor, supervising

from elastane.telemetry import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TOLERANCE = 1e-9  # float64; the order of sums differs with the number of workers
CHUNK = 160


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
    options |= {"seed": 7, "schedule": "cosine", "average_decay": 0.98}
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
    assert all(one["pause_s"] >= 0 for one in changes)
    print("pauses:", *(f"{one['cause']} {one['pause_s']:.3f} s" for one in changes))
