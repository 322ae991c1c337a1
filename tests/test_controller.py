"""The step controller: what it decides from, what it keeps, and that nothing moves uncommitted."""

from __future__ import annotations

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.controller import StepController
from elastane.errors import ArgumentError, StateError
from elastane.measuring import Measuring
from elastane.momentum import MomentumRamp, NoiseMatchedRamp
from elastane.noise import Moments, estimate_moments, gain, total_moments
from elastane.scaling import AdamScale, AdaScale, Identity, Linear, WarmUp

always = partial(settings, derandomize=True, deadline=None, database=None)

NOISE = Moments(variance=48.0, sqr_norm=1.0)  # per base batch of 16: 3 to 1, a gain of 2 at S = 3


def controller(rule=None, *, compensation=None, num_groups=1, base_batch_size=16, **measuring):
    return StepController(
        rule or AdaScale(),
        base_batch_size=base_batch_size,
        num_steps=1000,
        compensation=compensation,
        measuring=Measuring(**{"every": 1, **measuring}),
        num_groups=num_groups,
    )


def decide(controller, samples=None, *, batch=48, nominal=None, momentum=0.9):
    if isinstance(samples, Moments):
        samples = [samples]
    return controller.decide(
        samples,
        batch_samples=batch,
        nominal_samples=batch if nominal is None else nominal,
        momentum=momentum,
    )


def run(controller, steps):
    """Commit a decision for each dict of arguments; return the decisions."""
    decisions = []
    for arguments in steps:
        decision = decide(controller, **arguments)
        controller.commit(decision)
        decisions.append(decision)
    return decisions


def random_samples(num_steps, *, num_groups=1, seed=0):
    values = np.random.default_rng(seed).uniform(-1, 9, size=(num_steps, num_groups, 2))
    return [[Moments(variance=float(v), sqr_norm=float(m)) for v, m in step] for step in values]


# Which moments


def test_the_first_gain_is_one_and_each_later_one_comes_from_the_steps_before():
    samples = [one for [one] in random_samples(6)]
    decisions = run(controller(smoothing=0.0), [{"samples": one} for one in samples])
    expected = [1.0] + [gain(one, scale=3, base_batch_size=16) for one in samples[:-1]]
    assert [one.gain for one in decisions] == pytest.approx(expected, rel=1e-12)
    assert [one.factors for one in decisions] == [(one.gain,) for one in decisions]
    assert decisions[0].moments is None
    assert decisions[1].moments == samples[0]
    assert len(set(expected)) > 3


def test_a_steps_own_gradient_never_touches_its_own_factor():
    twin = [controller(), controller()]
    for one in twin:
        run(one, [{"samples": NOISE}] * 3)
    quiet = decide(twin[0], Moments(variance=0.0, sqr_norm=1.0))
    loud = decide(twin[1], Moments(variance=1e6, sqr_norm=1.0))
    assert (quiet.gain, quiet.factors, quiet.progress) == (loud.gain, loud.factors, loud.progress)
    assert quiet.averages != loud.averages


def test_current_takes_the_steps_own_gradient():
    samples = [one for [one] in random_samples(6)]
    decisions = run(controller(smoothing=0.0, current=True), [{"samples": s} for s in samples])
    expected = [gain(one, scale=3, base_batch_size=16) for one in samples]
    assert [one.gain for one in decisions] == pytest.approx(expected, rel=1e-12)


def test_the_gain_uses_the_scale_of_its_own_step():
    steps = [{"samples": NOISE, "batch": batch} for batch in (16, 48, 128, 8, 16)]
    decisions = run(controller(), steps)
    assert [one.scale for one in decisions] == [1, 3, 8, 0.5, 1]
    assert [one.gain for one in decisions] == pytest.approx([1, 2, 32 / 11, 4 / 7, 1], rel=1e-12)
    assert decisions[-1].gain == 1.0


def test_steps_without_a_measurement_use_what_is_known():
    one = controller(smoothing=0.5)
    first, second, third = run(one, [{}, {"samples": NOISE}, {}])
    assert (first.gain, second.gain) == (1.0, 1.0)
    assert third.gain == pytest.approx(2.0)
    assert third.averages == second.averages


