"""The scaled step and the schedule against plain torch optimizers and schedulers."""

from __future__ import annotations

import io
import math
from functools import partial
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as sched

from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.optim import (
    ScaledStep,
    clip_coefficient,
    clip_gradients,
    momentum_of,
    scale_momentum,
    scaled_lr,
)
from elastane.optimizers import joined
from elastane.schedule import Schedule

always = partial(settings, derandomize=True, deadline=None, database=None)
closely = partial(pytest.approx, rel=1e-12, abs=0)

NUM_STEPS = 40
PROGRESS = [0.4, 1.0, 3.7, 3.9, 4.0, 12.2, 12.2, 29.9, 38.5, 39.2, 40.0, 47.3]

SCHEDULERS = {
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda step: 0.95**step),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda step: 1 - 0.01 * (step % 7)),
    "StepLR": lambda o: sched.StepLR(o, 7, gamma=0.5),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [5, 9, 10, 30], gamma=0.3),
    "ConstantLR": lambda o: sched.ConstantLR(o, factor=0.5, total_iters=6),
    "LinearLR": lambda o: sched.LinearLR(o, start_factor=0.1, total_iters=9),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, gamma=0.93),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, total_iters=NUM_STEPS, power=2),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, T_max=NUM_STEPS, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 7, T_mult=2),
    "CyclicLR": lambda o: sched.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=5),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, max_lr=0.2, total_steps=NUM_STEPS),
    "ChainedScheduler": lambda o: sched.ChainedScheduler(
        [sched.LinearLR(o, start_factor=0.1, total_iters=9), sched.ExponentialLR(o, gamma=0.93)]
    ),
    "SequentialLR": lambda o: sched.SequentialLR(
        o,
        [
            sched.LinearLR(o, start_factor=0.1, total_iters=5),
            sched.CosineAnnealingLR(o, T_max=NUM_STEPS - 5),
        ],
        milestones=[5],
    ),
}


def one_weight(value=1.0):
    weight = nn.Parameter(torch.full((2,), value, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    return weight


def sgd(lr=0.1, *, num_groups=2, **options):
    groups = [{"params": [one_weight()], "lr": lr / (n + 1)} for n in range(num_groups)]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, **options)


def lrs_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def plain_lrs(make, num_steps):
    """Return the learning rates after 0, 1, ... plain steps."""
    optimizer = sgd()
    scheduler = make(optimizer)
    lrs = [lrs_of(optimizer)]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        lrs.append(lrs_of(optimizer))
    return lrs


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# scaled_lr


@always(max_examples=200)
@given(
    lr=st.floats(1e-12, 1e3),
    factors=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=2),
    single=st.booleans(),
    tensor=st.booleans(),
    raises=st.booleans(),
)
def test_learning_rates_are_scaled_inside_and_restored_to_the_bit(
    lr, factors, single, tensor, raises
):
    optimizer = sgd(lr)
    if tensor:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
    before, objects = lrs_of(optimizer), [group["lr"] for group in optimizer.param_groups]
    factors = factors[:1] if single else factors
    wanted = [
        lr * factor for lr, factor in zip(objects, factors * (2 if single else 1), strict=True)
    ]

    def body():
        with scaled_lr(optimizer, factors):
            assert lrs_of(optimizer) == [float(value) for value in wanted]
            if raises:
                raise KeyError("from the body")

    if raises:
        with pytest.raises(KeyError, match="from the body"):
            body()
    else:
        body()
    assert lrs_of(optimizer) == before
    if tensor:
        now = [group["lr"] for group in optimizer.param_groups]
        assert all(a is b for a, b in zip(now, objects, strict=True))


def test_a_tensor_lr_stays_the_same_object_inside_too():
    optimizer = torch.optim.SGD([one_weight()], lr=torch.tensor(0.1))
    lr = optimizer.param_groups[0]["lr"]
    with scaled_lr(optimizer, [3.0]):
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == pytest.approx(0.3)
    assert torch.equal(lr, torch.tensor(0.1))


