"""The session in one process: what users see, and what must not move when it should not."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from training import Digits, build_model, build_session, session_over, train, weights_of

import elastane
from elastane import (
    GlobalBatch,
    Identity,
    Linear,
    LoaderOptions,
    LocalBatch,
    Measuring,
    Session,
    step_sums,
)
from elastane.errors import (
    ArgumentError,
    NonFiniteError,
    StateError,
    UnsupportedError,
    UsageError,
)
from elastane.order import stream_indices
from elastane.replica import Replica, without_sync, wrap
from elastane.telemetry import EVENT_FIELDS, read_events


def test_a_run_at_the_base_batch_is_a_plain_training_loop_to_the_bit() -> None:
    dataset, model, plain = Digits(304), build_model(), build_model()
    session, _ = build_session(
        model, dataset=dataset, batch=LocalBatch(8), compensation=None, num_steps=76
    )
    with session:
        train(session)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=76)
    order = stream_indices(0, 2 * 304, num_samples=304, seed=3)
    for step in range(76):
        batch = [dataset[index] for index in order[8 * step : 8 * step + 8].tolist()]
        images = torch.stack([image for image, _, _ in batch])
        labels = torch.tensor([label for _, label, _ in batch])
        optimizer.zero_grad()
        F.cross_entropy(plain(images), labels).backward()
        optimizer.step()
        schedule.step()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, theirs)


# BC-51
def test_each_epoch_is_seen_exactly_once_and_ends_with_a_short_batch() -> None:
    session, _ = build_session(build_model(), rule=Linear(), num_steps=3 * 301 / 8)
    with session:
        record = train(session)
    seen = [index for indices, _ in record["seen"] for index in indices]
    assert len(seen) == 3 * 301
    for epoch in range(3):
        assert Counter(seen[epoch * 301 : epoch * 301 + 301]) == Counter(range(301))
    assert [stop % 301 for stop in record["position"][8:10]] == [288, 0]


def test_step_returns_none_inside_a_window_and_the_result_at_its_end() -> None:
    session, optimizer = build_session(build_model(), rule=Linear())
    returned = []
    with session:
        for images, labels, _ in itertools.islice(session, 8):
            session.backward(F.cross_entropy(session.model(images), labels))
            returned.append(session.step())
    assert [result is None for result in returned] == [True, True, True, False] * 2
    result = returned[7]
    assert result is not None
    assert (result.step, result.position, result.batch_samples) == (2, 64, 32)
    assert (result.scale, result.factor, result.progress) == (4.0, 4.0, 8.0)
    assert (result.num_gradients, result.weight, result.world_size) == (4, 32.0, 1)
    assert result.lr == pytest.approx(0.1 * 4 * (1 + math.cos(math.pi * 4 / 200)) / 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(
        0.1 * (1 + math.cos(math.pi * 8 / 200)) / 2
    )
    assert result.skipped is False
    assert result.loss is not None


def test_loss_backward_trains_as_session_backward_does() -> None:
    records = []
    for own in (True, False):
        session, _ = build_session(build_model())
        with session:
            results = []
            for images, labels, _ in session:
                loss = F.cross_entropy(session.model(images), labels)
                if own:
                    session.backward(loss)
                else:
                    loss.backward()
                results.append(session.step())
        records.append([r.progress for r in results if r is not None])
        weights = [parameter.detach().clone() for parameter in session.model.parameters()]
        records.append(weights)
    # One weights the gradient and the other the loss, so they round differently.
    assert records[0] == pytest.approx(records[2], rel=1e-4)
    pairs = zip(records[1], records[3], strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=2e-5) for a, b in pairs)


def test_adascale_takes_fewer_steps_and_each_is_worth_its_gain() -> None:
    session, _ = build_session(build_model())
    with session:
        record = train(session)
    assert record["gain"][0] == 1.0
    assert all(1 <= gain <= 4 for gain in record["gain"])
    steps = [after - before for before, after in itertools.pairwise([0.0, *record["progress"]])]
    assert steps == pytest.approx(record["gain"])
    assert record["progress"][-2] < 200 <= record["progress"][-1]
    assert len(record["gain"]) < 180


# BC-41
def test_a_batch_below_the_base_batch_trains_with_a_gain_below_one() -> None:
    batch = GlobalBatch(4, micro_batches=2)
    session, _ = build_session(build_model(), dataset=Digits(304), batch=batch, num_steps=60)
    with session:
        record = train(session)
    assert all(0.5 <= gain <= 1 for gain in record["gain"])
    assert min(record["gain"]) < 0.95


# BC-18
def test_the_schedule_moves_by_whole_base_steps_crossed_and_never_past_its_end() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = MultiStepLR(optimizer, milestones=[10, 11, 20], gamma=0.1)
    session = session_over(
        model,
        optimizer=optimizer,
        schedule=schedule,
        num_steps=21,
        rule=lambda now: (1.0, 2.5),  # noqa: ARG005 (a rule)
        batch=LocalBatch(32),
    )
    with session:
        record = train(session)
    assert record["lr"] == pytest.approx([0.1] * 4 + [0.01] + [0.001] * 3 + [0.0001])
    assert schedule.last_epoch == 21


def test_one_cycle_ends_at_its_final_lr_without_overrunning() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
    session = session_over(
        model,
        optimizer=optimizer,
        schedule=schedule,
        num_steps=50,
        rule=Linear(),
        batch=LocalBatch(24),
    )
    with session:
        train(session)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 25 / 1e4)


def poisoned_loss(times: int) -> Any:
    """Return a loss that is NaN in its first `times` calls after the third."""
    calls = itertools.count()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(logits, labels)
        return value * math.nan if 3 <= next(calls) < 3 + times else value

    return loss


# BC-04 BC-37
def test_a_step_with_nan_gradients_moves_nothing_and_its_samples_come_again() -> None:
    clean, _ = build_session(build_model(), batch=LocalBatch(16, micro_batches=2))
    with clean:
        wanted = train(clean)
    session, optimizer = build_session(build_model(), batch=LocalBatch(16, micro_batches=2))
    loss, skipped = poisoned_loss(2), []
    with session:
        for images, labels, _ in session:
            before = (
                session.progress,
                session.position,
                optimizer.param_groups[0]["lr"],
                [parameter.detach().clone() for parameter in session.model.parameters()],
                session.state_dict()["controller"],
            )
            session.backward(loss(session.model(images), labels))
            result = session.step()
            if result is not None and result.skipped:
                skipped.append(result.step)
                assert before[:3] == (
                    session.progress,
                    session.position,
                    optimizer.param_groups[0]["lr"],
                )
                after = session.model.parameters()
                assert all(torch.equal(a, b) for a, b in zip(before[3], after, strict=True))
                assert session.state_dict()["controller"] == before[4]
    assert skipped == [1, 1]
    assert session.progress == wanted["progress"][-1]
    weights = weights_of(session.model)
    assert torch.equal(weights, wanted["weights"])


def test_gradients_that_stay_nan_end_in_an_error_that_names_the_samples() -> None:
    session, _ = build_session(build_model(), batch=LocalBatch(8))
    with session, pytest.raises(NonFiniteError, match=r"positions 24 to 31 .* 51 times"):
        train(session, loss_of=poisoned_loss(100))


def test_nan_gradients_half_of_the_time_do_not_keep_a_job_from_converging() -> None:
    target = nn.Linear(1, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    session = Session(
        target,
        optimizer=optimizer,
        dataset=TensorDataset(torch.ones(64, 1)),
        base_batch_size=2,
        num_steps=100,
        batch=LocalBatch(4, micro_batches=2),
        progress_bar=False,
    )
    num_skipped = 0
    with session:
        for (inputs,) in session:
            loss = (session.model(inputs) - 4.0).square().mean()
            broken = torch.rand((), generator=generator) < 0.5
            session.backward(loss * math.nan if broken else loss)
            result = session.step()
            num_skipped += result is not None and result.skipped
    assert target.weight.item() == pytest.approx(4.0, abs=0.01)
    assert num_skipped > 50
    moments = session.state_dict()["controller"]["averages"][0]
    assert math.isfinite(moments["variance"])
    assert math.isfinite(moments["sqr_norm"])


def test_linear_regression_finds_its_coefficients() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(1000, 1, generator=generator) * 2 - 1
    targets = 3 + 4 * inputs + torch.randn(1000, 1, generator=generator)
    model = nn.Linear(1, 1)
    session = Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        dataset=TensorDataset(inputs, targets),
        base_batch_size=32,
        num_epochs=100,
        batch=LocalBatch(64, micro_batches=2),
        progress_bar=False,
    )
    with session:
        for x, y in session:
            session.backward((session.model(x) - y).square().mean())
            session.step()
    slope, intercept = torch.linalg.lstsq(
        torch.cat([inputs, torch.ones_like(inputs)], 1), targets
    ).solution
    assert model.weight.item() == pytest.approx(slope.item(), abs=0.1)
    assert model.bias.item() == pytest.approx(intercept.item(), abs=0.1)
    assert slope.item() == pytest.approx(4, abs=0.2)


# BC-37
def test_a_scaler_backs_off_on_overflow_and_nothing_else_moves() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    session, _ = build_session(
        build_model(), scaler=scaler, batch=LocalBatch(16, micro_batches=2), num_steps=30
    )
    with session:
        record = train(session, loss_of=poisoned_loss(1))
    assert scaler.get_scale() == 2.0**13
    assert record["position"][1] == record["position"][0]
    plain, _ = build_session(build_model(), batch=LocalBatch(16, micro_batches=2), num_steps=30)
    with plain:
        wanted = train(plain)
    assert record["progress"][-1] == wanted["progress"][-1]
    assert record["gain"][2:] == pytest.approx(wanted["gain"][1:], rel=1e-12)
    assert torch.allclose(record["weights"], wanted["weights"], rtol=0, atol=1e-7)


# BC-19
def test_max_norm_clips_as_the_user_would_by_hand_between_backward_and_step() -> None:
    weights = []
    for own in (True, False):
        session, _ = build_session(build_model(), max_norm=0.3 if own else None)
        norms = []
        with session:
            for number, (images, labels, _) in enumerate(session):
                session.backward(F.cross_entropy(session.model(images), labels))
                if number % 4 == 3 and not own:
                    norms.append(
                        torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.3).item()
                    )
                result = session.step()
                if result is not None and not own:
                    assert result.grad_norm == pytest.approx(norms[-1], rel=1e-5)
        weights.append(weights_of(session.model))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=2e-6)


# BC-28
def test_a_user_who_unscales_before_clipping_is_not_unscaled_twice() -> None:
    weights = []
    for by_hand in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        session, optimizer = build_session(
            build_model(),
            scaler=scaler,
            max_norm=None if by_hand else 0.3,
            batch=LocalBatch(8),
            num_steps=40,
        )
        with session:
            for images, labels, _ in session:
                session.backward(F.cross_entropy(session.model(images), labels))
                if by_hand:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.3)
                session.step()
        weights.append(weights_of(session.model))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-6)


# BC-26
def test_weights_of_micro_batches_make_the_gradient_a_mean_over_tokens() -> None:
    model = nn.Linear(3, 1, bias=False)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    session = Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        dataset=TensorDataset(inputs),
        base_batch_size=6,
        num_steps=1,
        batch=LocalBatch(6, micro_batches=3),
        loader=LoaderOptions(shuffle=False),
        progress_bar=False,
    )
    before = model.weight.detach().clone()
    tokens = iter([5.0, 1.0, 3.0])
    with session:
        for (batch,) in session:
            session.backward(session.model(batch).mean(), weight=next(tokens))
            result = session.step()
    means = inputs.view(3, 2, 3).mean(1)
    wanted = (torch.tensor([5.0, 1.0, 3.0])[:, None] * means).sum(0) / 9
    assert torch.allclose(before - model.weight.detach(), 0.5 * wanted, atol=1e-6)
    assert result is not None
    assert result.weight == 9


def test_frozen_unused_and_shared_parameters_train_like_the_plain_loop() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(64, 16)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.shared = nn.Linear(16, 16)
            self.unused = nn.Linear(4, 4)
            self.last = nn.Linear(16, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            hidden = self.shared(torch.tanh(self.frozen(torch.tanh(self.first(images)))))
            return self.last(torch.tanh(self.shared(torch.tanh(hidden))))

    model, plain = Odd(), Odd()
    session, _ = build_session(model, dataset=Digits(304), rule=Identity(), num_steps=20)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=20)
    with session:
        for number, (images, labels, _) in enumerate(session):
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()
            (F.cross_entropy(plain(images), labels) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, theirs, atol=2e-6)


# BC-11
def test_zero_grad_by_the_user_in_either_form_changes_nothing() -> None:
    weights = []
    for set_to_none in (None, True, False):
        session, optimizer = build_session(build_model(), num_steps=20)
        with session:
            for images, labels, _ in session:
                if set_to_none is not None:
                    optimizer.zero_grad(set_to_none=set_to_none)
                session.backward(F.cross_entropy(session.model(images), labels))
                session.step()
        weights.append(weights_of(session.model))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("per", ["model", "param_group"])
def test_a_parameter_group_that_is_added_later_is_averaged_and_measured(per: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(64, 16), "head": nn.Linear(16, 10)})
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1, momentum=0.9)
    session = session_over(
        model,
        optimizer=optimizer,
        num_steps=80,
        batch=GlobalBatch(32, micro_batches=4),
        measuring=Measuring(per=per),
    )
    frozen = model["body"].weight.detach().clone()
    with session:
        for images, labels, _ in session:
            hidden = torch.tanh(model["body"](images))
            session.backward(F.cross_entropy(model["head"](hidden), labels))
            result = session.step()
            if result is not None and result.step == 10:
                assert torch.equal(frozen, model["body"].weight)
                optimizer.add_param_group({"params": model["body"].parameters(), "lr": 0.05})
    assert result is not None
    assert result.step > 10
    assert not torch.equal(frozen, model["body"].weight)
    averages = session.state_dict()["controller"]["averages"]
    assert len(averages) == (2 if per == "param_group" else 1)
    assert averages[-1]["count"] > 0


class GrowingBatch:
    """A batch whose size a test changes between two steps, in one micro-batch of one worker."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def batch_samples(self, world_size: int) -> int:
        return self.samples * world_size

    def num_parts(self, world_size: int) -> int:
        return world_size

    def deal(self, start: int, stop: int, *, world: Any, min_samples: int) -> Any:
        return LocalBatch(self.samples).deal(start, stop, world=world, min_samples=min_samples)