def test_a_run_of_one_gradient_a_step_holds_the_averages_still():
    one = controller(smoothing=0.9)
    run(one, [{"samples": NOISE}] * 3)
    kept = one.state_dict()["averages"]
    alone = estimate_moments(
        weighted_sqr_norm=5.0, mean_sqr_norm=1.0, batch_samples=16, num_gradients=1
    )
    assert alone is None
    run(one, [{"samples": alone, "batch": 16}] * 5)
    assert one.state_dict()["averages"] == kept


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_kth_committed_step_is_measured(every):
    one = controller(every=every)
    measured = []
    for step in range(11):
        if one.wants_measurement(48):
            measured.append(step)
        decide(one, NOISE)  # a step that is not committed is measured again
        assert one.wants_measurement(48) == (step % every == 0)
        run(one, [{"samples": NOISE if one.wants_measurement(48) else None}])
    assert measured == list(range(0, 11, every))
    assert one.state_dict()["averages"][0]["count"] == len(measured)


# BC-16
@pytest.mark.parametrize("averaging", ["debiased", "paper"])
def test_a_constant_measured_every_kth_step_reads_back(averaging):
    one = controller(every=3, averaging=averaging)
    for step in range(1, 20):
        run(one, [{"samples": NOISE if one.wants_measurement(48) else None}])
        read = decide(one).moments
        assert read.variance == pytest.approx(48.0, rel=1e-12), step
        assert read.sqr_norm == pytest.approx(1.0, rel=1e-12), step


# Smoothing


# BC-14
def test_ones_own_smoothing_stays_whatever_the_scale():
    one = controller(smoothing=0.12345)
    expected = None
    for batch, [sample] in zip((16, 64, 8, 4096, 160), random_samples(5), strict=True):
        run(one, [{"samples": sample, "batch": batch}])
        before, weight = expected or (0.0, 0.0)
        expected = (
            0.12345 * before + (1 - 0.12345) * sample.variance,
            0.12345 * weight + (1 - 0.12345),
        )
        state = one.state_dict()["averages"][0]
        assert (state["variance"], state["weight"]) == pytest.approx(expected, rel=1e-12)


# BC-14
def test_smoothing_of_zero_is_taken_and_not_replaced():
    one = controller(smoothing=0.0)
    run(one, [{"samples": NOISE}, {"samples": Moments(variance=1.0, sqr_norm=1.0)}])
    assert decide(one).moments == Moments(variance=1.0, sqr_norm=1.0)


# BC-14
def test_the_default_smoothing_follows_the_scale():
    for batch, theta in ((16, 0.999), (160, 0.99), (8, 0.9995), (1600, 0.9), (32_000, 0.9)):
        one = controller()
        run(one, [{"samples": NOISE, "batch": batch}])
        assert one.state_dict()["averages"][0]["weight"] == pytest.approx(1 - theta, rel=1e-9)


# Rules and progress


def test_progress_is_the_sum_of_what_the_steps_were_worth():
    one = controller(Linear())
    run(one, [{"batch": batch} for batch in (16, 64, 8, 48)])
    assert one.progress == 1 + 4 + 0.5 + 3
    assert one.step == 4


def test_the_rule_sees_progress_step_and_batch_of_the_present_step():
    seen = []

    def rule(now):
        seen.append(now)
        return 1.0, 2.5

    run(controller(rule), [{"samples": NOISE, "batch": 48}] * 3)
    assert [now.progress for now in seen] == [0.0, 2.5, 5.0]
    assert [now.step for now in seen] == [0, 1, 2]
    assert {(now.scale, now.batch_samples, now.base_batch_size) for now in seen} == {(3.0, 48, 16)}
    assert {now.num_steps for now in seen} == {1000}
    assert [now.gain for now in seen] == pytest.approx([1, 2, 2])


def test_training_ends_when_progress_reaches_the_steps_asked_for():
    one = controller(lambda _: (1.0, 400.0))
    ends = []
    while not one.finished:
        run(one, [{}])
        ends.append(one.progress)
    assert ends == [400, 800, 1200]
    exact = controller(lambda _: (1.0, 500.0))
    run(exact, [{}] * 2)
    assert exact.finished