def test_a_tensor_lr_that_groups_share_is_scaled_once():
    """Torch hands the tensor given as `lr=` to every group."""
    groups = [{"params": [one_weight()]}, {"params": [one_weight()]}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    for factors in ([4.0], [4.0, 4.0]):
        with scaled_lr(optimizer, factors):
            assert lrs_of(optimizer) == [2.0, 2.0]
        assert lrs_of(optimizer) == [0.5, 0.5]


def test_different_factors_for_groups_that_share_a_tensor_lr_are_refused():
    groups = [{"params": [one_weight()]}, {"params": [one_weight()]}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    with pytest.raises(ArgumentError, match="own"), scaled_lr(optimizer, [2.0, 4.0]):
        raise AssertionError("the block must not run")
    assert lrs_of(optimizer) == [0.5, 0.5]


@pytest.mark.parametrize("factors", [[], [2.0, 2.0, 2.0]])
def test_a_wrong_number_of_factors_changes_nothing(factors):
    optimizer = sgd()
    before = lrs_of(optimizer)
    with pytest.raises(ValueError), scaled_lr(optimizer, factors):  # noqa: PT011
        raise AssertionError("the block must not run")
    assert lrs_of(optimizer) == before


# The scaled step


@pytest.mark.parametrize("tensor", [False, True])
def test_a_step_moves_by_each_groups_lr_times_its_factor(tensor):
    first, second = one_weight(), one_weight()
    lr = (lambda x: torch.tensor(x, dtype=torch.float64)) if tensor else float
    groups = [{"params": [first], "lr": lr(0.1)}, {"params": [second], "lr": lr(0.01)}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    step = ScaledStep(optimizer, Schedule(None, optimizer=optimizer, num_steps=10))
    assert step.step([2.0, 5.0], progress=2.0) is None
    assert first.tolist() == closely([0.8, 0.8])
    assert second.tolist() == closely([0.95, 0.95])
    step.step([3.0], progress=5.0)
    assert first.tolist() == closely([0.5, 0.5])
    assert second.tolist() == closely([0.92, 0.92])
    assert lrs_of(optimizer) == [0.1, 0.01]


def test_a_closure_is_handed_on_and_its_loss_returned():
    weight = one_weight()
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    step = ScaledStep(optimizer, Schedule(None, optimizer=optimizer, num_steps=10))
    assert float(step.step([2.0], progress=1.0, closure=closure).detach()) == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not torch.equal(weight.detach(), torch.ones(2, dtype=torch.float64))


def test_a_closure_that_raises_leaves_lr_and_schedule_where_they_were():
    optimizer = sgd()
    scheduler = sched.StepLR(optimizer, 1, gamma=0.5)
    step = ScaledStep(optimizer, Schedule(scheduler, optimizer=optimizer, num_steps=10))

    def closure():
        raise KeyError("from the closure")

    with pytest.raises(KeyError, match="closure"):
        step.step([8.0], progress=3.0, closure=closure)
    assert lrs_of(optimizer) == [0.1, 0.05]
    assert scheduler.last_epoch == 0


def test_a_gradient_scaler_steps_under_the_scaled_lr():
    weight = one_weight()
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = ScaledStep(optimizer, Schedule(lambda _: 1.0, optimizer=optimizer, num_steps=10))
    weight.grad = None
    scaler.scale((3 * weight).sum()).backward()
    scaler.unscale_(optimizer)
    step.step([2.0], progress=2.0, scaler=scaler)
    scaler.update()
    assert weight.tolist() == [1 - 0.125 * 2 * 3] * 2
    assert lrs_of(optimizer) == [0.125]


# BC-44
def test_displacement_follows_a_jump_of_the_lr_at_once():
    """Torch's SGD applies the lr outside the momentum buffer, so nothing is corrected."""
    weight = one_weight(0.0)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    step = ScaledStep(optimizer, Schedule(None, optimizer=optimizer, num_steps=10**6))
    for _ in range(400):
        step.step([1.0], progress=1.0)
    moves = []
    for factor in (1.0, 4.0, 4.0, 1.0):
        before = weight.detach().clone()
        step.step([factor], progress=1.0)
        moves.append(float((before - weight.detach())[0]))
    assert moves == pytest.approx([1.0, 4.0, 4.0, 1.0], rel=1e-9)


# BC-46
def test_weight_decay_alone_shrinks_by_the_scaled_lr():
    """The decay per base-equivalent step is unchanged."""
    weight = one_weight()
    weight.grad.zero_()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.05)
    step = ScaledStep(optimizer, Schedule(None, optimizer=optimizer, num_steps=10))
    for factor in (1.0, 2.5):
        step.step([factor], progress=1.0)
    assert weight.tolist() == closely([(1 - 0.1 * 0.05) * (1 - 2.5 * 0.1 * 0.05)] * 2)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8), 0.8),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.Adam(p, betas=(0.7, 0.99)), 0.7),
        (lambda p: torch.optim.AdamW(p), 0.9),
        (lambda p: torch.optim.RMSprop(p, momentum=0.3), 0.3),
        (lambda p: torch.optim.Adagrad(p), 0.0),
    ],
    ids=["SGD", "plain SGD", "Adam", "AdamW", "RMSprop", "Adagrad"],
)
def test_the_momentum_is_found_under_its_two_names(make, wanted):
    assert momentum_of(make([one_weight()])) == wanted


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 3.0, 100.0])
def test_clipping_is_torchs(max_norm):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2, 2)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn(mine.shape, generator=generator)
        other.grad = mine.grad.clone()
    ours.append(nn.Parameter(torch.zeros(3)))
    norm = float(nn.utils.clip_grad_norm_(theirs, max_norm))
    coefficient = clip_coefficient(max_norm=max_norm, grad_norm=norm)
    clip_gradients(torch.optim.SGD(ours, lr=0.1), coefficient=coefficient)
    for mine, other in zip(ours, theirs, strict=False):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-6, atol=0)


