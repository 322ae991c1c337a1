"""The gradient tap against plain float64 oracles, in one process and through DDP's hook."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from workers import run_workers

from elastane import step_sums
from elastane._compat import remove_hooks
from elastane.errors import CommunicationError, UnsupportedError, UsageError
from elastane.gradients import GradientTap
from elastane.noise import MomentAverage, Moments, estimate_moments, gain, total_moments
from elastane.norms import squared_norm_twin
from elastane.peers import Peers
from elastane.replica import wrap
from elastane.step_sums import StepSums, as_vector

always = partial(settings, derandomize=True, deadline=None, database=None)
exactly = partial(pytest.approx, rel=1e-11, abs=1e-13)
nearly = partial(pytest.approx, rel=1e-6, abs=1e-7)


# Helpers: windows of micro-batches, and what they ought to give


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a window ought to give, from gradients taken one by one."""

    weighted: tuple[float, ...]
    means: tuple[float, ...]
    gradients: list[torch.Tensor | None]

    def moments(self, *, batch_samples, num_gradients):
        pairs = zip(self.weighted, self.means, strict=True)
        return [
            estimate_moments(
                weighted_sqr_norm=weighted,
                mean_sqr_norm=mean,
                batch_samples=batch_samples,
                num_gradients=num_gradients,
            )
            for weighted, mean in pairs
        ]


def micro_gradients(model, batch, loss=F.mse_loss):
    inputs, targets = batch
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss(model(inputs), targets)
    found = iter(torch.autograd.grad(value, parameters, allow_unused=True))
    return {id(p): g.double() for p in parameters if (g := next(found)) is not None}


def expected(model, batches, *, weights, groups, batch_samples=None):
    total = sum(weights)
    each = [micro_gradients(model, batch) for batch in batches]
    share = (batch_samples or total) / total
    weighted = [
        sum(
            w * share * sum(float(g[id(p)].square().sum()) for p in group if id(p) in g)
            for g, w in zip(each, weights, strict=True)
        )
        for group in groups
    ]
    means = {}
    for gradients, weight in zip(each, weights, strict=True):
        for key, gradient in gradients.items():
            means[key] = means.get(key, 0.0) + gradient * weight / total
    mean_norms = [
        sum(float(means[id(p)].square().sum()) for p in group if id(p) in means) for group in groups
    ]
    return Expected(
        weighted=tuple(weighted),
        means=tuple(mean_norms),
        gradients=[means.get(id(p)) for p in model.parameters()],
    )


def run_window(
    tap,
    model,
    batches,
    *,
    weights,
    batch_samples=None,
    measure=True,
    loss_scale=1.0,
    zero=None,
    weighted=(),
):
    """One window: `model` may be wrapped; all but the last backward are not synchronised.

    The gradients of the micro-batches whose numbers are in `weighted` come weighted.
    """
    if zero is None:
        model.zero_grad(set_to_none=True)
    else:
        zero()
    batch_samples = batch_samples or sum(weights)
    tap.begin(batch_samples=batch_samples, measure=measure)
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        last = number == len(batches) - 1
        tap.begin_micro_batch(weight)
        unsynced = not last and isinstance(model, nn.parallel.DistributedDataParallel)
        with model.no_sync() if unsynced else nullcontext():
            inputs, targets = batch
            loss, seed = F.mse_loss(model(inputs), targets) * loss_scale, None
            if number in weighted:
                tap.begin_micro_batch(weight, weighted=True)
                seed = torch.full_like(loss, weight / batch_samples)
            loss.backward(seed)
        if not last:
            tap.set_aside()
            own = [p for group in tap._parameters for p in group]
            assert all(p.grad is None or not p.grad.any() for p in own)
    return tap.settle(loss_scale=loss_scale)


def make_batches(sizes, *, features=3, outputs=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    return [(draw(size, features), draw(size, outputs)) for size in sizes]


def make_model(*, seed=0, dtype=torch.float64, width=5):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def check(measurement, model, wanted, *, rel=1e-11, abs=1e-13):
    assert measurement.finite
    assert measurement.weighted_sqr_norms == pytest.approx(wanted.weighted, rel=rel, abs=abs)
    assert measurement.mean_sqr_norms == pytest.approx(wanted.means, rel=rel, abs=abs)
    for parameter, gradient in zip(model.parameters(), wanted.gradients, strict=True):
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert torch.allclose(parameter.grad.double(), gradient, rtol=rel, atol=abs)


class Branches(nn.Module):
    """Two branches; the sign of the first input chooses which are used."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2))

    def forward(self, inputs):
        hidden = self.stem(inputs).tanh()
        return self.left(hidden) if inputs[0, 0] > 0 else self.right(hidden)


def branch_batches(signs, *, size=2):
    batches = make_batches([size] * len(signs))
    for (inputs, _), sign in zip(batches, signs, strict=True):
        inputs[0, 0] = sign
    return batches


@pytest.fixture
def group():
    """A gloo group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def attach(model, *, group, groups=None, extras=None, **options):
    tap = GradientTap(groups or [list(model.parameters())], extras=extras)
    wrapper = wrap(model, group=group, options=options)
    tap.attach(wrapper, peers=Peers(group))
    return tap, wrapper


# Golden numbers of fairscale


def golden_step(inputs, *, base_batch_size=1, bias=True):
    """Return the moments and the model after one window of single samples, loss = out.sum()."""
    model = nn.Linear(len(inputs[0]), 2, bias=bias)
    tap = GradientTap([list(model.parameters())])
    tap.begin(batch_samples=len(inputs))
    for number, sample in enumerate(inputs):
        tap.begin_micro_batch(1)
        model(torch.tensor([sample])).sum().backward()
        if number < len(inputs) - 1:
            tap.set_aside()
    (moments,) = tap.settle().moments()
    scale = len(inputs) / base_batch_size
    return moments, gain(moments, scale=scale, base_batch_size=base_batch_size), model


@pytest.mark.parametrize(
    ("inputs", "wanted", "weight"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], 4 / 3, [0.5, 0.5]),
        ([[1.0, 1.0], [1.0, 1.0]], 1.0, [1.0, 1.0]),
        ([[-1.0, 1.0], [1.0, -1.0]], 2.0, [0.0, 0.0]),
        ([[1.0, 4.0], [5.0, 0.5]], 1.4688796680497926, [3.0, 2.25]),
        ([[-0.2, 3.0], [5.0, 0.5]], 1.8472893901708, [2.4, 1.75]),
    ],
)
def test_gains_and_gradients_are_fairscales(inputs, wanted, weight):
    _, found, model = golden_step(inputs)
    assert found == nearly(wanted)
    assert model.weight.grad.flatten().tolist() == nearly(weight * 2)
    assert model.bias.grad.tolist() == nearly([1.0, 1.0])