@pytest.mark.parametrize("several", [False, True])
def test_a_batch_that_grows_leaves_to_old_gradients_what_they_did_to_the_weights(several) -> None:
    dataset = Digits(dtype=torch.float64)
    model, plain = build_model(torch.float64), build_model(torch.float64)
    batch, rates = GrowingBatch(8), []
    parts = [model[0], model[2]] if several else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in parts]
    session = session_over(
        model,
        dataset=dataset,
        optimizer=optimizers if several else optimizers[0],
        num_steps=200,
        batch=batch,
        rule=Linear(),
        loader=LoaderOptions(seed=3, straddle_epochs=True),
    )
    displacements = [torch.zeros_like(p) for p in plain.parameters()]
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            rates.append(result.lr)
            loss = F.cross_entropy(plain(images), labels)
            gradients = torch.autograd.grad(loss, list(plain.parameters()))
            with torch.no_grad():
                for p, v, g in zip(plain.parameters(), displacements, gradients, strict=True):
                    v.mul_(0.9).add_(g, alpha=result.lr)
                    p.sub_(v)
            batch.samples = 8 if result.step < 6 else 24
            if result.step == 40:
                break
    assert rates[:7] == [0.05] * 7
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.15)
    assert torch.allclose(weights_of(model), weights_of(plain), rtol=0, atol=1e-12)