def buffers_of(optimizer):
    return [
        optimizer.state[p]["momentum_buffer"][0].item()
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def test_momentum_buffers_are_scaled_by_their_groups_factor_and_their_values_stay_in_place():
    optimizer, other = sgd(), sgd(num_groups=1)
    scale_momentum(optimizer, [0.5])  # there are none yet
    for one in (optimizer, other):
        one.step()
    held = [state["momentum_buffer"] for state in optimizer.state.values()]
    scale_momentum(optimizer, [0.5, 1.0])
    assert buffers_of(optimizer) == [0.5, 1.0]
    scale_momentum(joined([optimizer, other]), [0.5, 0.25, 0.125])
    assert [*buffers_of(optimizer), *buffers_of(other)] == [0.25, 0.25, 0.125]
    scale_momentum(joined([optimizer, other]), [4.0])
    assert [*buffers_of(optimizer), *buffers_of(other)] == [1.0, 1.0, 0.5]
    assert all(
        a is b["momentum_buffer"] for a, b in zip(held, optimizer.state.values(), strict=True)
    )


def test_normalised_moments_are_left_alone():
    optimizer = torch.optim.AdamW([one_weight()])
    optimizer.step()
    before = {
        name: value.clone() for state in optimizer.state.values() for name, value in state.items()
    }
    scale_momentum(optimizer, [0.5])
    (state,) = optimizer.state.values()
    assert all(torch.equal(state[name], value) for name, value in before.items())


# Schedules: torch's schedulers


# BC-32
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_moved_by_progress_is_where_plain_steps_put_it(name):
    plain = plain_lrs(SCHEDULERS[name], NUM_STEPS)
    last = NUM_STEPS - 1 if name == "OneCycleLR" else NUM_STEPS
    optimizer = sgd()
    schedule = Schedule(SCHEDULERS[name](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    step = ScaledStep(optimizer, schedule)
    assert lrs_of(optimizer) == closely(plain[0])
    for progress in PROGRESS:
        step.step([2.0], progress=progress)
        assert lrs_of(optimizer) == closely(plain[min(math.floor(progress), last)])


@always(max_examples=80)
@given(
    name=st.sampled_from(sorted(SCHEDULERS)),
    jumps=st.lists(st.floats(0, 15), min_size=1, max_size=12),
)
def test_no_sequence_of_jumps_loses_a_base_step(name, jumps):
    plain = plain_lrs(SCHEDULERS[name], NUM_STEPS)
    last = NUM_STEPS - 1 if name == "OneCycleLR" else NUM_STEPS
    optimizer = sgd()
    schedule = Schedule(SCHEDULERS[name](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    progress = 0.0
    for jump in jumps:
        progress += jump
        optimizer.step()
        schedule.advance(progress)
        assert lrs_of(optimizer) == closely(plain[min(math.floor(progress), last)])


# BC-18
def test_a_milestone_fires_when_progress_crosses_it():
    """A gain of 2.5 brings base step 100 to real step 40."""
    optimizer = sgd()
    scheduler = sched.MultiStepLR(optimizer, [100], gamma=0.1)
    step = ScaledStep(optimizer, Schedule(scheduler, optimizer=optimizer, num_steps=1000))
    lrs = []
    for number in range(1, 42):
        step.step([2.5], progress=2.5 * number)
        lrs.append(lrs_of(optimizer)[0])
    assert lrs == closely([0.1] * 39 + [0.01] * 2)


def test_several_milestones_in_one_step_all_fire():
    optimizer = sgd()
    scheduler = sched.MultiStepLR(optimizer, [3, 5, 8, 9], gamma=0.5)
    step = ScaledStep(optimizer, Schedule(scheduler, optimizer=optimizer, num_steps=100))
    step.step([6.0], progress=2.9)
    assert lrs_of(optimizer)[0] == 0.1
    step.step([6.0], progress=8.9)
    assert lrs_of(optimizer)[0] == closely(0.1 / 8)


@pytest.mark.parametrize("num_steps", [10, 10.75])
def test_a_scheduler_is_never_moved_past_the_end(num_steps):
    seen = []
    optimizer = sgd()
    scheduler = sched.LambdaLR(optimizer, lambda step: seen.append(step) or 1.0)
    step = ScaledStep(optimizer, Schedule(scheduler, optimizer=optimizer, num_steps=num_steps))
    for progress in (4.0, 9.5, 25.0, 1e9):
        step.step([2.0], progress=progress)
    assert max(seen) == scheduler.last_epoch == 10


# BC-33
@pytest.mark.parametrize("progress", [[1000.0], [3.7, 999.4, 1007.3]])
def test_one_cycle_ends_exactly_at_the_final_lr_of_a_plain_run(progress):
    """The lr of a plain run's last step, and no error beyond."""
    plain = sgd()
    scheduler = sched.OneCycleLR(plain, max_lr=0.3, total_steps=1000)
    for _ in range(999):
        plain.step()
        scheduler.step()
    optimizer = sgd()
    ours = sched.OneCycleLR(optimizer, max_lr=0.3, total_steps=1000)
    step = ScaledStep(optimizer, Schedule(ours, optimizer=optimizer, num_steps=1000))
    for value in progress:
        step.step([4.0], progress=value)
    assert lrs_of(optimizer) == lrs_of(plain)


def test_a_one_cycle_that_ends_too_early_is_refused():
    optimizer = sgd()
    scheduler = sched.OneCycleLR(optimizer, max_lr=0.3, total_steps=99)
    with pytest.raises(ArgumentError, match="total_steps"):
        Schedule(scheduler, optimizer=optimizer, num_steps=100)


def test_a_longer_one_cycle_is_left_where_the_run_ends():
    optimizer = sgd()
    scheduler = sched.OneCycleLR(optimizer, max_lr=0.3, total_steps=200)
    schedule = Schedule(scheduler, optimizer=optimizer, num_steps=100)
    optimizer.step()
    schedule.advance(150.0)
    assert scheduler.last_epoch == 100


def test_plateau_is_refused_by_name_with_the_way_out():
    optimizer = sgd()
    with pytest.raises(UnsupportedError, match=r"ReduceLROnPlateau.*plateau\.step\(metric\)"):
        Schedule(sched.ReduceLROnPlateau(optimizer), optimizer=optimizer, num_steps=10)


def test_a_scheduler_of_another_optimizer_is_refused():
    with pytest.raises(ArgumentError, match="another optimizer"):
        Schedule(sched.StepLR(sgd(), 3), optimizer=sgd(), num_steps=10)


@pytest.mark.parametrize("schedule", ["cosine", 0.5, [1.0]])
def test_a_schedule_of_another_kind_is_refused(schedule):
    with pytest.raises(ArgumentError, match=r"schedule(\[0\])?="):
        Schedule(schedule, optimizer=sgd(), num_steps=10)


def test_without_a_schedule_the_lr_is_the_users():
    optimizer = sgd()
    step = ScaledStep(optimizer, Schedule(None, optimizer=optimizer, num_steps=10))
    optimizer.param_groups[0]["lr"] = 0.7
    step.step([2.0], progress=4.0)
    assert lrs_of(optimizer) == [0.7, 0.05]


# Schedules: functions of progress


def test_a_function_sets_base_times_multiplier_of_exact_progress():
    optimizer = sgd()
    schedule = Schedule(lambda tau: 1 / (1 + tau), optimizer=optimizer, num_steps=10)
    for progress in (0.5, 3.25, 10.0):
        schedule.advance(progress)
        assert lrs_of(optimizer) == closely([0.1 / (1 + progress), 0.05 / (1 + progress)])


def test_a_function_is_never_asked_beyond_the_end():
    optimizer, asked = sgd(), []

    def line(tau):
        asked.append(tau)
        return 1 - tau / 10

    schedule = Schedule(line, optimizer=optimizer, num_steps=10)
    schedule.advance(12.5)
    assert asked == [0.0, 10]
    assert lrs_of(optimizer) == [0.0, 0.0]


@pytest.mark.parametrize("answer", [math.nan, -0.1, None, 1j, "half"])
def test_a_function_that_answers_nonsense_ends_the_step_before_the_optimizer_moves(answer):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = Schedule(lambda tau: answer if tau else 1.0, optimizer=optimizer, num_steps=10)
    weight.grad = torch.ones(1)
    with pytest.raises(ArgumentError, match=r"schedule(\[0\])?="):
        ScaledStep(optimizer, schedule).step([1.0], progress=1.0)
    assert weight.item() == 1.0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_progress_alone_moved_is_never_taken_for_touched(name):
    optimizer = sgd()
    schedule = Schedule(SCHEDULERS[name](optimizer), optimizer=optimizer, num_steps=20)
    for progress in (0.0, 0.5, 3.5, 9.0, 20.0, 25.0):
        optimizer.step()
        schedule.advance(progress)
        schedule.check_untouched()


def test_momentum_is_the_largest_of_the_groups():
    groups = [{"params": [one_weight()], "momentum": 0.0}, {"params": [one_weight()]}]
    assert momentum_of(torch.optim.SGD(groups, lr=0.1, momentum=0.9)) == 0.9


def test_a_scheduler_that_somebody_else_stepped_is_refused():
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    schedule = Schedule(scheduler, optimizer=optimizer, num_steps=10)
    schedule.check_untouched()
    optimizer.step()
    schedule.advance(2.5)
    schedule.check_untouched()
    scheduler.step()
    with pytest.raises(UsageError, match="stands at step 3 and progress has moved it to 2"):
        schedule.check_untouched()


def test_the_base_lr_is_the_initial_one_where_a_scheduler_left_it():
    optimizer = sgd()
    optimizer.param_groups[0].update(initial_lr=0.4, lr=0.001)
    Schedule(lambda _: 0.5, optimizer=optimizer, num_steps=10)
    assert lrs_of(optimizer) == [0.2, 0.025]


def test_groups_added_later_have_their_own_base_lr():
    optimizer = sgd()
    schedule = Schedule(lambda tau: 1 / (1 + tau), optimizer=optimizer, num_steps=10)
    schedule.advance(1.0)
    optimizer.add_param_group({"params": [one_weight()], "lr": 0.8})
    schedule.advance(3.0)
    assert lrs_of(optimizer) == closely([0.025, 0.0125, 0.2])
    schedule.advance(7.0)
    assert lrs_of(optimizer) == closely([0.0125, 0.00625, 0.1])


def test_a_function_fills_a_tensor_lr_in_place():
    optimizer = torch.optim.SGD([one_weight()], lr=torch.tensor(0.5))
    lr = optimizer.param_groups[0]["lr"]
    Schedule(lambda tau: 1 / (1 + tau), optimizer=optimizer, num_steps=10).advance(1.0)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
def test_multipliers_that_are_no_learning_rate_are_refused(value):
    with pytest.raises(ArgumentError, match="at progress 0"):
        Schedule(lambda _: value, optimizer=sgd(), num_steps=10)
    optimizer = sgd()
    schedule = Schedule(lambda tau: 1.0 if tau < 2 else value, optimizer=optimizer, num_steps=10)
    with pytest.raises(ArgumentError, match=r"at progress 2\.5"):
        schedule.advance(2.5)
    assert lrs_of(optimizer) == [0.1, 0.05]


def test_a_multiplier_of_zero_is_allowed():
    optimizer = sgd()
    Schedule(lambda _: 0.0, optimizer=optimizer, num_steps=10)
    assert lrs_of(optimizer) == [0.0, 0.0]


# Saved and loaded

ALL_SCHEDULES = {
    **SCHEDULERS,
    "function": lambda _: lambda tau: 1 / (1 + tau),
    "none": lambda _: None,
}


def trained(name, progress):
    """Return a schedule's and its optimizer's state at `progress`, and the lr from there on."""
    optimizer = sgd()
    schedule = Schedule(ALL_SCHEDULES[name](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    step = ScaledStep(optimizer, schedule)
    step.step([3.0], progress=progress / 2)
    step.step([3.0], progress=progress)
    states = through_a_file((schedule.state_dict(), optimizer.state_dict()))
    lrs = [lrs_of(optimizer)]
    for later in (progress + 0.5, progress + 4.5, progress + 11.0):
        step.step([3.0], progress=later)
        lrs.append(lrs_of(optimizer))
    return states, lrs


# BC-30 BC-31
@pytest.mark.parametrize("name", ALL_SCHEDULES)
@pytest.mark.parametrize(
    "order",
    [
        order
        for order in permutations(["load optimizer", "build", "load schedule"])
        if order.index("build") < order.index("load schedule")
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("progress", [0.9, 13.6])
def test_every_order_of_building_and_loading_gives_the_same_lr(name, order, progress):
    """As if nothing had happened."""
    (schedule_state, optimizer_state), wanted = trained(name, progress)
    optimizer, schedule = sgd(), None
    for action in order:
        if action == "build":
            made = ALL_SCHEDULES[name](optimizer)
            schedule = Schedule(made, optimizer=optimizer, num_steps=NUM_STEPS)
        elif action == "load schedule":
            schedule.load_state_dict(schedule_state, progress=progress)
        else:
            optimizer.load_state_dict(optimizer_state)
    found = [lrs_of(optimizer)]
    step = ScaledStep(optimizer, schedule)
    for later in (progress + 0.5, progress + 4.5, progress + 11.0):
        step.step([3.0], progress=later)
        found.append(lrs_of(optimizer))
    for mine, other in zip(found, wanted, strict=True):
        assert mine == closely(other)


# BC-35
@pytest.mark.parametrize("name", [name for name in ALL_SCHEDULES if name != "none"])
def test_a_schedule_loaded_beside_a_fresh_optimizer_sets_its_lr(name):
    """Torch leaves the first lr until the next step."""
    (state, _), wanted = trained(name, 13.6)
    optimizer = sgd()
    schedule = Schedule(ALL_SCHEDULES[name](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    schedule.load_state_dict(state, progress=13.6)
    assert lrs_of(optimizer) == closely(wanted[0])
    optimizer.step()
    schedule.advance(18.1)
    assert lrs_of(optimizer) == closely(wanted[2])


# BC-29
@pytest.mark.parametrize("name", ["function", "StepLR", "none"])
def test_restarts_do_not_multiply_the_lr_again(name):
    """2, 4, 2 and 2 workers under linear scaling, a new process each."""
    make = {"function": lambda _: lambda _: 1.0, "StepLR": lambda o: sched.StepLR(o, 10**6)}
    states, moves = None, []
    for factor in (2.0, 4.0, 2.0, 2.0):
        weight = one_weight()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        if states:
            optimizer.load_state_dict(states[1])
        made = make.get(name, lambda _: None)(optimizer)
        schedule = Schedule(made, optimizer=optimizer, num_steps=10**6)
        if states:
            schedule.load_state_dict(states[0], progress=1.0)
        ScaledStep(optimizer, schedule).step([factor], progress=1.0)
        moves.append(1 - float(weight[0].detach()))
        states = through_a_file((schedule.state_dict(), optimizer.state_dict()))
    assert moves == pytest.approx([0.2, 0.4, 0.2, 0.2], rel=1e-12)


def test_a_saved_state_does_not_change_with_later_steps():
    optimizer = sgd()
    schedule = Schedule(SCHEDULERS["SequentialLR"](optimizer), optimizer=optimizer, num_steps=40)
    optimizer.step()
    schedule.advance(7.0)
    state, kept = schedule.state_dict(), through_a_file(schedule.state_dict())
    schedule.advance(20.0)
    assert through_a_file(state) == kept


@pytest.mark.parametrize(("saved", "built"), [("StepLR", "function"), ("none", "StepLR")])
def test_a_state_of_another_kind_of_schedule_is_refused(saved, built):
    (state, _), _ = trained(saved, 13.6)
    optimizer = sgd()
    schedule = Schedule(ALL_SCHEDULES[built](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    with pytest.raises(StateError, match="same kind"):
        schedule.load_state_dict(state, progress=13.6)


@pytest.mark.parametrize(("name", "num_groups"), [("StepLR", 1), ("StepLR", 3), ("function", 1)])
def test_a_state_with_other_parameter_groups_is_refused(name, num_groups):
    (state, _), _ = trained(name, 13.6)
    optimizer = sgd(num_groups=num_groups)
    schedule = Schedule(ALL_SCHEDULES[name](optimizer), optimizer=optimizer, num_steps=NUM_STEPS)
    before = lrs_of(optimizer)
    with pytest.raises(StateError, match="groups"):
        schedule.load_state_dict(state, progress=13.6)
    assert lrs_of(optimizer) == before


def test_a_group_that_joined_after_the_state_was_saved_keeps_its_base_lr():
    (state, _), _ = trained("function", 13.6)
    optimizer = sgd(num_groups=3)
    schedule = Schedule(lambda tau: 0.5 / (1 + tau), optimizer=optimizer, num_steps=NUM_STEPS)
    schedule.load_state_dict(state, progress=3.0)
    assert lrs_of(optimizer) == closely([0.1 / 8, 0.05 / 8, 0.1 / 3 / 8])