def test_factor_and_progress_differ_where_the_rule_says_so():
    for rule, factor, progress in (
        (AdamScale(), math.sqrt(2), 2.0),
        (Identity(progress="gain"), 1.0, 2.0),
        (Identity(), 1.0, 1.0),
        (Linear(), 3.0, 3.0),
    ):
        last = run(controller(rule), [{"samples": NOISE}] * 2)[-1]
        assert last.factors == pytest.approx((factor,))
        assert last.progress == pytest.approx(progress)


# BC-41
def test_batches_below_the_base_batch_are_worth_less_than_a_step():
    decisions = run(controller(), [{"samples": NOISE, "batch": 8}] * 3)
    assert decisions[0].gain == 1.0
    for one in decisions[1:]:
        assert one.scale == 0.5
        assert one.gain == pytest.approx(4 / 7)
        assert one.factors == (one.gain,)
        assert one.progress == one.gain


@always(max_examples=60)
@given(
    batches=st.lists(st.integers(1, 512), min_size=1, max_size=15),
    seed=st.integers(0, 1000),
    compensation=st.sampled_from([None, MomentumRamp(length=3), NoiseMatchedRamp()]),
    current=st.booleans(),
)
def test_no_step_is_worth_more_or_less_than_one_and_its_scale_allow(
    batches, seed, compensation, current
):
    one = controller(compensation=compensation, current=current)
    samples = random_samples(len(batches), seed=seed)
    for batch, sample in zip(batches, samples, strict=True):
        [decision] = run(one, [{"samples": sample, "batch": batch}])
        assert min(1, decision.scale) <= decision.gain <= max(1, decision.scale)
        assert 0 < decision.progress <= decision.gain


# Momentum compensation


def test_during_a_ramp_progress_counts_what_was_applied():
    one = controller(Linear(), compensation=MomentumRamp(length=4))
    decisions = run(one, [{"batch": 16}] + [{"batch": 32}] * 6)
    assert [d.factors for d in decisions] == [(f,) for f in (1, 1, 1.25, 1.5, 1.75, 2, 2)]
    assert [d.progress for d in decisions] == [1, 1, 1.25, 1.5, 1.75, 2, 2]


def test_during_a_ramp_progress_is_the_rules_times_applied_over_rule():
    one = controller(AdamScale(), compensation=MomentumRamp(length=4))
    steps = [{"samples": NOISE, "batch": 16}] * 2 + [{"samples": NOISE, "batch": 48}] * 3
    decisions = run(one, steps)[2:]
    root = math.sqrt(2)
    factors = [1 + a * (root - 1) for a in (0, 0.25, 0.5)]
    assert [d.factors[0] for d in decisions] == pytest.approx(factors)
    assert [d.progress for d in decisions] == pytest.approx([2 * f / root for f in factors])
    assert [d.gain for d in decisions] == pytest.approx([2, 2, 2])


def test_a_factor_held_above_the_rule_does_not_add_progress():
    one = controller(Linear(), compensation=MomentumRamp(length=4, shrink="ramp"))
    decisions = run(one, [{"batch": 64}] + [{"batch": 32}] * 3)
    assert [d.factors[0] for d in decisions] == [4, 4, 3.5, 3]
    assert [d.progress for d in decisions] == [4, 2, 2, 2]


def test_momentum_reaches_the_compensation_and_zero_means_no_ramp():
    for momentum, factor in ((0.0, 2.0), (0.9, 1.0)):
        one = controller(Linear(), compensation=MomentumRamp())
        steps = [{"batch": 16, "momentum": momentum}, {"batch": 32, "momentum": momentum}]
        assert run(one, steps)[-1].factors == (factor,)


@pytest.mark.parametrize("compensation", [MomentumRamp(), NoiseMatchedRamp()], ids=repr)
def test_the_short_last_batch_of_an_epoch_starts_no_ramp(compensation):
    one = controller(Linear(), compensation=compensation)
    steps = [{"batch": 64}, {"batch": 64}, {"batch": 24, "nominal": 64}, {"batch": 64}] * 2
    decisions = run(one, steps)
    assert [d.factors[0] for d in decisions] == [4, 4, 1.5, 4] * 2
    assert [d.progress for d in decisions] == [4, 4, 1.5, 4] * 2


