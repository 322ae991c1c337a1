"""Numbers under changes: weights, learning rate and progress are what they are without any.

Numbers in brackets are rows of docs/reports.md.
"""

from __future__ import annotations

import random

import pytest
import torch
from elastic_audit import audit, check_events, discarded
from supervisor import Supervisor, supervising

from elastane import Linear
from elastane.controller import StepController
from elastane.measuring import Measuring
from elastane.momentum import MomentumRamp

processes = pytest.mark.processes

BASE_LR, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-9
CHUNK = 160


class Cast:
    """Members of a job and those who wait, changed at random while training is held at a gate."""

    def __init__(self, supervisor: Supervisor, *members: int, spare: int, seed: int) -> None:
        self._supervisor = supervisor
        self._members = list(members)
        self._waiting: dict[int, int] = {spare: 1}  # worker -> how often it will have been ready
        self._times_ready = dict.fromkeys([*members, spare], 1)
        self._kills_left = 1
        self._random = random.Random(seed)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._members)

    def change(self, gate: int) -> None:
        """Have all come to a gate, publish a change, and open the gate."""
        self._supervisor.wait_held(gate, *self._members)
        can_join = bool(self._waiting) and len(self._members) < 4
        can_go = len(self._members) > 1
        self._random.choice([self._join] * can_join + [self._evict, self._kill] * can_go)()
        self._supervisor.open_gate(gate)
        self._supervisor.wait_entered()

    def _join(self) -> None:
        worker = self._random.choice(sorted(self._waiting))
        self._supervisor.wait_ready(worker, count=self._waiting.pop(worker))
        self._members.insert(self._random.randint(0, len(self._members)), worker)
        self._supervisor.publish(*self._members)

    def _evict(self) -> None:
        worker = self._members.pop(self._random.randrange(len(self._members)))
        self._times_ready[worker] += 1
        self._waiting[worker] = self._times_ready[worker]
        self._supervisor.publish(*self._members, cause="hang")

    def _kill(self) -> None:
        if self._kills_left == 0:
            return self._evict()
        self._kills_left -= 1
        worker = self._members.pop(self._random.randrange(len(self._members)))
        self._supervisor.kill(worker)
        self._supervisor.publish(*self._members, cause="death", lost=(worker,))


def undisturbed(folder, **options):
    """Return how a run ends that one worker makes alone."""
    folder.mkdir()
    with supervising(folder) as supervisor:
        supervisor.begin(1, **options)
        assert supervisor.exit_code(1) == 0
        return supervisor.records(1, "end")[0]


