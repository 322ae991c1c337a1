"""What Adam and its kin are given beside the learning rate, and how their noise is seen."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import Digits, build_model, session_over, train, weights_of

from elastane import (
    AdamScale,
    AdaScale,
    Follow,
    GlobalBatch,
    Linear,
    LoaderOptions,
    LocalBatch,
    Measuring,
    Sqrt,
)
from elastane.adaptive import base_excess, preconditioners, raise_second_moments
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.follow import (
    MomentWeights,
    followed_decay,
    followed_eps,
    half_life_beta,
)
from elastane.follower import Follower
from elastane.square_sums import SquareSums

SQRT = Sqrt()
ALL = Follow(betas="both", eps=True, weight_decay=True)
scales = st.floats(0.25, 64.0)
betas = st.floats(0.5, 0.9999)


# Formulas ---------------------------------------------------------------------------------------


@given(beta=betas, scale=scales)
def test_an_average_of_large_batches_keeps_its_half_life_in_samples(beta, scale):
    half_life = math.log(0.5) / math.log(beta)
    followed = half_life_beta(beta, scale=scale)
    assert math.log(0.5) / math.log(followed) * scale == pytest.approx(half_life)


def test_eps_shrinks_as_the_noise_in_the_root_of_the_second_moment_does():
    assert followed_eps(1e-8, scale=16) == 2.5e-9
    assert followed_eps(1e-8, scale=1) == 1e-8


@given(lr=st.floats(1e-5, 1.0), decay=st.floats(1e-4, 0.5), scale=scales)
def test_a_step_decays_as_much_as_the_base_steps_that_it_is_worth(lr, decay, scale):
    factor = math.sqrt(scale)
    followed = followed_decay(decay, factor=factor, progress=scale)
    assert lr * factor * followed == pytest.approx(scale * lr * decay)


@given(
    values=st.lists(st.tuples(st.floats(-3, 3), scales), min_size=1, max_size=12),
    beta=st.tuples(betas, betas),
)
def test_adam_divides_by_what_went_into_its_averages_however_their_betas_change(values, beta):
    weights, first, second = MomentWeights(), 0.0, 0.0
    shares: list[list[float]] = [[], []]
    for gradient, scale in values:
        now = half_life_beta(beta[0], scale=scale), half_life_beta(beta[1], scale=scale)
        first = now[0] * first + (1 - now[0]) * gradient
        second = now[1] * second + (1 - now[1]) * gradient**2
        for index, kept in enumerate(now):
            shares[index] = [kept * one for one in shares[index]] + [1 - kept]
        weights = weights.updated(now)
        lr, eps = weights.corrections(now)
        steps = len(shares[0])
        c1, c2 = 1 - now[0] ** steps, 1 - now[1] ** steps
        found = lr * (first / c1) / (math.sqrt(second / c2) + eps * 1e-3)
        wanted = (first / sum(shares[0])) / (math.sqrt(second / sum(shares[1])) + 1e-3)
        assert found == pytest.approx(wanted, rel=1e-7, abs=1e-12)


def test_weights_of_other_fields_are_refused():
    weights = MomentWeights().updated((0.9, 0.99))
    assert MomentWeights.from_state_dict(weights.state_dict()) == weights
    with pytest.raises(StateError, match="moment weights"):
        MomentWeights.from_state_dict({"steps": 1.0, "third": 2.0})


def test_the_excess_of_base_batches_is_what_their_mean_square_is_above_that_of_their_mean():
    source = torch.Generator().manual_seed(0)
    gradients = torch.randn(4, 50, generator=source, dtype=torch.float64)
    mean = gradients.mean(0)
    excess = base_excess(
        8 * gradients.square().sum(0), mean, batch_samples=32, num_gradients=4, base_batch_size=8
    )
    torch.testing.assert_close(mean.square() + excess, gradients.square().mean(0))


def test_the_excess_is_right_on_average_for_uneven_micro_batches_of_any_size():
    source, sizes, base = torch.Generator().manual_seed(1), [3, 12, 17], 8
    batch, elements = sum(sizes), 400_000
    gradients = [
        0.5 + torch.randn(elements, generator=source, dtype=torch.float64) / math.sqrt(size)
        for size in sizes
    ]
    pairs = list(zip(gradients, sizes, strict=True))
    mean = sum(size * one for one, size in pairs) / batch
    sqr_sum = sum(size * one.square() for one, size in pairs)
    excess = base_excess(sqr_sum, mean, batch_samples=batch, num_gradients=3, base_batch_size=base)
    assert float((mean.square() + excess).mean()) == pytest.approx(0.25 + 1 / base, rel=0.01)


def test_below_the_base_batch_no_square_becomes_negative():
    mean = torch.tensor([0.0, 1.0, 0.1])
    excess = base_excess(
        torch.tensor([8.0, 8.0, 8.0]), mean, batch_samples=4, num_gradients=2, base_batch_size=64
    )
    assert (excess <= 0).all()
    assert (mean.square() + excess >= 0).all()


# What an optimizer is given ---------------------------------------------------------------------


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.003, "weight_decay": 0.1} | options))


def stepped(optimizer: torch.optim.Optimizer, *, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=source)
    optimizer.step()


def test_what_follows_is_given_for_the_length_of_a_step_and_put_back_to_the_bit():
    optimizer = adamw(build_model(), betas=(0.9, 0.99), eps=1e-6)
    before = {name: v for name, v in optimizer.param_groups[0].items() if name != "params"}
    follower = Follower(optimizer, ALL)
    with follower.stepping(scale=4, factors=[2.0], progress=4.0):
        group = optimizer.param_groups[0]
        assert group["betas"] == (0.9**4, 0.99**4)
        assert group["eps"] == pytest.approx(5e-7)
        assert group["weight_decay"] == pytest.approx(0.2)
        group["lr"] = before["lr"]  # by whoever scaled it
    after = {name: v for name, v in optimizer.param_groups[0].items() if name != "params"}
    assert after == before


def test_what_follows_is_put_back_after_an_error_and_the_step_is_not_counted():
    optimizer = adamw(build_model())
    follower = Follower(optimizer, ALL)
    stepping = follower.stepping(scale=4, factors=[2.0], progress=4.0)
    with pytest.raises(RuntimeError, match="in the step"), stepping:
        raise RuntimeError("in the step")
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert follower.state_dict() == []


def test_moments_that_an_optimizer_brings_along_count_as_its_steps():
    optimizer = adamw(build_model(), betas=(0.9, 0.99))
    for _ in range(5):
        stepped(optimizer)
    follower = Follower(optimizer, Follow(betas="second"))
    with follower.stepping(scale=4, factors=[1.0], progress=4.0):
        stepped(optimizer)
    (weights,) = follower.state_dict()
    kept = 0.99**4
    wanted = {"steps": 6, "first": 1 - 0.9**6, "second": kept * (1 - 0.99**5) + 1 - kept}
    assert weights == pytest.approx(wanted)


def test_rmsprops_average_follows_too():
    optimizer = torch.optim.RMSprop(build_model().parameters(), lr=1e-3, alpha=0.99)
    follower = Follower(optimizer, Follow(betas="second", eps=True))
    with follower.stepping(scale=9, factors=[3.0], progress=9.0):
        assert optimizer.param_groups[0]["alpha"] == 0.99**9
        assert optimizer.param_groups[0]["eps"] == pytest.approx(1e-8 / 3)
    assert optimizer.param_groups[0]["alpha"] == 0.99


@pytest.mark.parametrize(
    ("follow", "optimizer", "name"),
    [
        (Follow(betas="second"), torch.optim.SGD, "follow.betas"),
        (Follow(betas="both"), torch.optim.NAdam, "follow.betas"),
        (Follow(eps=True), torch.optim.SGD, "follow.eps"),
        (Follow(weight_decay=True), torch.optim.Adam, "follow.weight_decay"),
        (Follow(second_moment="base"), torch.optim.RMSprop, "follow.second_moment"),
    ],
)
def test_what_an_optimizer_has_not_is_refused_by_name(follow, optimizer, name):
    model = build_model()
    made = optimizer(model.parameters(), lr=0.1, weight_decay=1e-2)
    with pytest.raises(ArgumentError, match=name):
        session_over(model, optimizer=made, num_steps=5, rule=AdamScale(), follow=follow)


def test_another_word_for_what_follows_is_refused():
    with pytest.raises(ArgumentError, match="betas"):
        Follow(betas="third")
    with pytest.raises(ArgumentError, match="second_moment"):
        Follow(second_moment="mean")
    model = build_model()
    with pytest.raises(ArgumentError, match="follow"):
        session_over(model, optimizer=adamw(model), num_steps=5, follow="all")


# Steps of a session -----------------------------------------------------------------------------


def run(
    *,
    follow: Follow = Follow(),
    rule: Any = SQRT,
    precondition: bool = False,
    steps: int = 12,
    batch: Any = None,
    max_norm: float | None = None,
    **options: Any,
) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model = build_model()
    optimizer = adamw(model, **options)
    session = session_over(
        model,
        optimizer=optimizer,
        num_steps=1e6,
        rule=rule,
        batch=batch or GlobalBatch(32, micro_batches=4),
        follow=follow,
        measuring=Measuring(every=1, precondition=precondition),
        loader=LoaderOptions(seed=3),
        max_norm=max_norm,
    )
    with session:
        return train(session, max_steps=steps), optimizer


def test_at_the_base_batch_nothing_changes_by_what_follows():
    batch = GlobalBatch(8, micro_batches=2)
    plain, _ = run(batch=batch)
    followed, _ = run(batch=batch, follow=Follow(betas="both", eps=True, weight_decay=True))
    torch.testing.assert_close(followed["weights"], plain["weights"], rtol=1e-6, atol=1e-7)


def test_squares_of_base_batches_are_those_of_the_invariant_adam():
    """Wang and Aitchison: with micro-batches of a base batch v averages their mean square."""
    follow = Follow(second_moment="base")
    record, optimizer = run(follow=follow, steps=4, rule=Linear(), betas=(0.9, 0.99))
    twin = build_model()
    reference = adamw(twin, betas=(0.9, 0.99))
    images, labels = batches_of(record)
    squares = {p: torch.zeros_like(p) for p in twin.parameters()}
    for step in range(4):
        gradients = []
        for index in range(4 * step, 4 * step + 4):
            twin.zero_grad()
            nn.functional.cross_entropy(twin(images[index]), labels[index]).backward()
            gradients.append([p.grad.clone() for p in twin.parameters()])
        for parameter, *each in zip(twin.parameters(), *gradients, strict=True):
            stacked = torch.stack(each)
            parameter.grad = stacked.mean(0)
            squares[parameter].mul_(0.99).add_(stacked.square().mean(0), alpha=0.01)
        for parameter, first in manual_first(reference, twin).items():
            root = (squares[parameter] / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8
            with torch.no_grad():
                parameter *= 1 - 4 * 0.003 * 0.1
                parameter -= 4 * 0.003 * (first / (1 - 0.9 ** (step + 1))) / root
    torch.testing.assert_close(record["weights"], weights_of(twin), rtol=1e-4, atol=1e-6)
    for parameter, square in zip(
        optimizer.param_groups[0]["params"], squares.values(), strict=True
    ):
        found = optimizer.state[parameter]["exp_avg_sq"]
        torch.testing.assert_close(found, square, rtol=1e-3, atol=1e-9)


def batches_of(record: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    dataset = Digits()
    images, labels = [], []
    for indices, _ in record["seen"]:
        samples = [dataset[index] for index in indices]
        images.append(torch.stack([one[0] for one in samples]))
        labels.append(torch.tensor([one[1] for one in samples]))
    return images, labels


def manual_first(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Any, torch.Tensor]:
    """Return the average of gradients after one more step, kept in the optimizer's own state."""
    found = {}
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        first = state.get("first", torch.zeros_like(parameter))
        found[parameter] = state["first"] = 0.9 * first + 0.1 * parameter.grad
    return found