def test_a_gain_for_each_parameter_group_scales_each_groups_lr() -> None:
    model = build_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    factors = []
    session = session_over(
        model,
        optimizer=optimizer,
        num_steps=60,
        batch=GlobalBatch(32, micro_batches=4),
        measuring=Measuring(per="param_group"),
        compensation=None,
    )
    handle = optimizer.register_step_pre_hook(
        lambda optimizer, *_: factors.append([group["lr"] for group in optimizer.param_groups])
    )
    with session:
        train(session)
    handle.remove()
    assert factors[0] == [0.1, 0.05]
    assert all(0.1 <= a <= 0.4 and 0.05 <= b <= 0.2 for a, b in factors)
    assert any(abs(a / 0.1 - b / 0.05) > 0.05 for a, b in factors)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_measuring_every_fourth_step_keeps_moments_in_between() -> None:
    session, _ = build_session(build_model(), measuring=Measuring(every=4))
    with session:
        record = train(session)
    assert record["gain"][:9].count(1.0) == 1
    assert record["gain"][1:5] == pytest.approx([record["gain"][1]] * 4)
    count = session.state_dict()["controller"]["averages"][0]["count"]
    assert count == -(-len(record["gain"]) // 4)


def test_which_steps_are_measured_changes_no_bit_of_the_weights_under_a_rule_without_gain() -> None:
    weights = []
    for every in (1, 3, 1000, "auto"):
        session, _ = build_session(
            build_model(),
            rule=elastane.Linear(),
            measuring=Measuring(every=every),
            batch=LocalBatch(15, micro_batches=3),
            num_steps=40,
        )
        with session:
            weights.append(train(session)["weights"])
    assert all(torch.equal(one, weights[0]) for one in weights)


def test_steps_are_measured_as_seldom_as_the_noise_allows_by_default() -> None:
    session, _ = build_session(build_model(), batch=GlobalBatch(8, micro_batches=2))
    with session:
        num_steps = len(train(session)["gain"])
        assert session.state_dict()["controller"]["averages"][0]["count"] < num_steps / 4


def test_leaving_the_loop_in_a_window_loses_only_what_was_not_committed() -> None:
    whole, _ = build_session(build_model())
    with whole:
        wanted = train(whole)
    session, _ = build_session(build_model())
    with session:
        for number, (images, labels, _) in enumerate(session):
            if number == 21:
                break
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()
        assert session.position == 5 * 32
        train(session)
    weights = weights_of(session.model)
    assert torch.equal(weights, wanted["weights"])


def test_stop_ends_the_run_after_the_step_at_work() -> None:
    session, _ = build_session(build_model())
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            if result is not None and result.step == 3:
                session.stop()
    assert result is not None
    assert result.step == 4


def test_loader_processes_change_nothing_and_resuming_may_change_their_number() -> None:
    plain, _ = build_session(build_model(), num_steps=60)
    with plain:
        wanted = train(plain)
    model = build_model()
    session, optimizer = build_session(
        model, num_steps=60, loader=LoaderOptions(seed=3, num_workers=2)
    )
    with session:
        first = train(session, max_steps=7)
        state = session.state_dict()
    resumed, other = build_session(model, num_steps=60, loader=LoaderOptions(seed=3, num_workers=1))
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    with resumed:
        second = train(resumed)
    assert first["seen"] + second["seen"] == wanted["seen"]
    assert torch.equal(second["weights"], wanted["weights"])


def packed(samples: list[tuple[torch.Tensor, int, int]]) -> tuple[torch.Tensor, ...]:
    """Return rows of up to three images that share a label, and all indices in one tensor."""
    by_label: dict[int, list[torch.Tensor]] = {}
    for image, label, _ in samples:
        by_label.setdefault(label, []).append(image)
    rows = [
        (torch.stack(images[at : at + 3]).mean(0), label)
        for label, images in by_label.items()
        for at in range(0, len(images), 3)
    ]
    images, labels = zip(*rows, strict=True)
    indices = torch.tensor([index for _, _, index in samples])
    return torch.stack(images), torch.tensor(labels), indices


# BC-42
# [25]
def test_a_resume_counts_samples_not_what_the_collate_function_made_of_them() -> None:
    loader = LoaderOptions(seed=3, collate_fn=packed)
    session, optimizer = build_session(
        build_model(), batch=LocalBatch(24, micro_batches=2), loader=loader
    )
    with session:
        first = train(session, max_steps=9)
        state = session.state_dict()
    resumed, other = build_session(
        build_model(), batch=LocalBatch(24, micro_batches=2), loader=loader
    )
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    with resumed:
        second = train(resumed, max_steps=20)
    samples = [index for indices, _ in first["seen"] + second["seen"] for index in indices]
    assert samples == stream_indices(0, len(samples), num_samples=301, seed=3).tolist()


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "session"])))
def test_a_saved_run_goes_on_as_if_nothing_had_happened_in_any_order_of_loading(
    order: tuple[str, ...], tmp_path: Any
) -> None:
    def with_dropout() -> nn.Module:
        return nn.Sequential(build_model(), nn.Dropout(0.1))

    torch.manual_seed(7)
    whole, _ = build_session(with_dropout())
    with whole:
        torch.manual_seed(8)
        wanted = train(whole)
    session, optimizer = build_session(with_dropout())
    with session:
        torch.manual_seed(8)
        train(session, max_steps=20)
        parts = {"model": session.model, "optimizer": optimizer, "session": session}
        torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "saved")
    state = torch.load(tmp_path / "saved", weights_only=True)
    session, optimizer = build_session(with_dropout())
    parts = {"model": session.model, "optimizer": optimizer, "session": session}
    for name in order:
        parts[name].load_state_dict(state[name])
    with session:
        record = train(session)
    assert record["gain"] == wanted["gain"][20:]
    assert record["lr"] == wanted["lr"][20:]
    assert record["position"] == wanted["position"][20:]
    assert torch.equal(record["weights"], wanted["weights"])


