"""Several optimizers in one session, and several sessions in one loop, beside plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from torch.utils.data import TensorDataset
from training import Digits, build_model, session_over, train, weights_of
from workers import run_workers

from elastane import (
    AdamScale,
    Checkpointing,
    Identity,
    LoaderOptions,
    LocalBatch,
    Measuring,
    Session,
)
from elastane.elastic.checkpoint import CheckpointStore
from elastane.elastic.signals import on_sigterm
from elastane.elastic.snapshot import load_state, state_of
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.optimizers import Optimizers
from elastane.order import stream_indices

FLOAT64 = torch.float64
NUM_STEPS = 40


def two_optimizers(model: Any, *, second: Any = SGD, **options: Any) -> list[torch.optim.Optimizer]:
    first = SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    return [first, second(model[2].parameters(), lr=0.02, **options)]


def session_of(model: nn.Module, optimizers: Any, **options: Any) -> Session:
    defaults: dict[str, Any] = {
        "dataset": Digits(304, dtype=FLOAT64),
        "loader": LoaderOptions(seed=3),
        "num_steps": NUM_STEPS,
        "batch": LocalBatch(16, micro_batches=4),
    }
    return session_over(model, optimizer=optimizers, **(defaults | options))


def run_of(model: Any, optimizers: Any, **options: Any) -> dict[str, Any]:
    with session_of(model, optimizers, **options) as session:
        return train(session)


def batches(num_steps: int, *, samples: int) -> Any:
    """Yield what a session of one worker is dealt, in whole batches."""
    dataset = Digits(304, dtype=FLOAT64)
    order = stream_indices(0, num_steps * samples, num_samples=304, seed=3).tolist()
    for step in range(num_steps):
        rows = [dataset[index] for index in order[step * samples : (step + 1) * samples]]
        yield torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def test_two_optimizers_train_as_one_with_two_groups() -> None:
    model, plain = build_model(FLOAT64), build_model(FLOAT64)
    groups = [{"params": plain[0].parameters()}, {"params": plain[2].parameters(), "lr": 0.02}]
    schedule = {"schedule": lambda progress: 0.99**progress}
    wanted = run_of(plain, SGD(groups, lr=0.1, momentum=0.9), **schedule)
    found = run_of(model, two_optimizers(model, momentum=0.9), **schedule)
    assert max(wanted["gain"]) > 1
    for name in ("gain", "progress", "lr", "loss", "grad_norm"):
        assert found[name] == wanted[name], name
    assert torch.equal(found["weights"], wanted["weights"])


def test_different_optimizers_with_a_scheduler_each_are_a_plain_loop_to_the_bit() -> None:
    model, plain = build_model(FLOAT64), build_model(FLOAT64)

    def schedules(optimizers: Any) -> list[Any]:
        cosine = CosineAnnealingLR(optimizers[0], T_max=NUM_STEPS)
        return [cosine, MultiStepLR(optimizers[1], [5, 9], gamma=0.3)]

    optimizers = two_optimizers(model, second=AdamW)
    options = {"rule": Identity(), "compensation": None, "batch": LocalBatch(8)}
    run_of(model, optimizers, schedule=schedules(optimizers), **options)
    theirs = two_optimizers(plain, second=AdamW)
    movers = schedules(theirs)
    for images, labels in batches(NUM_STEPS, samples=8):
        F.cross_entropy(plain(images), labels).backward()
        for one in (*theirs, *movers):
            one.step()
        plain.zero_grad()
    assert torch.equal(weights_of(model), weights_of(plain))
    for own, other in zip(optimizers, theirs, strict=True):
        assert own.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_each_of_several_optimizers_has_a_gain_and_a_ramp_of_its_own() -> None:
    model, plain = build_model(FLOAT64), build_model(FLOAT64)
    groups = [{"params": plain[0].parameters()}, {"params": plain[2].parameters(), "lr": 0.02}]
    options: dict[str, Any] = {"measuring": Measuring(per="param_group"), "schedule": None}
    wanted = run_of(plain, SGD(groups, lr=0.1, momentum=0.9), **options)
    found = run_of(model, two_optimizers(model, momentum=0.9), **options)
    assert found["gain"] == wanted["gain"]
    assert torch.equal(found["weights"], wanted["weights"])


def train_two(keywords: dict[str, Any]) -> dict[str, Any]:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model, second=AdamW)
    return run_of(model, optimizers, rule=AdamScale(), **keywords)


@pytest.mark.processes
def test_two_workers_train_several_optimizers_as_one_does(tmp_path: Path) -> None:
    wanted = train_two({"batch": LocalBatch(16, micro_batches=2)})
    records = run_workers(train_two, {"batch": LocalBatch(8)}, world_size=2, folder=tmp_path)
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert records[0]["gain"] == pytest.approx(wanted["gain"], rel=1e-10)
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=0, atol=1e-10)


def shared(model: Any) -> list[torch.optim.Optimizer]:
    return [SGD(model.parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)]


def twice(model: Any) -> list[torch.optim.Optimizer]:
    return [SGD(model.parameters(), lr=0.1)] * 2


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda _: [], "at least one, all different"),
    "one twice": (twice, "at least one, all different"),
    "a parameter twice": (shared, r"optimizer\[1\].*has an optimizer already"),
    "no optimizer": (lambda model: [SGD(model.parameters(), lr=0.1), model], r"optimizer\[1\]"),
    "of another model": (
        lambda model: [SGD(model.parameters(), lr=0.1), SGD(build_model().parameters(), lr=0.1)],
        r"optimizer\[1\].*no parameter of the model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_can_not_step_together_are_refused(name: str) -> None:
    make, match = REFUSED[name]
    model = build_model()
    with pytest.raises(ArgumentError, match=match):
        session_over(model, optimizer=make(model), num_steps=5)


def test_lbfgs_among_several_is_refused_by_name() -> None:
    model: Any = build_model()
    optimizers = [SGD(model[0].parameters(), lr=0.1), torch.optim.LBFGS(model[2].parameters())]
    with pytest.raises(UnsupportedError, match="LBFGS"):
        session_over(model, optimizer=optimizers, num_steps=5)


def test_schedulers_of_other_optimizers_and_two_of_one_are_refused() -> None:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model)
    stranger = CosineAnnealingLR(SGD(build_model().parameters(), lr=0.1), T_max=9)
    with pytest.raises(ArgumentError, match=r"schedule\[0\].*another optimizer"):
        session_of(model, optimizers, schedule=[stranger])
    first, again = (CosineAnnealingLR(optimizers[0], T_max=9) for _ in range(2))
    with pytest.raises(ArgumentError, match=r"schedule\[1\].*has a scheduler already"):
        session_of(model, optimizers, schedule=[first, again])
    with pytest.raises(ArgumentError, match=r"schedule\[1\].*must be a torch scheduler"):
        session_of(model, optimizers, schedule=[first, 0.5])


def test_a_scheduler_of_one_optimizer_that_was_not_passed_is_noticed() -> None:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model)
    first, _ = (CosineAnnealingLR(one, T_max=NUM_STEPS) for one in optimizers)
    with pytest.warns(UserWarning, match="pass schedule="):
        session_of(model, optimizers, schedule=first)


def test_a_group_that_joins_in_the_middle_is_refused_and_at_the_end_it_is_taken_up() -> None:
    model: Any = build_model(FLOAT64)
    optimizers = [SGD([model[0].weight], lr=0.1), SGD([model[2].weight], lr=0.1)]
    session = session_of(model, optimizers)
    with session:
        train(session, max_steps=2)
        optimizers[1].add_param_group({"params": [model[2].bias]})
        before = model[2].bias.clone()
        train(session, max_steps=2)
        assert not torch.equal(model[2].bias, before)
        optimizers[0].add_param_group({"params": [model[0].bias]})
        with pytest.raises(UnsupportedError, match="add it to the last one"):
            train(session, max_steps=2)


def test_stepping_one_of_several_by_hand_is_refused_inside_and_free_outside() -> None:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model)
    with session_of(model, optimizers) as session:
        for _ in session:
            break
        for one in optimizers:
            with pytest.raises(UsageError, match="take turns build a session for each"):
                one.step()
    for one in optimizers:
        one.step()


# The loss scale


def test_unscaling_some_by_hand_after_session_backward_changes_nothing() -> None:
    records = []
    for scaled in (False, True):
        model = build_model(FLOAT64)
        optimizers = two_optimizers(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
        session = session_of(model, optimizers, scaler=scaler)
        with session:
            for images, labels, _ in session:
                session.backward(F.cross_entropy(session.model(images), labels))
                if scaler is not None and session.is_last_micro_batch:
                    scaler.unscale_(optimizers[1])
                session.step()
        records.append(weights_of(model))
    assert torch.allclose(*records, rtol=1e-12, atol=0)


def test_unscaling_some_before_the_gradients_are_measured_is_refused() -> None:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model)
    scaler = torch.amp.GradScaler("cpu")
    session = session_of(model, optimizers, scaler=scaler, batch=LocalBatch(8))
    with session:
        for images, labels, _ in session:
            scaler.scale(F.cross_entropy(session.model(images), labels)).backward()
            scaler.unscale_(optimizers[0])
            with pytest.raises(UsageError, match="for some optimizers only"):
                session.step()
            break


def test_an_optimizer_without_gradients_is_left_out_under_a_scaler_too() -> None:
    model: Any = build_model(FLOAT64)
    optimizers = two_optimizers(model, second=AdamW)
    model[2].requires_grad_(False)
    before = model[2].weight.clone()
    session = session_of(model, optimizers, scaler=torch.amp.GradScaler("cpu"), rule=AdamScale())
    with session:
        train(session, max_steps=4)
        model[2].requires_grad_(True)
        assert torch.equal(model[2].weight, before)
        train(session, max_steps=4)
    assert not torch.equal(model[2].weight, before)


def test_a_skipped_step_moves_no_optimizer() -> None:
    model = build_model(FLOAT64)
    optimizers = two_optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session = session_of(model, optimizers, scaler=scaler, batch=LocalBatch(8))
    before = weights_of(model)
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels) * float("inf"))
            result = session.step()
            break
    assert result is not None
    assert result.step == 0
    assert torch.equal(weights_of(model), before)
    assert scaler.get_scale() == 2.0**9


# States and checkpoints


def test_a_checkpoint_of_several_goes_on_and_loads_in_plain_torch(tmp_path: Path) -> None:
    def run(model: nn.Module, *, num_steps: int, folder: Path) -> dict[str, Any]:
        optimizers = two_optimizers(model, second=AdamW)
        movers = [CosineAnnealingLR(one, T_max=30) for one in optimizers]
        checkpoint = Checkpointing(every_s=None, every_steps=num_steps, folder=folder)
        options = {"schedule": movers, "rule": AdamScale(), "checkpoint": checkpoint}
        with session_of(model, optimizers, num_steps=30, **options) as session:
            return train(session, max_steps=num_steps)

    whole = run(build_model(FLOAT64), num_steps=12, folder=tmp_path / "whole")
    run(build_model(FLOAT64), num_steps=6, folder=tmp_path / "parts")
    rest = run(build_model(FLOAT64, seed=1), num_steps=6, folder=tmp_path / "parts")
    assert rest["gain"] == whole["gain"][6:]
    assert rest["lr"] == whole["lr"][6:]
    assert torch.equal(rest["weights"], whole["weights"])

    store = CheckpointStore(tmp_path / "parts", keep=3)
    newest = store.newest()
    assert newest is not None
    state, _ = store.load(newest)
    model = build_model(FLOAT64, seed=2)
    model.load_state_dict(state["model"])
    plain = two_optimizers(model, second=AdamW)
    for one, saved in zip(plain, state["optimizer"], strict=True):
        one.load_state_dict(saved)
    assert torch.equal(weights_of(model), whole["weights"])
    assert plain[1].state[next(model[2].parameters())]["step"] == 12  # type: ignore[index]

    other = SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpointing(folder=tmp_path / "parts")
    session = session_of(model, other, num_steps=30, checkpoint=checkpoint)
    with pytest.raises(StateError, match="schedulers"):
        session.__enter__()


def test_states_of_other_optimizers_are_refused_before_anything_is_loaded() -> None:
    model = build_model(FLOAT64)
    optimizers = Optimizers(two_optimizers(model))
    tree = state_of(model, optimizers)
    before = copy.deepcopy(tree)
    swapped = {**tree, "optimizer": [tree["optimizer"][0], {"state": {}, "param_groups": []}]}
    for wrong, match in (
        ({**tree, "optimizer": tree["optimizer"][:1]}, "1 optimizers and the session has 2"),
        ({**tree, "optimizer": tree["optimizer"][0]}, "1 optimizers and the session has 2"),
        (swapped, "another optimizer's"),
    ):
        with pytest.raises(StateError, match=match):
            load_state(model, optimizers, wrong)
        assert state_of(model, optimizers)["optimizer"] == before["optimizer"]


# Two networks against each other


class Pair(nn.Module):
    """A generator of digits and a judge of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 64))
        self.judge = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 1))
        self.double()

    def forward(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return both losses in one; each moves the parameters of its own network only."""
        made = self.generator(noise)
        loss = judge_loss(self.judge, images, made.detach())
        self.judge.requires_grad_(False)
        loss = loss + generator_loss(self.judge, made)
        self.judge.requires_grad_(True)
        return loss


def judge_loss(judge: Any, images: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return F.softplus(-judge(images)).mean() + F.softplus(judge(made)).mean()


def generator_loss(judge: Any, made: torch.Tensor) -> torch.Tensor:
    return F.softplus(-judge(made)).mean()


def duel_data() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.stack([image for image, _, _ in Digits(304, dtype=FLOAT64)])  # type: ignore[misc]
    noise = torch.randn(304, 6, generator=torch.Generator().manual_seed(1), dtype=FLOAT64)
    return images, noise


def duel_optimizers(pair: Pair) -> list[torch.optim.Optimizer]:
    judge = SGD(pair.judge.parameters(), lr=0.05, momentum=0.5)
    return [judge, SGD(pair.generator.parameters(), lr=0.02, momentum=0.5)]


def duel_in_one_session(keywords: dict[str, Any]) -> dict[str, Any]:
    pair = Pair()
    options = keywords | {"dataset": TensorDataset(*duel_data())}
    gains = []
    with session_of(pair, duel_optimizers(pair), **options) as session:
        for images, noise in session:
            session.backward(session.model(images, noise))
            if (result := session.step()) is not None:
                gains.append(result.gain)
    return {"gain": gains, "weights": weights_of(pair)}


def duel_in_turns(keywords: dict[str, Any]) -> dict[str, Any]:
    pair, (images, noise) = Pair(), duel_data()
    first, second = duel_optimizers(pair)
    made_of = TensorDataset(images, noise)
    judged = session_of(pair.judge, first, dataset=made_of, **keywords)
    making = session_of(pair.generator, second, dataset=TensorDataset(noise), **keywords)
    gains: list[tuple[float, float]] = []
    with judged, making:
        for (real, seeds), (others,) in zip(judged, making, strict=False):
            made = pair.generator(seeds).detach()
            judged.backward(judge_loss(judged.model, real, made))
            one = judged.step()
            pair.judge.requires_grad_(False)
            making.backward(generator_loss(pair.judge, making.model(others)))
            other = making.step()
            pair.judge.requires_grad_(True)
            if one is not None and other is not None:
                gains.append((one.gain, other.gain))
    return {"gain": gains, "weights": weights_of(pair)}


PLAIN = {"rule": Identity(), "compensation": None, "batch": LocalBatch(8)}


def plain_duel(*, in_turns: bool) -> torch.Tensor:
    pair, (images, noise) = Pair(), duel_data()
    first, second = duel_optimizers(pair)
    order = stream_indices(0, NUM_STEPS * 8, num_samples=304, seed=3)
    for rows in order.reshape(NUM_STEPS, 8):
        rows = torch.as_tensor(rows)
        made = pair.generator(noise[rows])
        judge_loss(pair.judge, images[rows], made.detach()).backward()
        if in_turns:
            first.step()
        pair.judge.requires_grad_(False)
        generator_loss(pair.judge, pair.generator(noise[rows]) if in_turns else made).backward()
        pair.judge.requires_grad_(True)
        if not in_turns:
            first.step()
        second.step()
        pair.zero_grad()
    return weights_of(pair)


def test_two_networks_with_one_summed_loss_are_the_plain_loop() -> None:
    found = duel_in_one_session(PLAIN)["weights"]
    assert torch.allclose(found, plain_duel(in_turns=False), rtol=0, atol=1e-13)


def test_two_sessions_that_take_turns_are_the_plain_loop() -> None:
    found = duel_in_turns(PLAIN)["weights"]
    assert torch.allclose(found, plain_duel(in_turns=True), rtol=0, atol=1e-13)


@pytest.mark.processes
def test_two_workers_duel_in_one_session_as_one_does(tmp_path: Path) -> None:
    options = {"measuring": Measuring(per="param_group"), "num_steps": 60.0}
    wanted = duel_in_one_session(options | {"batch": LocalBatch(16, micro_batches=2)})
    keywords = options | {"batch": LocalBatch(8)}
    records = run_workers(duel_in_one_session, keywords, world_size=2, folder=tmp_path)
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert max(wanted["gain"]) > 1
    assert records[0]["gain"] == pytest.approx(wanted["gain"], rel=1e-9)
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=0, atol=1e-10)


@pytest.mark.processes
def test_two_workers_duel_in_turns_as_one_does(tmp_path: Path) -> None:
    # One micro-batch a worker: with several, sessions that take turns would step between them.
    wanted = duel_in_turns(PLAIN | {"batch": LocalBatch(16)})
    records = run_workers(duel_in_turns, PLAIN, world_size=2, folder=tmp_path)
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert records[0]["gain"] == records[1]["gain"]
    judged, making = map(max, zip(*records[0]["gain"], strict=True))
    assert min(judged, making) > 1
    assert judged != making
    assert torch.allclose(records[0]["weights"], wanted["weights"], rtol=0, atol=1e-10)


def test_a_second_session_in_a_worker_of_an_elastic_job_is_refused_with_the_way_out() -> None:
    for _ in range(2):
        with (
            on_sigterm(lambda: None),
            pytest.raises(UsageError, match=r"a session is open already.*as a list"),
            on_sigterm(lambda: None),
        ):
            pass