@pytest.mark.parametrize("compensation", [MomentumRamp(length=4), MomentumRamp(), None])
def test_a_change_just_after_a_short_batch_starts_from_the_full_batch(compensation):
    plain = controller(Linear(), compensation=compensation)
    short = controller(Linear(), compensation=compensation)
    run(plain, [{"batch": 64}] * 3)
    run(short, [{"batch": 64}, {"batch": 64}, {"batch": 8, "nominal": 64}])
    for batch in (128, 32):
        expected = run(plain, [{"batch": batch}] * 20)
        found = run(short, [{"batch": batch}] * 20)
        assert [d.factors for d in found] == [d.factors for d in expected]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_short_batch_in_a_ramp_is_held_back_by_the_same_share(num_groups):
    one = controller(
        Linear(),
        compensation=MomentumRamp(length=4),
        num_groups=num_groups,
        per="param_group" if num_groups > 1 else "model",
    )
    steps = [{"batch": 16}, {"batch": 64}, {"batch": 64}, {"batch": 8, "nominal": 64}]
    decisions = run(one, [*steps, {"batch": 64}])
    factors = [1, 1, 1.75, 0.5 * 2.5 / 4, 3.25]
    assert [d.factors for d in decisions] == [(factor,) * num_groups for factor in factors]
    assert [d.progress for d in decisions] == factors


@pytest.mark.parametrize("compensation", [MomentumRamp(), NoiseMatchedRamp(), None])
def test_the_factor_returns_to_the_bit_after_twenty_changes(compensation):
    one = controller(Linear(), compensation=compensation)
    rng = np.random.default_rng(7)
    for batch in [*map(int, rng.integers(1, 300, size=20)), 48]:
        run(one, [{"batch": batch}] * 5)
    run(one, [{"batch": 48}] * 500)
    assert decide(one, batch=48).factors == (3.0,)
    assert decide(one, batch=48).progress == 3.0


# Transactions


def test_deciding_changes_nothing_until_it_is_committed():
    one = controller(compensation=MomentumRamp())
    run(one, [{"samples": NOISE, "batch": 16}] * 3)
    before = one.state_dict()
    decisions = [decide(one, NOISE, batch=64) for _ in range(3)]
    assert decisions[0] == decisions[1] == decisions[2]
    assert one.state_dict() == before
    one.commit(decisions[0])
    after = one.state_dict()
    assert after != before
    assert after["step"] == 4
    assert after["progress"] == before["progress"] + decisions[0].progress
    assert after["averages"][0]["count"] == 4
    assert after["ramps"][0]["batch_samples"] == 64