def test_the_first_step_averages_squares_of_base_batches_as_well():
    _, optimizer = run(follow=Follow(second_moment="base"), steps=1, betas=(0.9, 0.99))
    _, plain = run(steps=1, betas=(0.9, 0.99))
    for ours, theirs in zip(
        optimizer.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True
    ):
        assert float(optimizer.state[ours]["step"]) == 1
        larger = optimizer.state[ours]["exp_avg_sq"] - plain.state[theirs]["exp_avg_sq"]
        assert (larger >= -1e-12).all()
        assert larger.sum() > plain.state[theirs]["exp_avg_sq"].sum()
        torch.testing.assert_close(optimizer.state[ours]["exp_avg"], plain.state[theirs]["exp_avg"])


def test_clipping_clips_the_squares_too():
    follow = Follow(second_moment="base")
    _, clipped = run(follow=follow, steps=1, max_norm=0.01)
    _, whole = run(follow=follow, steps=1)
    norms = [
        sum(float(one.state[p]["exp_avg_sq"].sum()) for p in one.param_groups[0]["params"])
        for one in (clipped, whole)
    ]
    gradients, _ = run(steps=1)
    assert norms[0] / norms[1] == pytest.approx((0.01 / gradients["grad_norm"][0]) ** 2, rel=1e-3)