def test_two_averaged_steps_give_fairscales_gain():
    average = MomentAverage(averaging="debiased")
    for inputs in ([[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]):
        moments, _, model = golden_step(inputs)
        average = average.updated(moments, smoothing=0.998)
    assert gain(average.read(), scale=2, base_batch_size=1) == nearly(1.6720968158031417)
    assert model.weight.grad.flatten().tolist() == nearly([2.05] * 4)


# BC-01
@pytest.mark.parametrize(("base", "wanted"), [(1, 4.0), (3, 4 / 3), (2, 2.0)])
def test_orthogonal_gradients_gain_the_scale(base, wanted):
    _, found, _ = golden_step(torch.eye(4).tolist(), base_batch_size=base, bias=False)
    assert found == nearly(wanted)


def test_identical_gradients_gain_nothing():
    _, found, _ = golden_step([[0.0, 1.0], [0.0, 1.0]])
    assert found == nearly(1.0)


# One process against the oracle


# BC-25
@always(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 5),
    split=st.booleans(),
)
def test_unequal_micro_batches_give_the_mean_over_all_samples(sizes, seed, split):
    model, batches = make_model(seed=seed), make_batches(sizes, seed=seed)
    parameters = list(model.parameters())
    groups = [parameters[:1], parameters[1:]] if split else [parameters]
    tap = GradientTap(groups)
    measurement = run_window(tap, model, batches, weights=sizes)
    wanted = expected(model, batches, weights=sizes, groups=groups)
    check(measurement, model, wanted)
    whole = [(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))]
    together = expected(model, whole, weights=[1], groups=groups)
    check(replace(measurement, weighted_sqr_norms=together.weighted), model, together)
    assert measurement.batch_samples == measurement.weight == sum(sizes)
    assert measurement.num_gradients == len(sizes)
    assert measurement.grad_norm == exactly(math.sqrt(sum(wanted.means)))
    if len(sizes) == 1:
        assert measurement.moments() is None
    else:
        estimates = wanted.moments(batch_samples=sum(sizes), num_gradients=len(sizes))
        for found, estimate in zip(measurement.moments(), estimates, strict=True):
            assert found.variance == exactly(estimate.variance)
            assert found.sqr_norm == exactly(estimate.sqr_norm)


def test_moments_of_the_groups_add_up_to_those_of_the_model():
    model, batches = make_model(), make_batches([2, 3, 1])
    parameters = list(model.parameters())
    whole = run_window(GradientTap([parameters]), model, batches, weights=[2, 3, 1])
    parts = run_window(GradientTap([[p] for p in parameters]), model, batches, weights=[2, 3, 1])
    total = total_moments(parts.moments())
    assert len(parts.moments()) == 4
    assert total.variance == exactly(whole.moments()[0].variance)
    assert total.sqr_norm == exactly(whole.moments()[0].sqr_norm)


@pytest.mark.parametrize("weights", [[7, 19, 4], [0.5, 0.25, 0.25], [0, 3, 5], [3, 5, 0]])
def test_other_weights_give_the_weighted_mean_and_statistics_a_sample(weights):
    model, batches = make_model(), make_batches([2, 2, 2])
    groups = [list(model.parameters())]
    tap = GradientTap(groups)
    measurement = run_window(tap, model, batches, weights=weights, batch_samples=6)
    check(
        measurement,
        model,
        expected(model, batches, weights=weights, groups=groups, batch_samples=6),
    )
    assert measurement.weight == sum(weights)
    assert measurement.batch_samples == 6
    assert measurement.num_gradients == sum(weight > 0 for weight in weights)


def test_a_weight_given_again_before_backward_replaces_the_first():
    model, batches = make_model(), make_batches([2, 2])
    groups = [list(model.parameters())]
    tap = GradientTap(groups)
    tap.begin(batch_samples=4)
    for number, (inputs, targets) in enumerate(batches):
        tap.begin_micro_batch(2)
        loss = F.mse_loss(model(inputs), targets)
        tap.begin_micro_batch(number + 1)
        loss.backward()
        if number == 0:
            tap.set_aside()
    wanted = expected(model, batches, weights=[1, 2], groups=groups, batch_samples=4)
    check(tap.settle(), model, wanted)