# BC-58
def test_a_step_that_was_not_committed_leaves_no_trace():
    straight, skipping = (
        controller(compensation=MomentumRamp()),
        controller(compensation=MomentumRamp()),
    )
    for step, sample in enumerate(random_samples(20)):
        batch = 16 * (1 + step // 5)
        if step % 3 == 0:
            decide(skipping, Moments(variance=1e9, sqr_norm=-1e9), batch=batch)
            decide(skipping, None, batch=batch)
        one, two = (decide(c, sample, batch=batch) for c in (straight, skipping))
        assert one == two
        straight.commit(one)
        skipping.commit(two)
    assert straight.state_dict() == skipping.state_dict()


# Groups


def test_one_gain_for_each_group_and_progress_by_the_whole():
    parts = [Moments(variance=48.0, sqr_norm=1.0), Moments(variance=0.0, sqr_norm=5.0)]
    one = controller(per="param_group", num_groups=2)
    first, second = run(one, [{"samples": parts}] * 2)
    assert first.factors == (1.0, 1.0)
    assert second.factors == pytest.approx((2.0, 1.0))
    whole = gain(total_moments(parts), scale=3, base_batch_size=16)
    assert second.gain == pytest.approx(whole)
    assert second.progress == pytest.approx(whole)
    assert second.moments.variance == pytest.approx(48.0)


def test_groups_ramp_each_from_their_own_factor():
    parts = [Moments(variance=48.0, sqr_norm=1.0), Moments(variance=0.0, sqr_norm=5.0)]
    one = controller(
        per="param_group", num_groups=2, compensation=MomentumRamp(length=2), current=True
    )
    steps = [{"samples": parts, "batch": 16}] + [{"samples": parts, "batch": 48}] * 3
    decisions = run(one, steps)
    assert [d.factors[0] for d in decisions] == pytest.approx([1, 1, 1.5, 2])
    assert [d.factors[1] for d in decisions] == pytest.approx([1, 1, 1, 1])
    whole = decisions[1].gain
    held = [(0.5 + 1) / 2, (0.75 + 1) / 2, 1.0]
    assert [d.progress for d in decisions[1:]] == pytest.approx([whole * share for share in held])


def test_a_group_that_joins_later_starts_anew_and_the_others_go_on():
    one = controller(per="param_group", num_groups=1)
    run(one, [{"samples": NOISE}] * 4)
    kept = one.state_dict()
    one.resize_groups(3)
    state = one.state_dict()
    assert state["averages"][:1] == kept["averages"]
    assert state["ramps"][:1] == kept["ramps"]
    assert [average["count"] for average in state["averages"]] == [4, 0, 0]
    decision = decide(one, [NOISE] * 3)
    assert decision.factors == pytest.approx((2.0, 1.0, 1.0))
    assert decision.gain == pytest.approx(2.0)
    one.commit(decision)
    assert decide(one, [NOISE] * 3).factors == pytest.approx((2.0,) * 3)


def test_resizing_to_the_same_number_of_groups_changes_nothing():
    one = controller(num_groups=2, per="param_group")
    run(one, [{"samples": [NOISE] * 2}])
    before = one.state_dict()
    one.resize_groups(2)
    assert one.state_dict() == before


# fairscale's numbers for parameter groups: two layers, later three; two micro-batches; S = 2.
# They are float32.

INPUTS = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))


def layer(weight, bias):
    weight = torch.tensor(weight)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.fill_(bias)
    return linear


def group_moments(layers):
    """Moments of each layer from a gradient of `out.sum()` for each input; leaves the mean."""
    model = torch.nn.Sequential(*layers)
    gradients = []
    for inputs in INPUTS:
        model.zero_grad()
        model(inputs).sum().backward()
        gradients.append([[p.grad.double().flatten() for p in one.parameters()] for one in layers])
    moments = []
    for one, first, second in zip(layers, *gradients, strict=True):
        pair = [torch.cat(first), torch.cat(second)]
        for parameter, parts in zip(one.parameters(), zip(first, second, strict=True), strict=True):
            parameter.grad = (sum(parts) / 2).view_as(parameter).float()
        moments.append(
            estimate_moments(
                weighted_sqr_norm=float(pair[0].square().sum() + pair[1].square().sum()),
                mean_sqr_norm=float(((pair[0] + pair[1]) / 2).square().sum()),
                batch_samples=2,
                num_gradients=2,
            )
        )
    return moments


@pytest.mark.parametrize(
    ("averaging", "whole", "groups"),
    [
        (
            "debiased",
            1.1382937715383077,
            (1.142857206008338, 1.1116875516387468, 1.0749164095196344),
        ),
        (
            "paper",
            1.1391959826562015,
            (1.142857206008338, 1.1116906378271827, 1.0749164095196344),
        ),
    ],
)
def test_the_gains_of_parameter_groups_are_those_of_fairscale(averaging, whole, groups):
    layers = [
        layer([[1.0, 2.0], [3.0, 4.0]], 0.1),
        layer([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], 0.2),
    ]
    optimizer = torch.optim.SGD([{"params": list(one.parameters())} for one in layers], lr=0.1)
    one = controller(
        per="param_group",
        num_groups=2,
        current=True,
        averaging=averaging,
        smoothing=1 - 2 / 1000,
        base_batch_size=1,
    )
    decision = decide(one, group_moments(layers), batch=2)
    assert decision.gain == pytest.approx(1.1440223454935758, rel=1e-6)
    assert decision.factors == pytest.approx((1.1428571428571428, 1.1471248476157762), rel=1e-6)
    for group, factor in zip(optimizer.param_groups, decision.factors, strict=True):
        group["lr"] = 0.1 * factor
    optimizer.step()
    one.commit(decision)
    layers.append(layer([[1.0, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6]], 0.2))
    one.resize_groups(3)
    decision = decide(one, group_moments(layers), batch=2)
    assert decision.factors == pytest.approx(groups, rel=1e-6)
    read = [average.read() for average in decision.averages]
    assert decision.gain == pytest.approx(gain(total_moments(read), scale=2, base_batch_size=1))
    if averaging == "paper":
        # fairscale counts the steps of all groups together, so a mean over one step is halved
        # in the group that joined in the second; its whole gain then weighs that group half.
        read[2] = Moments(variance=read[2].variance / 2, sqr_norm=read[2].sqr_norm / 2)
    found = gain(total_moments(read), scale=2, base_batch_size=1)
    assert found == pytest.approx(whole, rel=1e-6)