def test_a_session_state_alone_sets_the_lr_of_a_fresh_optimizer() -> None:
    session, optimizer = build_session(build_model())
    with session:
        train(session, max_steps=30)
    fresh, other = build_session(build_model())
    fresh.load_state_dict(session.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1


# BC-12
def test_the_state_loads_without_elastane_as_plain_tensors_and_numbers(tmp_path: Any) -> None:
    session, _ = build_session(build_model(), scaler=torch.amp.GradScaler("cpu"))
    with session:
        train(session, max_steps=2)
    torch.save(session.state_dict(), tmp_path / "state")

    def check(value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                assert isinstance(key, str)
                check(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                check(item)
        else:
            assert isinstance(value, (torch.Tensor, int, float, str, bool, type(None)))

    check(torch.load(tmp_path / "state", weights_only=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "version=0"),
        ({"num_samples": 300}, "num_samples=300 and this session has 301"),
        ({"base_batch_size": 16}, "base_batch_size=16"),
        ({"seed": 4}, "seed=4"),
    ],
)
def test_a_state_of_another_run_is_refused_and_nothing_moves(
    change: dict[str, int], message: str
) -> None:
    session, _ = build_session(build_model())
    state = session.state_dict() | change
    state["position"] = 320
    with pytest.raises(StateError, match=message):
        session.load_state_dict(state)
    assert session.position == 0


def test_a_state_with_other_groups_or_another_kind_of_schedule_is_refused_whole() -> None:
    session, _ = build_session(build_model())
    other, _ = build_session(build_model(), schedule=lambda progress: 1.0)  # noqa: ARG005
    with other:
        train(other, max_steps=3)
    with pytest.raises(StateError, match="same kind of schedule"):
        session.load_state_dict(other.state_dict())
    assert (session.position, session.progress) == (0, 0.0)


def test_num_epochs_counts_the_steps_of_a_plain_loader() -> None:
    loader = DataLoader(Digits(), batch_size=8)
    model = build_model()
    other = session_over(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        num_epochs=2,
        rule=Identity(),
    )
    with other:
        record = train(other)
    assert len(record["gain"]) == 2 * len(loader) == 76
    assert other.epoch == 2


def test_batch_norm_gets_no_micro_batch_of_one_sample() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    session, _ = build_session(
        model, dataset=Digits(33), batch=LocalBatch(32, micro_batches=4), rule=Linear(), num_steps=9
    )
    with session:
        record = train(session)
    assert record["position"] == [33, 66, 99]
    assert min(len(indices) for indices, _ in record["seen"]) >= 2


def test_evaluation_sums_are_exact_and_leave_the_model_as_it_was() -> None:
    session, _ = build_session(nn.Sequential(build_model(), nn.Dropout(0.5)))
    dataset = Digits(101)

    def count(model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        images, _, indices = batch
        return {"indices": indices.sum(), "samples": len(images)}

    with session:
        result = session.evaluate(count, dataset, batch_size=32)
    assert result.sums == {"indices": sum(range(101)), "samples": 101.0}
    assert result.mean("samples") == 1.0
    assert result.num_samples == 101
    assert session.model.training


def test_telemetry_tells_what_the_contract_says(tmp_path: Any) -> None:
    session, _ = build_session(build_model(), run_dir=tmp_path / "run", num_steps=20)
    with session:
        record = train(session)
        with session.pause("lunch"):
            pass
        session.evaluate(lambda model, batch: {"ones": len(batch[0])}, Digits(10))  # noqa: ARG005
    events = read_events(tmp_path / "run")
    for event in events:
        assert set(event) >= EVENT_FIELDS[str(event["event"])] | {"event", "time"}
    kinds = Counter(event["event"] for event in events)
    assert kinds == {
        "start": 1,
        "step": len(record["gain"]),
        "pause": 1,
        "evaluation": 1,
        "end": 1,
    }
    steps = [event for event in events if event["event"] == "step"]
    assert [event["progress"] for event in steps] == record["progress"]
    assert [event["loss"] for event in steps] == record["loss"]
    assert events[-1]["cause"] == "finished"
    assert "AdaScale" in str(events[0]["rule"])


def test_an_error_in_the_loop_is_the_end_that_telemetry_tells(tmp_path: Any) -> None:
    session, _ = build_session(build_model(), run_dir=tmp_path)
    with pytest.raises(ZeroDivisionError), session:
        for _ in session:
            raise ZeroDivisionError
    assert read_events(tmp_path)[-1]["cause"] == "ZeroDivisionError"


def test_building_a_session_changes_nothing_outside(tmp_path: Any) -> None:
    torch.manual_seed(0)
    build_model()
    after_model = torch.get_rng_state()
    torch.manual_seed(0)
    build_session(build_model(), run_dir=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), after_model)
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda session: session.step(), "no micro-batch at work"),
        (lambda session: session.backward(torch.ones(())), "no micro-batch at work"),
        (lambda session: session.weight, "no micro-batch at work"),
    ],
)
def test_calls_outside_the_loop_say_where_they_belong(act: Any, message: str) -> None:
    session, _ = build_session(build_model())
    with session, pytest.raises(UsageError, match=message):
        act(session)