def test_a_step_whose_weights_are_all_zero_has_a_zero_gradient_and_no_moments():
    model = make_model()
    measurement = run_window(
        GradientTap([list(model.parameters())]),
        model,
        make_batches([2, 2]),
        weights=[0, 0],
        batch_samples=4,
    )
    assert measurement.finite
    assert measurement.num_gradients == 0
    assert measurement.moments() is None
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("signs", [[1, 1, -1], [1, -1, 1], [-1, 1, 1], [1, 1, 1]])
def test_parameters_unused_in_some_micro_batches_count_as_zero_there(signs):
    model, batches = Branches().double(), branch_batches(signs)
    groups = [list(model.stem.parameters()), [*model.left.parameters(), *model.right.parameters()]]
    measurement = run_window(GradientTap(groups), model, batches, weights=[2, 2, 2])
    check(measurement, model, expected(model, batches, weights=[2, 2, 2], groups=groups))
    assert (model.right.weight.grad is None) == (-1 not in signs)


def test_frozen_parameters_are_passed_over():
    model, batches = make_model(), make_batches([2, 1])
    model[0].weight.requires_grad_(False)
    groups = [list(model.parameters())]
    measurement = run_window(GradientTap(groups), model, batches, weights=[2, 1])
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))
    assert model[0].weight.grad is None


@pytest.mark.parametrize("listed_twice", [False, True])
def test_a_shared_parameter_is_counted_once(listed_twice):
    model, batches = make_model(width=3), make_batches([2, 1])
    model.append(nn.Tanh()).append(nn.Linear(2, 3, dtype=torch.float64)).append(model[0])
    model.append(model[2])
    parameters = list(model.parameters())
    assert len(parameters) == 6
    groups = [[*parameters, parameters[0]] if listed_twice else parameters]
    measurement = run_window(GradientTap(groups), model, batches, weights=[2, 1])
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=[parameters]))


# BC-11
def test_gradients_zeroed_in_place_are_as_good_as_none():
    model, batches = make_model(), make_batches([2, 1])
    groups = [list(model.parameters())]
    tap = GradientTap(groups)
    for _ in range(3):
        zero = partial(model.zero_grad, set_to_none=False)
        measurement = run_window(tap, model, batches, weights=[2, 1], zero=zero)
        check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))


def test_parameters_of_no_group_are_left_alone():
    model, batches = make_model(), make_batches([2, 1])
    groups = [list(model[2].parameters())]
    measurement = run_window(GradientTap(groups), model, batches, weights=[2, 1])
    first, second = (micro_gradients(model, batch)[id(model[0].weight)] for batch in batches)
    assert torch.allclose(model[0].weight.grad, first + second)
    wanted = expected(model, batches, weights=[2, 1], groups=groups)
    assert measurement.weighted_sqr_norms == exactly(wanted.weighted)
    assert measurement.mean_sqr_norms == exactly(wanted.means)


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_without_parameters_has_zero_moments(place):
    model, batches = make_model(), make_batches([2, 1])
    groups = [list(model.parameters())]
    groups.insert(place, [])
    measurement = run_window(GradientTap(groups), model, batches, weights=[2, 1])
    assert measurement.mean_sqr_norms[place] == 0
    assert measurement.mean_sqr_norms[1 - place] > 0
    assert measurement.moments()[place] == Moments(variance=0.0, sqr_norm=0.0)


def test_groups_can_be_replaced_between_windows():
    model, batches = make_model(), make_batches([2, 1])
    parameters = list(model.parameters())
    tap = GradientTap([parameters[2:]])
    run_window(tap, model, batches, weights=[2, 1])
    groups = [parameters[2:], parameters[:2]]
    tap.set_groups(groups)
    measurement = run_window(tap, model, batches, weights=[2, 1])
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))


def test_micro_batches_of_single_samples_measure_as_the_per_sample_oracle():
    model, batches = make_model(), make_batches([1] * 32)
    (moments,) = run_window(
        GradientTap([list(model.parameters())]), model, batches, weights=[1] * 32
    ).moments()
    rows = torch.stack(
        [torch.cat([g.flatten() for g in micro_gradients(model, b).values()]) for b in batches]
    )
    variance = float(rows.var(dim=0, correction=1).sum())
    assert moments.variance == exactly(variance)
    assert moments.sqr_norm == exactly(float(rows.mean(0).square().sum()) - variance / 32)


# BC-05
@pytest.mark.parametrize("ddp", [False, True])
def test_the_loss_scale_does_not_reach_the_statistics(ddp, group):
    """Exact, because the scales are powers of two."""
    runs = {}
    for name, scales in {"plain": (1.0, 1.0, 1.0), "scaled": (65536.0, 32768.0, 65536.0)}.items():
        model = make_model(dtype=torch.float32)
        tap, used = GradientTap([list(model.parameters())]), model
        if ddp:
            tap, used = attach(model, group=group)
        runs[name] = []
        for number, scale in enumerate(scales):
            batches = make_batches([2, 3, 1], seed=number, dtype=torch.float32)
            measurement = run_window(tap, used, batches, weights=[2, 3, 1], loss_scale=scale)
            gradients = [(p.grad / scale).tolist() for p in model.parameters()]
            runs[name].append((measurement, measurement.moments(), gradients))
    assert runs["plain"] == runs["scaled"]


