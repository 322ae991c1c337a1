"""Rules: the pair of each, warm-ups, a user's own function, and answers that are refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.errors import ArgumentError
from elastane.scaling import (
    LEGW,
    AdamScale,
    AdaScale,
    Identity,
    Linear,
    Scaling,
    Sqrt,
    StepContext,
    WarmUp,
    apply_rule,
)

always = partial(settings, derandomize=True, deadline=None, database=None)

RULES = [
    Identity(),
    Identity(progress="gain"),
    Linear(),
    Sqrt(),
    LEGW(warmup_steps=100),
    AdaScale(),
    AdamScale(),
    AdamScale(power=0.25),
    WarmUp(rule=Linear()),
    WarmUp(rule=LEGW(warmup_steps=100)),
]


def at(*, scale=4.0, gain=2.25, progress=50.0, num_steps=1000, base_batch_size=16):
    return StepContext(
        scale=scale,
        gain=gain,
        progress=progress,
        num_steps=num_steps,
        step=7,
        batch_samples=scale * base_batch_size,
        base_batch_size=base_batch_size,
    )


def answering(result):
    return lambda _: result


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Identity(), (1.0, 1.0)),
        (Identity(progress="gain"), (1.0, 2.25)),
        (Linear(), (4.0, 4.0)),
        (Sqrt(), (2.0, 4.0)),
        (LEGW(warmup_steps=10), (2.0, 4.0)),
        (LEGW(warmup_steps=25), (1.0, 4.0)),
        (AdaScale(), (2.25, 2.25)),
        (AdamScale(), (1.5, 2.25)),
        (AdamScale(power=1), (2.25, 2.25)),
        (WarmUp(rule=Linear(), fraction=0.1), (2.5, 4.0)),
    ],
)
def test_each_rule_answers_its_pair(rule, expected):
    found = apply_rule(rule, at())
    assert isinstance(found, Scaling)
    assert found == expected


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_leaves_a_base_batch_after_the_warm_up_alone(rule):
    found = apply_rule(rule, at(scale=1.0, gain=1.0, progress=900))
    assert found == (1.0, 1.0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@always(max_examples=60)
@given(
    scale=st.floats(1e-3, 1e5),
    share=st.floats(0, 1),
    progress=st.floats(0, 1000),
    num_steps=st.floats(1, 1e6),
)
def test_every_rule_is_positive_and_finite_from_the_first_step_on(
    rule, scale, share, progress, num_steps
):
    gain = scale**share
    found = apply_rule(rule, at(scale=scale, gain=gain, progress=progress, num_steps=num_steps))
    assert found.factor > 0
    assert found.progress in (1.0, gain, scale)


@pytest.mark.parametrize("scale", [1, 4, 9, 16, 25])
def test_the_square_root_rule_answers_one_to_five(scale):
    assert apply_rule(Sqrt(), at(scale=scale)).factor == math.sqrt(scale)
    assert apply_rule(Sqrt(), at(scale=scale)).progress == scale


# LEGW. AdaptDL's cases: warm-up of 10 epochs of 1000 samples, in base steps.


@pytest.mark.parametrize(
    ("batch", "progress", "factors"),
    [
        (100, 5, [1 / 20, 1 / 40, 1 / 60, 1 / 80, 1 / 100]),
        (100, 400, [1, 2, 4 / 3, 1, 0.8]),
        (50, 400, [1, 1, 2 / 3, 0.5, 0.4]),
    ],
)
def test_legw_gives_the_numbers_of_adaptdl(batch, progress, factors):
    rule = LEGW(warmup_steps=10 * 1000 / batch)
    found = [apply_rule(rule, at(scale=s, progress=progress)) for s in (1, 4, 9, 16, 25)]
    assert [one.factor for one in found] == pytest.approx(factors, rel=1e-12)
    assert [one.progress for one in found] == [1, 4, 9, 16, 25]


def test_legw_counts_the_first_step_as_base_step_one():
    rule = LEGW(warmup_steps=100)
    first = apply_rule(rule, at(scale=4, progress=0)).factor
    assert first == apply_rule(rule, at(scale=4, progress=1)).factor == 2 * 1 / 400
    assert apply_rule(rule, at(scale=4, progress=2)).factor == 2 * first


def test_legw_never_passes_the_square_root():
    rule = LEGW(warmup_steps=0.001)
    assert apply_rule(rule, at(scale=4, progress=0)).factor == 2.0


# Warm-up


def test_a_warm_up_runs_from_one_to_the_rule_and_stays_there():
    rule = WarmUp(rule=Linear(), fraction=0.1)
    found = [apply_rule(rule, at(scale=16, progress=p)).factor for p in (0, 25, 50, 100, 101, 999)]
    assert found == [1.0, 4.75, 8.5, 16.0, 16.0, 16.0]


# BC-32
def test_a_warm_up_counts_the_progress_of_its_rule_from_the_start():
    rule = WarmUp(rule=AdaScale(), fraction=0.1)
    assert apply_rule(rule, at(gain=3.0, scale=8, progress=0)) == (1.0, 3.0)
    assert apply_rule(rule, at(gain=3.0, scale=8, progress=50)) == (2.0, 3.0)


def test_a_warm_up_takes_the_paper_fraction_by_default():
    assert WarmUp(rule=Linear()).fraction == 0.055
    assert apply_rule(WarmUp(rule=Linear()), at(scale=3, progress=54.9)).factor < 3
    assert apply_rule(WarmUp(rule=Linear()), at(scale=3, progress=55)).factor == 3


def test_a_warm_up_goes_with_legw_with_itself_and_with_a_function():
    legw = WarmUp(rule=LEGW(warmup_steps=100), fraction=0.1)
    # sqrt(4) * 50/400 = 0.25 from LEGW; half way from 1 to there
    assert apply_rule(legw, at(scale=4, progress=50)) == (0.625, 4.0)
    twice = WarmUp(rule=WarmUp(rule=Linear(), fraction=0.1), fraction=0.1)
    assert apply_rule(twice, at(scale=5, progress=50)) == (2.0, 5.0)
    own = WarmUp(rule=lambda now: (now.scale * 3, 7.0), fraction=0.1)
    assert apply_rule(own, at(scale=5, progress=50)) == (8.0, 7.0)


def test_a_warm_up_blames_the_rule_inside_for_a_bad_answer():
    with pytest.raises(ArgumentError, match=r"rule=<function answering.*returned 4\.0"):
        apply_rule(WarmUp(rule=answering(4.0)), at())


# A user's own function


def test_a_users_function_sees_the_whole_context():
    seen = []

    def rule(now):
        seen.append(now)
        return now.batch_samples / now.base_batch_size, now.num_steps

    assert apply_rule(rule, at(scale=4)) == (4.0, 1000.0)
    assert seen == [at(scale=4)]


def test_answers_become_plain_floats_so_that_they_can_be_saved():
    found = apply_rule(answering([torch.tensor(2.5), 3]), at())
    assert found == (2.5, 3.0)
    assert [type(value) for value in found] == [float, float]


@pytest.mark.parametrize(
    "result",
    [None, 2.0, (1.0,), (1.0, 2.0, 3.0), (), (None, 1.0), (1.0, None), ("1", "2"), "ab", 1j],
)
def test_a_rule_that_returns_no_pair_of_numbers_is_refused(result):
    with pytest.raises(ArgumentError) as caught:
        apply_rule(answering(result), at())
    message = str(caught.value)
    assert message.startswith("rule=<function answering")
    assert f"returned {result!r}" in message
    assert "Return (factor, progress)" in message


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["factor", "progress"])
def test_a_rule_that_returns_an_impossible_number_is_refused(name, bad):
    rule = answering((bad, 1.0) if name == "factor" else (1.0, bad))
    with pytest.raises(ArgumentError) as caught:
        apply_rule(rule, at(scale=4, gain=2.25))
    message = str(caught.value)
    assert message.startswith("rule=<function answering")
    assert f"returned {name}={bad!r}" in message
    assert "at scale 4, gain 2.25" in message
    assert "finite and above 0" in message


def test_an_error_inside_a_rule_comes_out_as_it_is():
    def my_rule(now):
        return now.nothing

    with pytest.raises(AttributeError, match="nothing"):
        apply_rule(my_rule, at())


# Options


def test_an_unknown_progress_is_refused_with_the_choices():
    with pytest.raises(ArgumentError, match="progress='tau'") as caught:
        Identity(progress="tau")
    assert "'gain', 'step'" in str(caught.value)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, None, "5", True])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda value: LEGW(warmup_steps=value), "warmup_steps"),
        (lambda value: AdamScale(power=value), "power"),
        (lambda value: WarmUp(rule=Linear(), fraction=value), "fraction"),
    ],
)
def test_lengths_and_powers_must_be_above_zero(build, name, bad):
    with pytest.raises(ArgumentError, match="finite number above 0") as caught:
        build(bad)
    assert str(caught.value).startswith(f"{name}={bad!r}")


def test_rules_are_values():
    assert LEGW(warmup_steps=3) == LEGW(warmup_steps=3) != LEGW(warmup_steps=4)
    assert hash(WarmUp(rule=Linear())) == hash(WarmUp(rule=Linear()))
    with pytest.raises(TypeError):
        LEGW(3)
    with pytest.raises(AttributeError):
        Identity().progress = "gain"