def test_a_window_without_an_own_gradient_of_a_base_batch_steps_as_adam_does():
    batch = GlobalBatch(32)
    plain, _ = run(batch=batch, steps=3)
    single, _ = run(batch=batch, steps=3, follow=Follow(second_moment="base"))
    assert torch.equal(single["weights"], plain["weights"])


def test_the_gain_is_that_of_gradients_as_adam_leaves_them():
    record, _ = run(rule=AdamScale(), precondition=True, steps=3, eps=1e-4)
    assert record["gain"][:2] == [1.0, 1.0]  # there was no second moment in the first step
    one, optimizer = run(rule=AdamScale(), precondition=True, steps=1, eps=1e-4)
    images, labels = batches_of(record)
    twin = build_model()
    nn.utils.vector_to_parameters(one["weights"], twin.parameters())
    roots = []
    for parameter in optimizer.param_groups[0]["params"]:
        square = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999)
        roots.append((square.sqrt() + 1e-4).reshape(-1))
    gradients = []
    for index in range(4, 8):
        twin.zero_grad()
        nn.functional.cross_entropy(twin(images[index]), labels[index]).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
        gradients.append((gradient / torch.cat(roots)).double())
    mean = torch.stack(gradients).mean(0)
    variance = 8 * (sum(float(g @ g) for g in gradients) - 4 * float(mean @ mean)) / 3
    sqr_norm = float(mean @ mean) - variance / 32
    noise, signal = variance / 8, max(sqr_norm, 0.0)
    wanted = (noise + signal) / (noise / 4 + signal)
    assert record["gain"][2] == pytest.approx(wanted, rel=1e-4)