# BC-04
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("ddp", [False, True])
def test_one_bad_micro_batch_makes_the_step_not_finite_and_the_next_is_clean(
    value, place, ddp, group
):
    model, batches = make_model(), make_batches([2, 2, 2])
    groups = [list(model.parameters())]
    tap, used = attach(model, group=group) if ddp else (GradientTap(groups), model)
    good = batches[place][1].clone()
    batches[place][1][0, 0] = value
    measurement = run_window(tap, used, batches, weights=[2, 2, 2])
    assert not measurement.finite
    assert measurement.moments() is None
    assert all(math.isfinite(norm) for norm in measurement.weighted_sqr_norms)
    assert measurement.num_gradients == 3
    batches[place][1].copy_(good)
    measurement = run_window(tap, used, batches, weights=[2, 2, 2])
    check(measurement, model, expected(model, batches, weights=[2, 2, 2], groups=groups))


def test_squares_that_overflow_make_the_step_not_finite_though_the_mean_is():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    tap = GradientTap([[weight]])
    tap.begin(batch_samples=2)
    for number, huge in enumerate((1e200, -1e200)):
        tap.begin_micro_batch(1)
        (weight * huge).sum().backward()
        if number == 0:
            tap.set_aside()
    measurement = tap.settle()
    assert measurement.mean_sqr_norms == (0.0,)
    assert not measurement.finite
    assert measurement.moments() is None


@pytest.mark.parametrize("ddp", [False, True])
def test_without_measuring_the_mean_norm_flag_and_extras_still_come(ddp, group):
    model, batches = make_model(), make_batches([2, 1])
    groups = [list(model.parameters())]
    tap = GradientTap(groups, extras=lambda: (4.0,))
    used = model
    if ddp:
        tap, used = attach(model, group=group, extras=lambda: (4.0,))
    measurement = run_window(tap, used, batches, weights=[2, 1], measure=False)
    wanted = expected(model, batches, weights=[2, 1], groups=groups)
    assert measurement.weighted_sqr_norms is None
    assert measurement.moments() is None
    assert measurement.mean_sqr_norms == exactly(wanted.means)
    assert measurement.extras == (4.0,)
    check(replace(measurement, weighted_sqr_norms=wanted.weighted), model, wanted)
    batches[0][1][0, 0] = math.nan
    assert not run_window(tap, used, batches, weights=[2, 1], measure=False).finite


def test_settling_again_changes_nothing_and_returns_the_same():
    model, batches = make_model(), make_batches([2, 2])
    tap = GradientTap([list(model.parameters())])
    first = run_window(tap, model, batches, weights=[3, 5], batch_samples=4)
    gradients = [p.grad.clone() for p in model.parameters()]
    assert tap.settle(loss_scale=2.0) is first
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_extras_are_read_once_a_step_and_may_be_tensors():
    calls = []

    def extras():
        calls.append(None)
        return (1.5, torch.tensor(2.0), torch.tensor([3.0]), torch.tensor(4, dtype=torch.int64))

    model = make_model()
    tap = GradientTap([list(model.parameters())], extras=extras)
    for steps in (1, 2):
        measurement = run_window(tap, model, make_batches([2, 2, 1]), weights=[2, 2, 1])
        tap.settle()
        assert measurement.extras == (1.5, 2.0, 3.0, 4.0)
        assert len(calls) == steps


@pytest.mark.parametrize("ddp", [False, True])
def test_a_step_without_backward_is_a_usage_error(ddp, group):
    model = make_model()
    tap = GradientTap([list(model.parameters())])
    if ddp:
        tap, _ = attach(model, group=group)
    tap.begin(batch_samples=2)
    tap.begin_micro_batch(2)
    with pytest.raises(UsageError, match="backward"):
        tap.settle()
    with pytest.raises(UsageError, match="backward"):
        tap.set_aside()


def test_setting_aside_twice_after_one_backward_is_a_usage_error():
    model, ((inputs, targets),) = make_model(), make_batches([2])
    tap = GradientTap([list(model.parameters())])
    tap.begin(batch_samples=4)
    tap.begin_micro_batch(2)
    F.mse_loss(model(inputs), targets).backward()
    tap.set_aside()
    with pytest.raises(UsageError, match="backward"):
        tap.set_aside()


def test_sparse_gradients_are_refused_with_the_way_out():
    model = nn.Embedding(5, 2, sparse=True)
    tap = GradientTap([list(model.parameters())])
    tap.begin(batch_samples=1)
    tap.begin_micro_batch(1)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        tap.settle()


# BC-20
@pytest.mark.parametrize("ddp", [False, True])
def test_a_window_cut_short_is_a_mean_over_what_there_was(ddp, group):
    """Three of four micro-batches."""
    model, batches = make_model(), make_batches([2, 2, 2])
    groups = [list(model.parameters())]
    tap, used = attach(model, group=group) if ddp else (GradientTap(groups), model)
    measurement = run_window(tap, used, batches, weights=[2, 2, 2], batch_samples=8)
    wanted = expected(model, batches, weights=[2, 2, 2], groups=groups, batch_samples=8)
    check(measurement, model, wanted)
    assert measurement.num_gradients == 3
    assert measurement.weight == 6


