"""Workers of several processes, which shard one copy of a model: what the death of one costs.

Two copies of two shards each. The supervisor ends what is left of a worker, as an agent does.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from elastic_audit import audit, check_events, discarded
from elastic_worker import BATCHES, Options, build_model
from sharded_job import gradient_of, weights_of
from supervisor import Record, Supervisor, supervising
from training import Digits

from elastane import AdaScale
from elastane.batching import World, plan_step
from elastane.controller import Measuring, StepController
from elastane.data import LoaderOptions, StreamLoader
from elastane.momentum import MomentumRamp
from elastane.noise import estimate_moments

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
        decision = controller.decide(
            [moments], batch_samples=batch, nominal_samples=nominal, momentum=MOMENTUM
        )
        for parameter, part in zip(
            parameters, mean.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        (group,) = optimizer.param_groups
        group["lr"] = LR * decision.factors[0]
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