# [8] [13] [15] [22]
@processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("batch", "rule", "num_steps"), [("grid", "adascale", 400), ("global", "linear", 560)]
)
def test_weights_end_as_without_20_random_changes_where_the_batch_is_one(
    tmp_path, batch, rule, num_steps
):
    options = {"batch": batch, "rule": rule, "num_steps": num_steps, "num_samples": 293}
    options |= {"dtype": "float64", "seed": 7, "schedule": "cosine"}
    expected = undisturbed(tmp_path / "undisturbed", **options)
    (tmp_path / "changed").mkdir()
    with supervising(tmp_path / "changed") as supervisor:
        supervisor.start(4, **options, chunk=CHUNK)
        supervisor.wait_ready(4)
        supervisor.begin(1, 2, 3, **options, chunk=CHUNK)
        cast = Cast(supervisor, 1, 2, 3, spare=4, seed=5)
        for gate in range(20):
            cast.change(gate)
        for gate in range(20, 2 * num_steps * 8 // CHUNK):
            supervisor.open_gate(gate)
        assert [supervisor.exit_code(worker) for worker in cast.members] == [0] * len(cast.members)
        committed = audit(supervisor, num_samples=293)
        check_events(supervisor, committed)
        ends = [supervisor.records(worker, "end")[0] for worker in cast.members]
    assert len({step["generation"] for step in committed}) > 18
    assert len({step["world_size"] for step in committed}) > 2
    assert all(step["batch"] == 32 or step["position"] % 293 == 0 for step in committed)
    for end in ends:
        assert end["position"] == expected["position"]
        difference = torch.tensor(end["weights"]) - torch.tensor(expected["weights"])
        assert difference.abs().max() < TOLERANCE
        assert end["lr"] == pytest.approx(expected["lr"], abs=TOLERANCE)


def twin_of(committed, *, num_steps=1e9, milestones=()):
    """Return (lr, progress, scale) of each step as the formulas alone give them."""
    twin = StepController(
        Linear(),
        base_batch_size=8,
        num_steps=num_steps,
        compensation=MomentumRamp(),
        measuring=Measuring(),
    )
    rows = []
    for step in committed:
        decision = twin.decide(
            None,
            batch_samples=step["batch"],
            nominal_samples=8 * step["world_size"],
            momentum=MOMENTUM,
        )
        lr = BASE_LR
        for milestone in milestones:
            if int(twin.progress) >= milestone:
                lr *= 0.1
        twin.commit(decision)
        rows.append((lr * decision.factors[0], twin.progress, decision.scale))
    return rows


# BC-29
# [9] [23]
@processes
@pytest.mark.timeout(180)
def test_lr_and_progress_follow_the_formulas_and_20_resizes_lead_back_to_the_first_lr(tmp_path):
    with supervising(tmp_path) as supervisor:
        spare = range(4, 14)
        supervisor.start(*spare, rule="linear")
        supervisor.wait_ready(*spare)
        supervisor.begin(1, 2, 3, rule="linear")
        members = [1, 2, 3]
        for newcomer in spare:
            supervisor.let_train(members[-1], steps=3)
            gone = members.pop(0)
            supervisor.change(*members, cause="leave", dismissed=(gone,))
            supervisor.let_train(members[-1], steps=2)
            members.append(newcomer)
            supervisor.change(*members)
        supervisor.let_train(*members, steps=60)  # past the end of the momentum ramp
        supervisor.finish()
        committed = audit(supervisor)
        check_events(supervisor, committed)
        assert discarded(supervisor) == []
    found = [(step["lr"], step["progress"], step["scale"]) for step in committed]
    assert found == twin_of(committed)
    whole = [step["lr"] for step in committed if step["batch"] == 24]
    assert whole[0] == whole[-1] == BASE_LR * 3.0
    assert len({*whole}) > 2


@processes
def test_a_schedule_that_counts_milestones_moves_on_in_joiners_as_in_all(tmp_path):
    with supervising(tmp_path) as supervisor:
        supervisor.begin(1, rule="linear", schedule="multistep", chunk=320)
        supervisor.start(2, 3, rule="linear", schedule="multistep", chunk=320)
        supervisor.wait_ready(2, 3)
        supervisor.wait_held(0, 1)
        supervisor.open_gate(0)
        supervisor.wait_held(1, 1)
        supervisor.publish(1, 2)
        supervisor.open_gate(1)
        for gate in range(2, 6):
            supervisor.wait_held(gate, 1, 2)
            supervisor.open_gate(gate)
        supervisor.wait_held(6, 1, 2)  # past the second milestone
        supervisor.kill(1)
        supervisor.publish(3, 2, lost=(1,))
        for gate in range(6, 12):
            supervisor.open_gate(gate)
        supervisor.wait_held(12, 2, 3)
        (tmp_path / "stop").touch()
        supervisor.open_gate(12)
        supervisor.finish()
        committed = audit(supervisor)
    found = [(step["lr"], step["progress"], step["scale"]) for step in committed]
    expected = twin_of(committed, milestones=(60, 200))
    assert [row[1:] for row in found] == [row[1:] for row in expected]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=1e-12)
    assert committed[-1]["progress"] > 200


# [13]
@processes
def test_all_workers_end_at_one_step_whatever_divides_what(tmp_path):
    options = {"rule": "linear", "num_samples": 293, "num_steps": 333.3, "step_s": 0.002}
    with supervising(tmp_path) as supervisor:
        supervisor.start(4, **options)
        supervisor.wait_ready(4)
        supervisor.begin(1, 2, 3, **options)
        supervisor.let_train(1, steps=3)
        supervisor.change(1, 2, 3, 4)
        assert [supervisor.exit_code(worker) for worker in (1, 2, 3, 4)] == [0, 0, 0, 0]
        committed = audit(supervisor, num_samples=293)
        check_events(supervisor, committed)
        ends = supervisor.all_records("end")
    assert len(ends) == 4
    assert committed[-2]["progress"] < 333.3 <= committed[-1]["progress"]