def test_an_optimizer_without_second_moments_can_not_be_measured_by_them():
    model = build_model()
    session = session_over(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        num_steps=9,
        batch=GlobalBatch(16, micro_batches=2),
        measuring=Measuring(precondition=True),
    )
    with session, pytest.raises(UsageError, match="second moment"):
        train(session)


def test_moments_that_are_reset_by_the_user_cost_one_measurement():
    model = build_model()
    optimizer = adamw(model)
    session = session_over(
        model,
        optimizer=optimizer,
        num_steps=1e6,
        rule=AdamScale(),
        batch=GlobalBatch(16, micro_batches=2),
        measuring=Measuring(every=1, precondition=True),
    )
    with session:
        train(session, max_steps=3)
        optimizer.state.clear()
        record = train(session, max_steps=3)
    assert all(gain > 0 for gain in record["gain"])


@pytest.mark.parametrize(
    "options",
    [{"measuring": Measuring(precondition=True)}, {"follow": Follow(second_moment="base")}],
)
def test_a_sharded_model_is_refused(options):
    model = build_model()
    with pytest.raises(UnsupportedError, match="sharded"):
        session_over(
            model,
            optimizer=adamw(model),
            num_steps=5,
            rule=AdamScale(),
            shard=lambda model, _mesh: model,
            **options,
        )


