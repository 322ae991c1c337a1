"""Workers of several processes, which shard one copy of a model: what the death of one costs.

Two copies of two shards each. The supervisor ends what is left of a worker, as an agent does.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_audit import audit, check_events, discarded
from elastic_worker import BATCHES, Options, build_model
from sharded_job import build, gradient_of, session_of, weights_of
from supervisor import Record, Supervisor, supervising
from training import Digits
from workers import run_workers

from elastane import AdaScale
from elastane._env import ElasticLaunch
from elastane.batching import World
from elastane.controller import StepController
from elastane.data import LoaderOptions, StreamLoader
from elastane.elastic.team import Team
from elastane.errors import ArgumentError, CommunicationError, UnsupportedError, UsageError
from elastane.measuring import Measuring
from elastane.momentum import MomentumRamp
from elastane.noise import estimate_moments
from elastane.planning import plan_step
from elastane.protocol import Broken, Entered

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROMPTLY_S = 3  # on a machine that does much else; a step that nobody breaks blocks for minutes
LR, MOMENTUM, NUM_SAMPLES = 0.1, 0.9, 301
OPTIONS = {"dtype": "float64", "seed": 7}
# Float64 sums of the same numbers in another order, over some hundred steps.
TOLERANCE = 1e-9


@pytest.fixture
def supervisor(tmp_path):
    with supervising(tmp_path, group_size=2) as one:
        yield one


def replayed(committed: list[Record]) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Return what one process makes of the same steps in float64, each micro-gradient by itself."""
    model = build_model(Options(**OPTIONS), worker=0)
    loader = StreamLoader(Digits(dtype=torch.float64), options=LoaderOptions(seed=3))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    controller = StepController(
        AdaScale(),
        base_batch_size=8,
        num_steps=1e9,
        compensation=MomentumRamp(),
        measuring=Measuring(),
    )
    rows = []
    for step in committed:
        worlds = [World(rank=r, world_size=step["world_size"]) for r in range(step["world_size"])]
        known = {"position": step["start"], "num_samples": NUM_SAMPLES}
        plans = [plan_step(BATCHES["local"], world=world, **known) for world in worlds]
        ranges = [(m.start, m.stop) for plan in plans for m in plan.micro_batches if m.weight]
        batch, nominal = plans[0].batch_samples, plans[0].nominal_samples
        pairs = [
            (len(labels), gradient_of(model, images, labels))
            for images, labels, _ in loader.read(iter(ranges))
        ]
        mean = torch.stack([size * gradient for size, gradient in pairs]).sum(0) / batch
        moments = estimate_moments(
            weighted_sqr_norm=sum(size * float(g.square().sum()) for size, g in pairs),
            mean_sqr_norm=float(mean.square().sum()),
            batch_samples=batch,
            num_gradients=len(pairs),
        )
        assert moments is not None
        samples = [moments] if controller.wants_measurement(nominal) else None
        decision = controller.decide(
            samples, batch_samples=batch, nominal_samples=nominal, momentum=MOMENTUM
        )
        for parameter, part in zip(
            parameters, mean.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        (group,) = optimizer.param_groups
        group["lr"] = LR * decision.factors[0]
        for state in optimizer.state.values():
            state["momentum_buffer"] *= decision.buffer_factors[0]
        optimizer.step()
        controller.commit(decision)
        rows.append({"lr": group["lr"], "gain": decision.gain, "progress": controller.progress})
    return rows, weights_of(model)


def assert_as_in_one_process(supervisor: Supervisor, committed: list[Record]) -> None:
    rows, weights = replayed(committed)
    for name in ("lr", "gain", "progress"):
        found = [step[name] for step in committed]
        assert found == pytest.approx([row[name] for row in rows], rel=TOLERANCE), name
    ends = supervisor.all_records("end")
    assert ends
    for end in ends:
        found = torch.tensor(end["weights"], dtype=torch.float64)
        assert (found - weights).abs().max() < TOLERANCE


def kill_one_process(supervisor: Supervisor, worker: int, *, index: int) -> None:
    """Kill a process of a worker, and then, as an agent does, what is left of the worker."""
    process = supervisor.team(worker)[index]
    process.kill()
    process.join()
    supervisor.kill_rest(worker)


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_rank_costs_its_copy_alone_and_another_copy_can_join(supervisor, index):
    supervisor.begin(1, 2, **OPTIONS)
    supervisor.start(3, **OPTIONS)
    supervisor.let_train(1, 2)
    supervisor.wait_ready(3)
    kill_one_process(supervisor, 2, index=index)
    begun = time.monotonic()
    supervisor.change(1, cause="death", lost=(2,))
    assert time.monotonic() - begun < PROMPTLY_S
    supervisor.let_train(1)
    supervisor.change(1, 3)
    supervisor.let_train(1, 3)
    supervisor.finish()
    committed = audit(supervisor)
    assert [s["world_size"] for s in committed if s["generation"] == 2][-1] == 2
    assert {s["world_size"] for s in committed} == {2, 4}
    check_events(supervisor, committed)
    assert len(supervisor.all_records("end")) == 4
    assert_as_in_one_process(supervisor, committed)


@pytest.mark.parametrize("members", [(2, 1), (1, 2)])
def test_a_step_that_one_process_did_not_finish_its_whole_copy_takes_from_another(
    supervisor, members
):
    supervisor.start(1, loses_sums_at=15, **OPTIONS)
    supervisor.begin(2, **OPTIONS)
    supervisor.change(*members)
    supervisor.wait_for(Broken, worker=1)
    supervisor.change(1, 2, cause="broken")
    assert supervisor.wait_for(Entered, worker=1, generation=3).source == 2
    supervisor.let_train(1, 2)
    supervisor.finish()
    committed = audit(supervisor)
    (taken,) = [s["start"] for s in committed if s["step"] == 15]
    told = [s["process"] for s in supervisor.all_records("step") if s["start"] == taken]
    assert sorted(told) == ["1", "1.1", "2", "2.1"]  # to whoever was behind, with the state
    check_events(supervisor, committed)
    assert_as_in_one_process(supervisor, committed)


def wait_silent(supervisor, worker):
    """Wait until a worker's beat stands still, while the others' go on."""

    def is_silent():
        before = supervisor.beat(worker)
        others = {one: supervisor.beat(one).count for one in supervisor.generation.members}
        del others[worker]
        supervisor.wait_until(
            lambda: all(supervisor.beat(one).count >= n + 6 for one, n in others.items())
        )
        return supervisor.beat(worker).count == before.count

    supervisor.wait_until(is_silent)


def test_a_process_that_hangs_keeps_up_its_own_copy_alone_which_can_come_back(supervisor):
    supervisor.begin(1, 2, **OPTIONS)
    supervisor.let_train(1, 2)
    (follower,) = supervisor.followers[2]
    os.kill(follower.pid, signal.SIGSTOP)
    wait_silent(supervisor, 2)
    begun = time.monotonic()
    supervisor.change(1, cause="hang", lost=(2,))
    assert time.monotonic() - begun < PROMPTLY_S
    supervisor.let_train(1)
    os.kill(follower.pid, signal.SIGCONT)
    supervisor.wait_ready(2, count=2)
    supervisor.change(1, 2)
    supervisor.let_train(1, 2)
    supervisor.finish()
    committed = audit(supervisor)
    check_events(supervisor, committed)
    assert supervisor.complaints(1, 2) == []
    assert_as_in_one_process(supervisor, committed)


def test_a_copy_leaves_behind_a_step_and_all_copies_stop_and_resume_where_they_were(supervisor):
    supervisor.begin(1, 2, checkpoint_every=10**6, **OPTIONS)
    supervisor.let_train(1, 2)
    supervisor.change(2, cause="leave", dismissed=(1,))
    assert supervisor.exit_codes(1) == [0, 0]
    supervisor.let_train(2)
    supervisor.publish(cause="stop", dismissed=(2,))
    assert supervisor.exit_codes(2) == [0, 0]
    supervisor.start(3, 4, checkpoint_every=10**6, **(OPTIONS | {"seed": 8}))
    supervisor.wait_ready(3, 4)
    supervisor.change(3, 4, cause="start")
    supervisor.let_train(3, 4)
    supervisor.finish()
    committed = audit(supervisor)
    assert discarded(supervisor) == []
    check_events(supervisor, committed)
    assert {s["generation"] for s in committed} == {1, 2, 4}
    assert_as_in_one_process(supervisor, committed)


def test_an_evaluation_in_which_a_copy_is_lost_is_started_over_and_one_joins_behind_another(
    supervisor,
):
    supervisor.begin(1, 2, evaluate_every=1, **OPTIONS)
    supervisor.wait_held("evaluation", 1, "1.1", 2, "2.1")
    kill_one_process(supervisor, 2, index=1)
    supervisor.open_gate("evaluation")
    supervisor.change(1, cause="death", lost=(2,))
    supervisor.let_train(1, steps=2)
    supervisor.start(3, evaluate_every=1, **OPTIONS)
    supervisor.wait_ready(3)
    supervisor.change(1, 3)
    supervisor.let_train(1, 3, steps=2)
    supervisor.finish()
    audit(supervisor)
    evaluations = supervisor.all_records("evaluation")
    assert evaluations[0]["step"] == 1
    assert {one["sums"]["indices"] for one in evaluations} == {sum(range(NUM_SAMPLES))}
    assert len({(one["step"], one["sums"]["correct"]) for one in evaluations}) == len(
        {one["step"] for one in evaluations}
    )


def told_by_the_leader(index: int) -> list[Any]:
    team = Team(size=2, index=index)
    with team.assembled():
        told = team.told(lambda: {"taking part": [index, "ü"], "why": None})
        votes = [team.agree(True), team.agree(index == 0), team.agree(index == 1)]
        ends = [outcome(team, fails=fails) for fails in ((), (0,), (1,), (0, 1))]
    return [told, votes, ends]


def outcome(team: Team, *, fails: tuple[int, ...]) -> str:
    def act() -> str:
        if team.index in fails:
            raise CommunicationError("broken")
        return "done"

    try:
        return team.together(act)
    except CommunicationError as error:
        return str(error)


def act_as_a_team() -> list[Any]:
    return told_by_the_leader(dist.get_rank())


def test_a_team_does_what_its_leader_says_and_has_done_what_all_have_done(tmp_path):
    first, second = run_workers(act_as_a_team, world_size=2, folder=tmp_path)
    assert first[0] == second[0] == {"taking part": [0, "ü"], "why": None}
    assert first[1] == second[1] == [True, False, False]
    elsewhere = "it broke for another process of this worker"
    assert first[2] == ["done", "broken", elsewhere, "broken"]
    assert second[2] == ["done", elsewhere, "broken", "broken"]


def test_one_process_is_a_team_that_asks_nobody():
    team = Team()
    with team.assembled():
        assert team.told(lambda: (1, 2)) == (1, 2)
        assert team.together(lambda: 3) == 3
        assert [team.agree(True), team.agree(False)] == [True, False]


def test_processes_of_a_worker_without_a_group_or_a_sharded_model_are_refused(monkeypatch):
    with (
        pytest.raises(UsageError, match=r"2 processes.*init_process_group"),
        Team(size=2).assembled(),
    ):
        pass
    launch = ElasticLaunch(store="h:1", job="j", worker=1, agent="a", slot=0, run_dir="r")
    for name, value in (launch.environment() | {"ELASTANE_GROUP_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=r"2 processes.*fully_shard"):
        session_of(build())
    with pytest.raises(ArgumentError, match=r"shard=.*2 processes .*Leave --group-size out"):
        session_of(build(), shard=lambda *_: None)