# BC-20
def test_windows_of_four_four_and_two_micro_batches_each_count_their_own():
    """Nothing stays behind from the window before."""
    model = make_model()
    groups = [list(model.parameters())]
    tap = GradientTap(groups)
    for number, count in enumerate([4, 4, 2]):
        batches = make_batches([3] * count, seed=number)
        measurement = run_window(tap, model, batches, weights=[3] * count)
        check(measurement, model, expected(model, batches, weights=[3] * count, groups=groups))
        assert (measurement.num_gradients, measurement.batch_samples) == (count, 3 * count)


# BC-20
def test_an_abandoned_window_leaves_nothing_behind():
    model, batches = make_model(), make_batches([2, 2])
    groups = [list(model.parameters())]
    tap = GradientTap(groups)
    tap.begin(batch_samples=6)
    tap.begin_micro_batch(2)
    F.mse_loss(model(batches[0][0]), batches[0][1]).backward()
    tap.set_aside()
    measurement = run_window(tap, model, batches, weights=[2, 2])
    check(measurement, model, expected(model, batches, weights=[2, 2], groups=groups))


def test_half_precision_gradients_are_measured_in_float32():
    """The squares of these gradients leave float16's range."""
    model = nn.Linear(4, 1, bias=False, dtype=torch.float16)
    tap = GradientTap([list(model.parameters())])
    tap.begin(batch_samples=2)
    for number in range(2):
        tap.begin_micro_batch(1)
        model(torch.full((1, 4), 1000.0, dtype=torch.float16)).sum().backward()
        if number == 0:
            tap.set_aside()
    measurement = tap.settle()
    assert measurement.finite
    assert measurement.mean_sqr_norms == nearly((4e6,))
    assert measurement.weighted_sqr_norms == nearly((8e6,))


# DDP's hook, in a group of one process