@pytest.mark.parametrize(
    "follow", [ALL, Follow(betas="second", second_moment="base")], ids=["all", "squares"]
)
def test_a_run_goes_on_to_the_bit_after_it_was_saved(follow):
    def build() -> tuple[Any, Any, Any]:
        model = build_model()
        optimizer = adamw(model)
        session = session_over(
            model,
            optimizer=optimizer,
            num_steps=1e6,
            rule=AdaScale() if follow.takes_squares else AdamScale(),
            batch=LocalBatch(24, micro_batches=3),
            follow=follow,
            measuring=Measuring(every=1, precondition=True),
            loader=LoaderOptions(seed=3),
        )
        return model, optimizer, session

    model, optimizer, session = build()
    with session:
        train(session, max_steps=7)
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), session.state_dict()])
        straight = train(session, max_steps=7)
    model, optimizer, session = build()
    for one, saved in zip((model, optimizer, session), state, strict=True):
        one.load_state_dict(saved)
    with session:
        resumed = train(session, max_steps=7)
    assert torch.equal(resumed["weights"], straight["weights"])
    assert (resumed["gain"], resumed["lr"]) == (straight["gain"], straight["lr"])


# Parts ------------------------------------------------------------------------------------------


def test_squares_add_up_with_their_weights_in_the_parameters_own_order():
    parameters = [torch.randn(3, 4).t(), torch.randn(5), torch.randn(2, 3, 4, 4)]
    parameters[2] = parameters[2].to(memory_format=torch.channels_last)
    sums = SquareSums(parameters)
    wanted = [torch.zeros_like(one) for one in parameters]
    for factor in (2.0, 0.5):
        gradients = {id(one): torch.randn_like(one) for one in parameters}
        sums.add(gradients, factor=factor)
        for total, gradient in zip(wanted, gradients.values(), strict=True):
            total += factor * gradient.square()
    for parameter, total in zip(parameters, wanted, strict=True):
        found = sums.sums[id(parameter)]
        assert found.stride() == parameter.stride()
        torch.testing.assert_close(found, total)
    sums.clear()
    assert all(float(one.abs().sum()) == 0 for one in sums.sums.values())


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {}, "square_avg"),
        (torch.optim.Adagrad, {}, "sum"),
    ],
)
def test_second_moments_are_found_under_the_names_that_torch_gives_them(kind, options, name):
    parameter = nn.Parameter(torch.randn(6))
    optimizer = kind([parameter], lr=1e-3, eps=1e-4, **options)
    for seed in range(3):
        stepped(optimizer, seed=seed)
    moment = optimizer.state[parameter][name]
    weight = 1 - 0.999**3 if kind is torch.optim.Adam else 1.0
    wanted = 1 / ((moment / weight).sqrt() + 1e-4)
    torch.testing.assert_close(preconditioners(optimizer)[id(parameter)], wanted)


def test_parameters_without_a_gradient_are_left_alone():
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    parameters[0].grad = torch.tensor([1.0, 2.0, random.random()])
    sums = {id(one): torch.full((3,), 100.0) for one in parameters}
    raise_second_moments(
        optimizer, sums, factor=1.0, batch_samples=16, num_gradients=2, base_batch_size=8
    )
    assert parameters[1] not in optimizer.state
    assert (optimizer.state[parameters[0]]["exp_avg_sq"] > 0).all()
    assert torch.equal(parameters[0].detach(), torch.ones(3))