# Elastic runs


NUM_PARTS = 12  # micro-batches of a step, whatever the number of workers


def cut_run(cuts):
    """Run steps of 12 fixed micro-batches of 4 samples on the workers that each cut names."""
    rng = np.random.default_rng(8)
    one = controller(compensation=NoiseMatchedRamp())
    decisions = []
    for num_workers in cuts:
        parts = rng.integers(-8, 9, size=(NUM_PARTS, 5)) / 4 + 0.5  # so that sums are exact
        weighted = [
            sum(4.0 * float(part @ part) for part in parts[worker::num_workers])
            for worker in range(num_workers)
        ]
        sums = [parts[worker::num_workers].sum(0) for worker in range(num_workers)]
        mean = sum(sums) / NUM_PARTS
        sample = estimate_moments(
            weighted_sqr_norm=sum(weighted),
            mean_sqr_norm=float(mean @ mean),
            batch_samples=48,
            num_gradients=NUM_PARTS,
        )
        decisions += run(one, [{"samples": sample}])
    return one, decisions


def test_a_run_cut_into_other_numbers_of_workers_makes_the_same_progress_to_the_bit():
    elastic, found = cut_run([2] * 10 + [4] * 10 + [1] * 10 + [3] * 10)
    steady, expected = cut_run([1] * 40)
    assert found == expected
    assert elastic.state_dict() == steady.state_dict()
    assert elastic.progress == steady.progress != 40
    assert len({decision.gain for decision in found}) > 30