DDP_OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-4},
    {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, "static_graph": True},
]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [[4], [3, 1, 2]], ids=["one", "three"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ddp_gives_what_one_process_gives(options, sizes, set_to_none, group):
    model = make_model()
    parameters = list(model.parameters())
    groups = [parameters[1:3], [parameters[0], parameters[3]]]
    tap, wrapper = attach(model, group=group, groups=groups, **options)
    for step in range(4):
        # With a static graph DDP itself can't begin with no_sync.
        now = sizes[:1] if "static_graph" in options and step == 0 else sizes
        batches = make_batches(now, seed=step)
        zero = partial(model.zero_grad, set_to_none=set_to_none)
        measurement = run_window(tap, wrapper, batches, weights=now, zero=zero)
        check(measurement, model, expected(model, batches, weights=now, groups=groups))
        assert measurement.num_gradients == len(now)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad


WEIGHTED = [(0, 1, 2), (0,), (1,), (2,), (0, 2)]


def check_weighted(tap, model, inner, batches, *, groups, weighted, measure):
    """All micro-batches or some come weighted; all are measured or none."""
    weights = [3, 1, 2]
    measurement = run_window(
        tap, model, batches, weights=weights, batch_samples=8, weighted=weighted, measure=measure
    )
    wanted = expected(inner, batches, weights=weights, groups=groups, batch_samples=8)
    if not measure:
        assert measurement.weighted_sqr_norms is None
        measurement = replace(measurement, weighted_sqr_norms=wanted.weighted)
    check(measurement, inner, wanted)


@pytest.mark.parametrize("weighted", WEIGHTED, ids=str)
@pytest.mark.parametrize("measure", [True, False])
def test_gradients_that_come_weighted_are_measured_and_added_up_the_same(weighted, measure):
    model = make_model()
    groups = [list(model.parameters())[:1], list(model.parameters())[1:]]
    for step in range(2):
        batches = make_batches([3, 1, 2], seed=step)
        options = {"groups": groups, "weighted": weighted, "measure": measure}
        check_weighted(GradientTap(groups), model, model, batches, **options)


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", WEIGHTED, ids=str)
@pytest.mark.parametrize("measure", [True, False])
def test_gradients_that_come_weighted_are_the_same_under_ddp(options, weighted, measure, group):
    model = make_model()
    groups = [list(model.parameters())]
    tap, wrapper = attach(model, group=group, **options)
    run_window(tap, wrapper, make_batches([2]), weights=[2])  # a static graph begins so
    for step in range(2):
        batches = make_batches([3, 1, 2], seed=step)
        again = {"groups": groups, "weighted": weighted, "measure": measure}
        check_weighted(tap, wrapper, model, batches, **again)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("signs", [[1, -1, 1], [1, 1, -1], [-1, -1, 1]], ids=str)
@pytest.mark.parametrize("measure", [True, False])
def test_weighted_gradients_of_parameters_that_the_last_micro_batch_does_not_use(
    signs, options, measure, group
):
    model = Branches().double()
    groups = [list(model.stem.parameters()), [*model.left.parameters(), *model.right.parameters()]]
    tap, wrapper = attach(model, group=group, groups=groups, find_unused_parameters=True, **options)
    for _ in range(2):
        again = {"groups": groups, "weighted": (0, 1, 2), "measure": measure}
        check_weighted(tap, wrapper, model, branch_batches(signs), **again)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("ddp", [False, True])
def test_a_step_that_is_not_measured_keeps_one_copy_of_the_gradients(num_micro_batches, ddp, group):
    model = make_model()
    tap, wrapper = GradientTap([[*model.parameters()]]), model
    if ddp:
        tap, wrapper = attach(model, group=group)
    sizes = [2] * num_micro_batches
    for measure, copies in ((True, min(num_micro_batches, 2)), (False, 1)):
        alive = []
        hook = model[0].weight.register_post_accumulate_grad_hook(
            lambda p: alive.append(1 + (id(p) in tap._set_aside))  # noqa: B023
        )
        run_window(
            tap, wrapper, make_batches(sizes), weights=sizes, measure=measure, weighted=range(9)
        )
        hook.remove()
        assert max(alive) == copies


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("loss_scale", [4.0, torch.tensor(4.0)], ids=["number", "tensor"])
def test_sums_on_the_host_are_those_on_a_device(num_groups, broken, loss_scale, monkeypatch):
    def told():
        sums = StepSums(num_groups)
        for number in range(2):
            norms = torch.arange(num_groups, dtype=torch.float64) + number
            if broken and number:
                norms[-1] = math.inf
            sums.add_local(norms, factor=3.0)
            sums.set_mean(number, norms / 2)
        extras = (1.5, torch.tensor(2.5), torch.tensor(3), 4)
        vector = sums.vector((8.0, 2.0), extras, device=torch.device("cpu"))
        return sums.read(vector, loss_scale)

    on_host = told()
    monkeypatch.setattr(step_sums, "reads_at_once", lambda _device: False)
    assert told() == on_host
    assert on_host[0][num_groups:] == [8.0, 2.0, float(broken), 1.5, 2.5, 3.0, 4.0]


# BC-23
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_many_buckets_are_measured_before_and_after_they_are_rebuilt(
    num_micro_batches, options, group
):
    """The layout changes after the first iteration."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(300, 300), nn.Tanh())])
    groups = [list(model.parameters())[0::2], list(model.parameters())[1::2]]
    tap, wrapper = attach(model, group=group, groups=groups, bucket_cap_mb=1, **options)
    sizes = [3, 1, 2][:num_micro_batches]
    num_buckets = []
    for step in range(3):
        batches = make_batches(sizes, features=300, outputs=300, seed=step, dtype=torch.float32)
        measurement = run_window(tap, wrapper, batches, weights=sizes)
        num_buckets.append(len(tap._sums._means))
        wanted = expected(model, batches, weights=sizes, groups=groups)
        check(measurement, model, wanted, rel=2e-5, abs=1e-6)
    assert num_buckets[0] != num_buckets[1] == num_buckets[2]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("signs", [[1], [-1], [1, -1], [1, 1, -1], [-1, 1, 1], [1, 1, 1]], ids=str)
def test_unused_parameters_under_ddp_count_as_zero(signs, options, group):
    model = Branches().double()
    groups = [list(model.stem.parameters()), [*model.left.parameters(), *model.right.parameters()]]
    tap, wrapper = attach(model, group=group, groups=groups, find_unused_parameters=True, **options)
    for _ in range(3):
        batches = branch_batches(signs)
        weights = [2] * len(signs)
        measurement = run_window(tap, wrapper, batches, weights=weights)
        check(measurement, model, expected(model, batches, weights=weights, groups=groups))


def test_parameters_without_group_and_frozen_ones_share_buckets_with_the_others(group):
    model = make_model()
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    groups = [[parameters[3]], [parameters[0], parameters[1]]]
    tap, wrapper = attach(model, group=group, groups=groups)
    for step in range(3):
        batches = make_batches([2, 1], seed=step)
        measurement = run_window(tap, wrapper, batches, weights=[2, 1])
        wanted = expected(model, batches, weights=[2, 1], groups=groups)
        assert measurement.weighted_sqr_norms == exactly(wanted.weighted)
        assert measurement.mean_sqr_norms == exactly(wanted.means)
        for number in (0, 3):
            assert torch.allclose(parameters[number].grad, wanted.gradients[number], rtol=1e-12)


@pytest.mark.parametrize("weights", [[7, 19], [0, 3], [3, 0]])
def test_other_weights_under_ddp_give_the_weighted_mean(weights, group):
    model, batches = make_model(), make_batches([2, 2])
    groups = [list(model.parameters())]
    tap, wrapper = attach(model, group=group)
    measurement = run_window(tap, wrapper, batches, weights=weights, batch_samples=4)
    wanted = expected(model, batches, weights=weights, groups=groups, batch_samples=4)
    check(measurement, model, wanted)
    assert measurement.weight == sum(weights)
    gradients = [p.grad.clone() for p in model.parameters()]
    assert tap.settle() is measurement
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


# BC-21
def test_an_unsynchronised_last_micro_batch_is_a_usage_error(group):
    """Each worker would step on its own gradient."""
    model, ((inputs, targets),) = make_model(), make_batches([2])
    tap, wrapper = attach(model, group=group)
    tap.begin(batch_samples=2)
    tap.begin_micro_batch(2)
    with wrapper.no_sync():
        F.mse_loss(wrapper(inputs), targets).backward()
    with pytest.raises(UsageError):
        tap.settle()


# BC-21
def test_two_synchronised_backward_passes_in_a_window_are_a_usage_error(group):
    """Each would be averaged and counted; the mean would silently be wrong by a factor."""
    model, batches = make_model(), make_batches([2, 2])
    tap, wrapper = attach(model, group=group)
    tap.begin(batch_samples=4)
    tap.begin_micro_batch(2)
    for inputs, targets in batches:
        F.mse_loss(wrapper(inputs), targets).backward()
    with pytest.raises(UsageError, match="once"):
        tap.settle()
    measurement = run_window(tap, wrapper, batches, weights=[2, 2])
    groups = [list(model.parameters())]
    check(measurement, model, expected(model, batches, weights=[2, 2], groups=groups))


def test_a_backward_pass_after_settling_is_a_usage_error(group):
    model, batches = make_model(), make_batches([2, 2])
    tap, wrapper = attach(model, group=group)
    run_window(tap, wrapper, batches[:1], weights=[2])
    F.mse_loss(wrapper(batches[1][0]), batches[1][1]).backward()
    with pytest.raises(UsageError, match="once"):
        tap.settle()


def test_after_detaching_a_bare_model_is_this_process_own(group):
    model, batches = make_model(), make_batches([2, 1])
    tap, wrapper = attach(model, group=group)
    run_window(tap, wrapper, batches, weights=[2, 1])
    del wrapper
    tap.detach()
    dist.destroy_process_group()
    measurement = run_window(tap, model, batches, weights=[2, 1])
    groups = [list(model.parameters())]
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))


def test_a_second_wrapper_on_a_new_group_goes_on(group):
    model, batches = make_model(), make_batches([2, 1])
    tap, wrapper = attach(model, group=group)
    run_window(tap, wrapper, batches, weights=[2, 1])
    del wrapper
    tap.detach()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapper = wrap(model, group=dist.group.WORLD, options={})
    tap.attach(wrapper, peers=Peers(dist.group.WORLD))
    measurement = run_window(tap, wrapper, batches, weights=[2, 1])
    groups = [list(model.parameters())]
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))


# Communication errors


class BrokenWork:
    """A collective that was launched and then fails."""

    def is_completed(self):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("connection closed by peer"))
        return future

    def wait(self):
        raise RuntimeError("connection closed by peer")


def refuse(*_args, **_kwargs):
    raise RuntimeError("connection closed by peer")


def break_collectives(monkeypatch, number, breaker, *, only):
    """Break the collective number `number`, and those after it unless it is to be the only one."""
    real, calls = dist.all_reduce, []

    def all_reduce(tensor, **options):
        calls.append(None)
        broken = len(calls) == number + 1 if only else len(calls) > number
        return breaker(tensor) if broken else real(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


@pytest.mark.parametrize("breaker", [refuse, lambda _: BrokenWork(), lambda _: None])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("is_carried", [True, False])
def test_a_communication_error_is_raised_by_settle_and_never_in_backward(
    breaker, number, only, measure, is_carried, group, monkeypatch
):
    """Number 0 and 1 are buckets; 2 is the small reduction, if no bucket carries it."""
    if not is_carried:
        monkeypatch.setattr("elastane.carrier.MOST_ELEMENTS", 0)
    model, batches = make_model(), make_batches([2, 1])
    groups = [list(model.parameters())]
    tap, wrapper = attach(model, group=group, bucket_cap_mb=1e-4)
    for _ in range(2):
        run_window(tap, wrapper, batches, weights=[2, 1])
    num_buckets = len(tap._sums._means)
    assert num_buckets > 1
    with monkeypatch.context() as patch:
        break_collectives(patch, number, breaker, only=only)
        model.zero_grad()
        tap.begin(batch_samples=2, measure=measure)
        tap.begin_micro_batch(2)
        F.mse_loss(wrapper(batches[0][0]), batches[0][1]).backward()
        is_whole = is_carried and number == num_buckets
        if is_whole:
            assert tap.settle().finite
        for _ in range(0 if is_whole else 2):
            with pytest.raises(CommunicationError, match="broke in this step"):
                tap.settle()
    measurement = run_window(tap, wrapper, batches, weights=[2, 1])
    check(measurement, model, expected(model, batches, weights=[2, 1], groups=groups))


def test_numbers_and_scalars_of_the_device_make_one_vector_of_doubles():
    values = [1.5, torch.tensor(2.5), torch.tensor(True), 3, torch.tensor([-4.0]), 5.0, 6.0]
    vector = as_vector(values, torch.device("cpu"))
    assert vector.dtype == torch.float64
    assert vector.tolist() == [1.5, 2.5, 1.0, 3.0, -4.0, 5.0, 6.0]


# What rides on a bucket


def reductions_of(monkeypatch):
    """Return a list that grows by the number of elements of each reduction."""
    real, sizes = dist.all_reduce, []

    def all_reduce(tensor, **options):
        sizes.append(tensor.numel())
        return real(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_step_has_no_reduction_of_its_own_where_a_bucket_can_carry_its_numbers(
    dtype, options, measure, on_host, group, monkeypatch
):
    monkeypatch.setattr(step_sums, "reads_at_once", lambda _device: on_host)
    model = make_model(dtype=dtype)
    calls = []
    tap, wrapper = attach(model, group=group, extras=lambda: (1.5, 3.0), **options)
    tap._arrived = lambda: calls.append(None)
    sizes = reductions_of(monkeypatch)
    for number in range(3):
        sizes.clear()
        batches = make_batches([2, 1], seed=number, dtype=dtype)
        measurement = run_window(tap, wrapper, batches, weights=[2, 1], measure=measure)
        num_buckets = len(tap._sums._means)
        assert len(sizes) == num_buckets + (dtype == torch.bfloat16)
        assert measurement.extras == (1.5, 3.0)
        assert (measurement.weight, measurement.num_gradients) == (3.0, 2)
        assert len(calls) == number + 1
    wanted = expected(model, batches, weights=[2, 1], groups=[list(model.parameters())])
    rel = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 3e-2}[dtype]
    for parameter, gradient in zip(model.parameters(), wanted.gradients, strict=True):
        assert torch.allclose(parameter.grad.double(), gradient, rtol=rel, atol=rel)


@pytest.mark.parametrize("measure", [True, False])
def test_a_large_bucket_is_not_copied(measure, group, monkeypatch):
    monkeypatch.setattr("elastane.carrier.MOST_ELEMENTS", 3)
    model, batches = make_model(), make_batches([2, 1])
    tap, wrapper = attach(model, group=group)
    sizes = reductions_of(monkeypatch)
    run_window(tap, wrapper, batches, weights=[2, 1], measure=measure)
    assert len(sizes) == len(tap._sums._means) + 1


@pytest.mark.parametrize(("measure", "carrying"), [(True, -1), (False, 0)])
def test_the_last_bucket_carries_what_was_measured_and_else_the_first(
    measure, carrying, group, monkeypatch
):
    model, batches = make_model(), make_batches([2, 1])
    tap, wrapper = attach(model, group=group, extras=lambda: (1.5,), bucket_cap_mb=1e-4)
    for _ in range(2):
        run_window(tap, wrapper, batches, weights=[2, 1])
    sizes = reductions_of(monkeypatch)
    run_window(tap, wrapper, batches, weights=[2, 1], measure=measure)
    told = 1 + 3 + 1  # a group's norm, counts and flag, and the extra value
    assert sum(sizes) == sum(p.numel() for p in model.parameters()) + told
    vector = tap._carrier.vector
    assert vector is not None
    assert len(sizes) > 1
    assert len(tap._carrier.gradients) + told == sizes[carrying]


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("is_carried", [True, False])
def test_gradients_that_are_changed_before_settling_do_not_change_the_norm(
    measure, options, is_carried, group, monkeypatch
):
    if not is_carried:
        monkeypatch.setattr("elastane.carrier.MOST_ELEMENTS", 0)
    model, ((inputs, targets),) = make_model(), make_batches([2])
    tap, wrapper = attach(model, group=group, **options)
    tap.begin(batch_samples=2, measure=measure)
    tap.begin_micro_batch(2)
    F.mse_loss(wrapper(inputs), targets).backward()
    whole = sum(squared_norm_twin(p.grad) for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad.mul_(3)
    assert tap.settle().mean_sqr_norms == pytest.approx((whole,), rel=1e-6)


def test_a_bucket_with_parameters_outside_the_optimizer_is_looked_into(group):
    model, ((inputs, targets),) = make_model(), make_batches([2])
    own, *others = model.parameters()
    for groups in ([[own]], [[own, *others]], [[own], others]):
        tap, wrapper = attach(model, group=group, groups=groups)
        measurement = run_window(tap, wrapper, [(inputs, targets)], weights=[2])
        found = [sum(squared_norm_twin(p.grad) for p in some) for some in groups]
        assert measurement.mean_sqr_norms == pytest.approx(found, rel=1e-6)
        remove_hooks(wrapper)


def test_two_averaged_backwards_of_a_step_that_is_not_measured_are_a_usage_error(group):
    model, ((inputs, targets),) = make_model(), make_batches([2])
    tap, wrapper = attach(model, group=group)
    tap.begin(batch_samples=2, measure=False)
    tap.begin_micro_batch(2)
    for _ in range(2):
        F.mse_loss(wrapper(inputs), targets).backward()
    with pytest.raises(UsageError, match="two backward passes"):
        tap.settle()


def share_of_a_window():
    rank = dist.get_rank()
    model, sizes = make_model(dtype=torch.float32), [3, 1, 2, 5]
    tap, wrapper = attach(
        model, group=dist.group.WORLD, extras=lambda: (float(rank), 1.0), bucket_cap_mb=1e-4
    )
    found = []
    for measure in (True, False, True, False):
        mine = make_batches(sizes, dtype=torch.float32)[2 * rank : 2 * rank + 2]
        own = sizes[2 * rank : 2 * rank + 2]
        measurement = run_window(
            tap, wrapper, mine, weights=own, batch_samples=11, measure=measure, weighted=(0, 1)
        )
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((gradient, measurement.mean_sqr_norms, measurement.extras, measurement.weight))
    return found


@pytest.mark.processes
def test_two_workers_come_to_the_same_whether_a_step_is_measured_or_not(tmp_path):
    model, sizes = make_model(dtype=torch.float32), [3, 1, 2, 5]
    batches = make_batches(sizes, dtype=torch.float32)
    wanted = expected(model, batches, weights=sizes, groups=[list(model.parameters())])
    flat = torch.cat([one.flatten() for one in wanted.gradients])
    for found in run_workers(share_of_a_window, world_size=2, folder=tmp_path):
        for gradient, means, extras, weight in found:
            assert torch.equal(gradient, found[0][0])
            assert torch.allclose(gradient.double(), flat, rtol=1e-5, atol=1e-6)
            assert means == found[0][1]
            assert (extras, weight) == ((1.0, 2.0), 11.0)