def test_iterating_outside_with_is_refused() -> None:
    session, _ = build_session(build_model())
    with pytest.raises(UsageError, match="with Session"):
        next(iter(session))


def test_step_without_backward_is_refused_for_inner_and_last_micro_batches() -> None:
    for batch in (LocalBatch(8), LocalBatch(8, micro_batches=2)):
        session, _ = build_session(build_model(), batch=batch)
        with session, pytest.raises(UsageError, match="without a gradient"):
            for _ in session:
                session.step()


def test_forgetting_step_is_refused() -> None:
    session, _ = build_session(build_model())
    with session, pytest.raises(UsageError, match=r"step\(\) was not called"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))


def test_calling_step_twice_is_refused() -> None:
    session, _ = build_session(build_model(), batch=LocalBatch(8))
    with session, pytest.raises(UsageError, match="once for each micro-batch"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()
            session.step()


def test_a_gain_rule_that_can_measure_nothing_is_warned_of() -> None:
    measuring = Measuring(single="off")
    session, _ = build_session(build_model(), batch=LocalBatch(32), measuring=measuring)
    with session, pytest.warns(UserWarning, match="one gradient a step"):
        train(session, max_steps=2)


def test_the_top_level_holds_what_the_readme_uses() -> None:
    assert elastane.Session is Session
    assert {"Session", "AdaScale", "LocalBatch"} <= set(dir(elastane))


def test_static_graph_with_accumulation_is_refused_by_name(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Replica(build_model())
        model.use(wrap(model.inner, group=dist.group.WORLD, options={"static_graph": True}))
        with pytest.raises(UnsupportedError, match="static_graph"):
            without_sync(model)
        model.use(None)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "value"),
    [("start_method", "spawn"), ("timeout_s", 3.0), ("worker_init_fn", print)],
)
def test_loader_options_that_have_no_effect_are_warned_of(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect with num_workers=0"):
        LoaderOptions(**{name: value})
    LoaderOptions(num_workers=1, **{name: value})


def test_attributes_set_on_the_sessions_model_reach_the_users_model() -> None:
    model = build_model()
    session, _ = build_session(model)
    session.model.note = "kept"
    session.model.added = nn.Linear(2, 2)
    assert model.note == "kept"
    assert "added.weight" in model.state_dict()


def test_a_group_that_joins_later_starts_with_its_own_gradients_alone() -> None:
    norms = []
    for late in (True, False):
        model = build_model()
        first = {"params": list(model[2].parameters())}
        second = {"params": list(model[0].parameters())}
        optimizer = torch.optim.SGD([first] if late else [first, second | {"lr": 0.0}], lr=0.1)
        session = session_over(
            model,
            optimizer=optimizer,
            num_steps=40,
            rule=Identity(),
            batch=GlobalBatch(32, micro_batches=4),
        )
        with session:
            for images, labels, _ in session:
                session.backward(F.cross_entropy(session.model(images), labels))
                result = session.step()
                if result is not None and result.step == 10 and late:
                    optimizer.add_param_group(second | {"lr": 0.0})
                if result is not None and result.step == 11:
                    norms.append(result.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_group_of_another_model_is_refused_when_it_joins() -> None:
    session, optimizer = build_session(build_model())
    with session, pytest.raises(ArgumentError, match=r"is no parameter of the model"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            if session.step() is not None:
                optimizer.add_param_group({"params": build_model().parameters()})


@pytest.mark.parametrize("act", ["evaluate", "pause", "iterate"])
def test_what_needs_the_workers_is_refused_outside_with(act: str) -> None:
    session, _ = build_session(build_model(), num_steps=5)

    def try_it() -> None:
        if act == "evaluate":
            session.evaluate(lambda model, batch: {"ones": 1}, Digits(10))  # noqa: ARG005
        elif act == "pause":
            session.pause("lunch")
        else:
            iter(session)

    with pytest.raises(UsageError, match="not open"):
        try_it()
    with session:
        train(session)
    with pytest.raises(UsageError, match="not open"):
        try_it()


def test_a_session_is_entered_once() -> None:
    session, _ = build_session(build_model(), num_steps=5)
    with session, pytest.raises(UsageError, match="entered once"), session:
        pass
    with pytest.raises(UsageError, match="entered once"), session:
        pass


def test_a_run_that_is_over_says_so_when_it_is_iterated_again() -> None:
    session, _ = build_session(build_model(), num_steps=5)
    with session:
        train(session)
        with pytest.warns(UserWarning, match="the run is finished"):
            assert list(session) == []


def test_two_backward_calls_in_one_micro_batch_are_refused() -> None:
    session, _ = build_session(build_model())
    with session, pytest.raises(UsageError, match="add up the losses"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            session.backward(F.cross_entropy(session.model(images), labels))


def test_stepping_the_optimizer_by_hand_is_refused_inside_and_free_outside() -> None:
    session, optimizer = build_session(build_model())
    with session, pytest.raises(UsageError, match=r"optimizer\.step\(\) was called inside"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            optimizer.step()
    optimizer.step()


def test_stepping_the_schedule_by_hand_is_refused() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=100)
    session = session_over(
        model,
        optimizer=optimizer,
        schedule=schedule,
        num_steps=100,
    )
    with session, pytest.raises(UsageError, match=r"don't call schedule\.step\(\) yourself"):
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()
            schedule.step()


def test_a_linear_decay_reaches_zero_at_the_end_and_not_below() -> None:
    session, optimizer = build_session(
        build_model(), schedule=lambda progress: 1 - progress / 60, num_steps=60
    )
    with session:
        record = train(session)
    assert record["progress"][-1] > 60
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_a_nan_loss_with_a_weight_of_zero_is_left_out() -> None:
    weights = []
    for masked in (True, False):
        session, _ = build_session(build_model(), num_steps=30, dataset=Digits(304))
        with session:
            for number, (images, labels, _) in enumerate(session):
                loss = F.cross_entropy(session.model(images), labels)
                empty = number % 4 in (1, 3)
                if masked and empty:
                    loss = loss * math.nan
                session.backward(loss, weight=0 if empty else len(images))
                result = session.step()
                assert result is None or not result.skipped
        weights.append(weights_of(session.model))
    assert torch.equal(weights[0], weights[1])


def test_unscaling_before_the_window_is_put_together_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session, optimizer = build_session(build_model(), scaler=scaler)
    with session, pytest.raises(UsageError, match=r"use session\.backward\(loss\)"):
        for number, (images, labels, _) in enumerate(session):
            scaler.scale(F.cross_entropy(session.model(images), labels)).backward()
            if number == 3:
                scaler.unscale_(optimizer)
            session.step()


def test_unscaling_by_hand_after_loss_backward_is_measured_as_it_is() -> None:
    norms = []
    for by_hand in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        batch = LocalBatch(8)
        session, optimizer = build_session(
            build_model(), scaler=scaler, batch=batch, dataset=Digits(304)
        )
        with session:
            for images, labels, _ in itertools.islice(session, 10):
                loss = F.cross_entropy(session.model(images), labels)
                if by_hand:
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                else:
                    session.backward(loss)
                result = session.step()
                assert result is not None
        norms.append(result.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_scaler_that_never_scaled_a_loss_is_noticed() -> None:
    session, _ = build_session(
        build_model(), scaler=torch.amp.GradScaler("cpu"), batch=LocalBatch(8)
    )
    with session, pytest.raises(UsageError, match="no loss was scaled"):
        for images, labels, _ in session:
            F.cross_entropy(session.model(images), labels).backward()
            session.step()


def test_a_state_is_not_loaded_inside_a_window_and_may_be_between_two() -> None:
    session, optimizer = build_session(build_model())
    wanted = None
    with session:
        for number, (images, labels, _) in enumerate(session):
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()
            if number == 3:
                parts = {"model": session.model, "optimizer": optimizer, "session": session}
                saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            if number == 5:
                with pytest.raises(UsageError, match="inside an accumulation window"):
                    session.load_state_dict(saved["session"])
            if number == 11:
                if wanted is not None:
                    break
                wanted = session.position
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
                assert session.position == 32
    assert wanted == 96


def test_loading_makes_a_stopped_session_one_that_goes_on() -> None:
    session, _ = build_session(build_model())
    with session:
        for images, labels, _ in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            if result is not None and result.step == 2:
                session.stop()
        session.load_state_dict(session.state_dict())
        assert len(train(session, max_steps=3)["gain"]) == 3


@pytest.mark.parametrize("options", [{"shuffle": False}, {"straddle_epochs": True}])
def test_a_state_is_refused_by_a_session_that_deals_otherwise(options: dict[str, bool]) -> None:
    session, _ = build_session(build_model())
    other, _ = build_session(build_model(), loader=LoaderOptions(seed=3, **options))
    with pytest.raises(StateError, match=next(iter(options))):
        other.load_state_dict(session.state_dict())


@pytest.mark.parametrize("state", [None, 3, {"model": {}, "session": {}}])
def test_what_is_no_sessions_state_is_refused_with_a_hint(state: Any) -> None:
    session, _ = build_session(build_model())
    with pytest.raises(StateError, match="no session's state"):
        session.load_state_dict(state)


def test_a_state_that_fails_half_way_leaves_everything_as_it_was() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    session, _ = build_session(build_model(), scaler=scaler)
    with session:
        train(session, max_steps=3)
    other, _ = build_session(build_model(), scaler=torch.amp.GradScaler("cpu"))
    before = other.state_dict()
    with pytest.raises(StateError, match="another form"):
        other.load_state_dict(session.state_dict())
    assert other.state_dict()["controller"] == before["controller"]
    assert (other.position, other.progress) == (0, 0.0)


def test_a_state_saved_right_after_a_group_joined_can_be_loaded() -> None:
    def build() -> tuple[Session, torch.optim.Optimizer, nn.Module]:
        model = build_model()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        session = session_over(
            model,
            optimizer=optimizer,
            num_steps=100,
            batch=GlobalBatch(32, micro_batches=4),
            measuring=Measuring(per="param_group"),
        )
        return session, optimizer, model

    session, optimizer, model = build()
    with session:
        train(session, max_steps=3)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        state = session.state_dict()
    model = build_model()
    groups = [{"params": model[2].parameters()}, {"params": model[0].parameters(), "lr": 0.05}]
    other = session_over(
        model,
        optimizer=torch.optim.SGD(groups, lr=0.1),
        num_steps=100,
        batch=GlobalBatch(32, micro_batches=4),
        measuring=Measuring(per="param_group"),
    )
    other.load_state_dict(state)
    with other:
        train(other, max_steps=3)
    assert [one["count"] for one in other.state_dict()["controller"]["averages"]] == [6, 3]


# BC-17
def test_adam_under_the_rule_for_sgd_is_warned_of_and_under_its_own_is_not() -> None:
    model = build_model()
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": Digits(),
        "base_batch_size": 8,
        "num_steps": 10,
        "progress_bar": False,
    }
    with pytest.warns(UserWarning, match="AdamScale"):
        Session(model, **arguments)
    Session(model, rule=elastane.AdamScale(), **arguments)


def waits_in(function: Any) -> int:
    """Return how often the host reads a scalar from the device in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(
        event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense"
    )


@pytest.mark.parametrize("with_scaler", [False, True])
def test_a_step_waits_for_one_small_vector_and_no_scalar_more_than_a_plain_loop(
    with_scaler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sums, "reads_at_once", lambda _device: False)  # as on an accelerator

    def scaler() -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler("cpu", init_scale=64.0) if with_scaler else None

    def plain(model: nn.Module) -> None:
        optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler()
        for images, labels, _ in DataLoader(Digits(80), batch_size=8):
            loss = F.cross_entropy(model(images), labels)
            (loss if own is None else own.scale(loss)).backward()
            if own is None:
                optimizer.step()
            else:
                own.step(optimizer)
                own.update()
            optimizer.zero_grad()

    def ours(session: Session) -> None:
        for images, labels, _ in itertools.islice(session, 10):
            session.backward(F.cross_entropy(session.model(images), labels))
            session.step()

    session, _ = build_session(
        build_model(), dataset=Digits(80), batch=LocalBatch(8), scaler=scaler()
    )
    with session:
        assert waits_in(lambda: ours(session)) <= waits_in(lambda: plain(build_model())) + 10


# BC-19
def test_is_last_micro_batch_tells_where_to_clip_by_hand() -> None:
    weights = []
    for by_hand in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        session, optimizer = build_session(
            build_model(), scaler=scaler, max_norm=None if by_hand else 0.3, num_steps=60
        )
        with session:
            for images, labels, _ in session:
                session.backward(F.cross_entropy(session.model(images), labels))
                if by_hand and session.is_last_micro_batch:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.3)
                session.step()
        weights.append(weights_of(session.model))
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=2e-6)


# BC-01
@pytest.mark.parametrize("divided", [False, True])
def test_a_loss_that_the_user_divides_has_the_same_gain_and_a_shorter_step(divided: bool) -> None:
    # Orthogonal gradients in four micro-batches are worth four steps, however they are scaled.
    model = nn.Linear(4, 2, bias=False)
    before = model.weight.detach().clone()
    session = Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        dataset=TensorDataset(torch.eye(4)),
        base_batch_size=1,
        num_steps=4,
        batch=LocalBatch(4, micro_batches=4),
        measuring=Measuring(current=True),
        loader=LoaderOptions(shuffle=False),
        compensation=None,
        progress_bar=False,
    )
    with session:
        for (inputs,) in session:
            loss = session.model(inputs).sum()
            session.backward(loss / 4 if divided else loss)
            result = session.step()
    assert result is not None
    assert result.gain == pytest.approx(4.0)
    wanted = torch.full((2, 4), 4.0 / 4 / (4 if divided else 1))
    assert torch.allclose(before - model.weight.detach(), wanted)


# BC-55
def test_batch_statistics_move_once_a_micro_batch_as_documented() -> None:
    means = []
    for micro_batches in (1, 8):
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        noise = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
        session = Session(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            dataset=TensorDataset(3 + noise - noise.mean()),
            base_batch_size=64,
            num_steps=1,
            batch=LocalBatch(64, micro_batches=micro_batches),
            progress_bar=False,
        )
        with session:
            for (inputs,) in session:
                session.backward(session.model(inputs).mean())
                session.step()
        means.append(model[0].running_mean.item())
        assert model[0].num_batches_tracked == micro_batches
    assert means[0] == pytest.approx(3 * 0.1, abs=1e-5)
    assert means[1] == pytest.approx(3 * (1 - 0.9**8), abs=0.2)


def test_micro_batches_too_small_for_batch_norm_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    for batch in (LocalBatch(2, micro_batches=2), GlobalBatch(6, micro_batches=4)):
        with pytest.raises(ArgumentError, match="which BatchNorm needs"):
            build_session(model, batch=batch)


def test_a_scheduler_that_was_built_and_not_passed_is_noticed() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    CosineAnnealingLR(optimizer, T_max=10)
    with pytest.warns(UserWarning, match="pass schedule="):
        session_over(
            model,
            optimizer=optimizer,
            num_steps=10,
        )


def test_a_state_can_be_taken_back_right_after_a_group_joined_under_a_torch_scheduler() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    schedule = CosineAnnealingLR(optimizer, T_max=100)
    session = session_over(model, optimizer=optimizer, schedule=schedule, num_steps=100)
    with session:
        train(session, max_steps=3)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        lr = optimizer.param_groups[0]["lr"]
        session.load_state_dict(session.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [lr, 0.05]


def test_an_error_in_step_leaves_no_gradient_for_the_next_try() -> None:
    norms, answers = [], iter([1.0, 1.0, math.nan])
    session, _ = build_session(
        build_model(),
        batch=LocalBatch(8),
        dataset=Digits(304),
        schedule=lambda progress: next(answers, 1.0),  # noqa: ARG005
    )
    with session:
        for _ in range(2):
            with suppress(ArgumentError):
                for images, labels, _ in session:
                    session.backward(F.cross_entropy(session.model(images), labels))
                    norms.append([p.grad.norm().item() for p in session.model.parameters()])
                    session.step()
                    if len(norms) == 3:
                        break
    assert norms[1] == norms[2] != norms[0]


@pytest.mark.parametrize(("width", "backs_off"), [(24, False), (100, True)])
def test_a_loss_scale_whose_norm_overflows_backs_off_as_infinite_elements_do(
    width: int, backs_off: bool
) -> None:
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=10**6)
    session, _ = build_session(
        model, scaler=scaler, batch=LocalBatch(8), dataset=Digits(304), num_steps=30
    )
    with session:
        record = train(session)
    assert record["progress"][-1] == 30
    # Less than a row of elements is summed in float64, where the squares have room.
    assert (scaler.get_scale() < 2.0**70) == backs_off


def test_a_session_that_is_dropped_frees_model_and_dataset_at_once() -> None:
    build_session(build_model())  # with the first optimizer torch imports much, and keeps frames
    gc.collect()
    gc.disable()
    try:
        model, dataset = build_model(), Digits()
        session, optimizer = build_session(model, dataset=dataset)
        with session:
            train(session, max_steps=3)
        held = [weakref.ref(model), weakref.ref(dataset)]
        del session, optimizer, model, dataset
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


def test_the_session_stays_a_small_file() -> None:
    path = Path(elastane.__file__).parent / "session.py"
    assert len(path.read_text().splitlines()) < 250