# BC-06
def test_all_ranks_decide_the_same_from_the_same_reduced_numbers():
    ranks = [controller(compensation=MomentumRamp()) for _ in range(4)]
    for step, samples in enumerate(random_samples(30)):
        batch = 16 * (2, 4, 1, 3)[step // 8]
        decisions = [run(rank, [{"samples": samples, "batch": batch}])[0] for rank in ranks]
        assert decisions.count(decisions[0]) == 4
    # One that joins with the state of another goes on as the others do.
    joiner = controller(compensation=MomentumRamp())
    joiner.load_state_dict(ranks[2].state_dict())
    assert decide(joiner, NOISE, batch=64) == decide(ranks[0], NOISE, batch=64)


def test_the_average_variance_runs_on_through_changes_of_workers_and_batch():
    rng = np.random.default_rng(9)
    one, dim, variance, sqr_norm = controller(), 200, 12.0, 0.5
    phases, reads = ([2] * 600, [4] * 300, [1] * 50, [3] * 300), []
    for phase in phases:
        for num_workers in phase:
            parts = math.sqrt(sqr_norm / dim) + math.sqrt(
                variance / dim / 16
            ) * rng.standard_normal((num_workers, dim))
            mean = parts.mean(0)
            sample = estimate_moments(
                weighted_sqr_norm=16 * float((parts**2).sum()),
                mean_sqr_norm=float(mean @ mean),
                batch_samples=16 * num_workers,
                num_gradients=num_workers,
            )
            run(one, [{"samples": sample, "batch": 16 * num_workers}])
            reads.append(decide(one, batch=16).moments)
    settled = reads[300:]
    assert len(settled) == 950
    assert all(read.variance == pytest.approx(variance, rel=0.03) for read in settled)
    assert all(read.sqr_norm == pytest.approx(sqr_norm, rel=0.12) for read in settled)
    steps = np.abs(np.diff([read.variance for read in settled]))
    assert steps.max() < 0.02  # no jump at the three changes
    alone = reads[900:950]
    assert alone.count(reads[899]) == 50


# State


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# BC-39
@pytest.mark.parametrize(
    ("rule", "compensation"),
    [
        (AdaScale(), MomentumRamp(length=6)),
        (Linear(), NoiseMatchedRamp()),
        (AdamScale(), None),
        (WarmUp(rule=AdaScale(), fraction=0.05), MomentumRamp()),
        (lambda now: (np.float64(now.scale), torch.tensor(now.gain)), MomentumRamp()),
    ],
)
@pytest.mark.parametrize("averaging", ["debiased", "paper"])
def test_a_restart_in_the_middle_of_a_ramp_changes_nothing(rule, compensation, averaging):
    def fresh():
        return controller(
            rule,
            compensation=compensation,
            averaging=averaging,
            num_groups=2,
            per="param_group",
            every=2,
        )

    steps = [
        {"samples": samples, "batch": batch}
        for samples, batch in zip(
            random_samples(30, num_groups=2), [16] * 9 + [64] * 12 + [32] * 9, strict=True
        )
    ]
    straight = fresh()
    run(straight, steps[:12])
    resumed = fresh()
    resumed.load_state_dict(save_and_load(straight.state_dict()))
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.wants_measurement(64) == straight.wants_measurement(64)
    assert run(resumed, steps[12:]) == run(straight, steps[12:])
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.progress == straight.progress > 0


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda state: state["averages"].pop(), "1 parameter groups, measured per"),
        (lambda state: state["ramps"].pop(), "parameter groups"),
        (lambda state: state.pop("progress"), "progress"),
        (lambda state: state.pop("step"), "step"),
        (lambda state: state.pop("averages"), "averages"),
        (lambda state: state.pop("ramps"), "ramps"),
        (lambda state: state["ramps"][1].pop("start"), "ramp"),
        (lambda state: state["ramps"][1].update(velocity=1.0), "ramp"),
        (lambda state: state["averages"][1].pop("weight"), "moment average"),
        (lambda state: state["averages"][1].update(mean=1.0), "moment average"),
        (lambda state: state["averages"][1].update(averaging="paper"), "'paper'.*'debiased'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, shown):
    def fresh():
        return controller(num_groups=2, per="param_group")

    one, other = fresh(), fresh()
    run(one, [{"samples": [NOISE] * 2}] * 3)
    run(other, [{"samples": [NOISE] * 2}])
    state = one.state_dict()
    change(state)
    before = other.state_dict()
    with pytest.raises(StateError, match=shown):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_a_state_is_a_copy():
    one = controller()
    state = one.state_dict()
    state["averages"][0]["count"] = 99
    state["ramps"][0]["steps"] = 99
    assert one.state_dict()["averages"][0]["count"] == 0
    assert one.state_dict()["ramps"][0]["steps"] == 0


# Options


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"averaging": "ema"}, "averaging='ema'.*'debiased', 'paper'"),
        ({"per": "layer"}, "per='layer'.*'model', 'param_group'"),
        ({"every": 0}, "every=0.*at least 1"),
        ({"every": 2.0}, "every=2.0.*whole number"),
        ({"every": True}, "every=True"),
        ({"smoothing": 1.0}, "smoothing=1.0.*below 1"),
        ({"smoothing": -0.1}, "smoothing=-0.1"),
        ({"smoothing": math.nan}, "smoothing=nan"),
    ],
)
def test_measuring_refuses_unknown_options_by_name(options, shown):
    with pytest.raises(ArgumentError, match=shown):
        Measuring(**options)


def test_a_rule_with_a_bad_answer_stops_the_decision_and_nothing_moves():
    one = controller(lambda now: (now.scale - 1, 1.0))
    before = one.state_dict()
    with pytest.raises(ArgumentError, match=r"factor=0\.0 at scale 1"):
        decide(one, NOISE, batch=16)
    assert one.state_dict() == before
