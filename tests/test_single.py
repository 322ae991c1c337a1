"""Moments from one gradient a step: per-sample norms against autograd, and the handover."""

from __future__ import annotations

import math
from functools import partial
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import Digits, build_model, build_session, train

from benchmarks.single.estimators import pair_moments
from benchmarks.single.quadratic import quadratic
from elastane import LocalBatch, Measuring
from elastane.cli.status_table import status_picture
from elastane.controller import StepController
from elastane.errors import ArgumentError, StateError
from elastane.layers import LayerNorms
from elastane.noise import MomentAverage, Moments, estimate_moments, noise_scale, total_moments
from elastane.scaling import AdaScale
from elastane.single import Stopgap, moments_of_layers

always = partial(settings, derandomize=True, deadline=None, database=None)
numbers = st.floats(-1e3, 1e3, allow_nan=False)
FLOAT64 = torch.float64


# The formula


@always()
@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=8))
def test_layers_say_what_micro_batches_of_one_sample_would(rows):
    samples = np.array(rows)
    mean = samples.mean(0)
    wanted = estimate_moments(
        weighted_sqr_norm=float((samples**2).sum()),
        mean_sqr_norm=float(mean @ mean),
        batch_samples=len(rows),
        num_gradients=len(rows),
    )
    found = moments_of_layers(
        [float((samples**2).sum())], [float(mean @ mean)], batch_samples=len(rows)
    )
    assert found == [wanted]
    assert found[0].variance == pytest.approx(samples.var(0, ddof=1).sum(), rel=1e-9, abs=1e-6)


def test_layers_are_unbiased():
    draws, batch, generator = 4_000, 5, np.random.default_rng(0)
    mean, deviation = np.array([1.0, -0.5, 2.0]), np.array([0.5, 3.0, 1.0])
    samples = mean + generator.normal(size=(draws, batch, 3)) * deviation
    means = samples.mean(1)
    found = [
        moments_of_layers([float(a)], [float(b)], batch_samples=batch)[0]
        for a, b in zip((samples**2).sum((1, 2)), (means**2).sum(1), strict=True)
    ]
    for values, truth in (
        ([one.variance for one in found], float(deviation @ deviation)),
        ([one.sqr_norm for one in found], float(mean @ mean)),
    ):
        assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(draws) < 0.06 * truth


def test_a_group_without_such_layers_takes_the_sum_over_the_others():
    found = moments_of_layers([8.0, None, 6.0], [2.0, 0.0, 1.0], batch_samples=2)
    assert found[1] == total_moments([found[0], found[2]])
    assert moments_of_layers([None, None], [0.0, 0.0], batch_samples=2) is None
    assert moments_of_layers([8.0], [8.0], batch_samples=1) is None


# Norms of samples


def told_by(model, inputs, *, loss_scale=1.0, forward=None):
    """Return the two sums of the model's one group, from one backward."""
    layers = LayerNorms(model)
    with layers.watching():
        layers.begin(len(inputs))
        model.zero_grad()
        output = (forward or model)(inputs)
        (output.square().flatten(1).sum(1).mean() * loss_scale).backward()
        told = layers.told(
            [list(model.parameters())], loss_scale=loss_scale, scale_of_gradients=loss_scale
        )
    return [float(value) for value in told], layers


def by_autograd(model, inputs, names):
    """Return the same sums from one backward a sample, over the parameters of these names."""
    parameters = [one for name, one in model.named_parameters() if name in names]
    rows = []
    for number in range(len(inputs)):
        loss = model(inputs[number : number + 1]).square().flatten(1).sum(1).mean()
        parts = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    samples = torch.stack(rows)
    return [float(samples.square().sum()), float(samples.mean(0).square().sum())]


def seeded(build, *, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        for parameter in model.parameters():  # norms start with ones and zeros
            nn.init.normal_(parameter, std=0.7)
        return model.to(FLOAT64)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=FLOAT64)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (6, 4), None),
    "without bias": (lambda: nn.Sequential(nn.Linear(4, 3, bias=False)), (6, 4), None),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5)), (6, 7, 4), {"0.bias"}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3)), (6, 2, 5, 5), {"0.bias"}),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Tanh()), (6, 7, 4), None),
    "layer norm on a matrix": (lambda: nn.Sequential(nn.LayerNorm(4)), (6, 4), None),
    "layer norm over two": (lambda: nn.Sequential(nn.LayerNorm([7, 4])), (6, 7, 4), None),
    "norms behind a layer": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.RMSNorm(4)),
        (6, 4),
        None,
    ),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Tanh()), (6, 7, 4), None),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4)), (6, 4, 3), {"0.bias"}),
    "in place after": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        (6, 4),
        None,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_norms_of_samples_are_those_of_one_backward_a_sample(kind):
    build, shape, names = MODELS[kind]
    model, inputs = seeded(build), drawn(*shape)
    names = {name for name, _ in model.named_parameters()} if names is None else names
    wanted = by_autograd(model, inputs, names)
    found, layers = told_by(model, inputs)
    assert layers.can_tell
    assert found == pytest.approx(wanted, rel=1e-9)
    assert told_by(model, inputs, loss_scale=512.0)[0] == pytest.approx(wanted, rel=1e-9)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.once(self.twice(self.twice(inputs)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs):
        return self.last(self.once(self.first(inputs)))


class Odd(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) * self.weight.sum()


class Regrouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.once, self.folded = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, inputs):
        hidden = self.once(inputs)
        return self.folded(hidden.reshape(-1, 2)).reshape(len(inputs), -1)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Twice, {"once.weight", "once.bias"}),
        (Tied, {"first.bias", "once.weight", "once.bias"}),
        (Regrouped, {"once.weight", "once.bias"}),
        (lambda: nn.Sequential(nn.Linear(4, 4), Odd(4, 3)), {"0.weight", "0.bias"}),
    ],
)
def test_layers_that_can_not_tell_samples_apart_are_left_out(build, names):
    model, inputs = seeded(build), drawn(6, 4)
    found, _ = told_by(model, inputs)
    assert found == pytest.approx(by_autograd(model, inputs, names), rel=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_tells_the_same_of_linear_layers(reentrant):
    model, inputs = seeded(MODELS["linear"][0]), drawn(6, 4).requires_grad_()
    wanted, _ = told_by(model, inputs)
    again = partial(checkpoint, model, use_reentrant=reentrant)
    assert told_by(model, inputs, forward=again)[0] == pytest.approx(wanted, rel=1e-9)


def test_frozen_parameters_and_models_without_such_layers_tell_nothing():
    model, inputs = seeded(MODELS["linear"][0]), drawn(6, 4)
    model[0].requires_grad_(False)
    wanted = by_autograd(model, inputs, {"2.weight", "2.bias"})
    assert told_by(model, inputs)[0] == pytest.approx(wanted, rel=1e-9)
    found, layers = told_by(seeded(lambda: nn.Sequential(Odd(4, 3))), inputs)
    assert found == [0.0, 0.0]
    assert not layers.can_tell
    assert layers.moments(found, batch_samples=6) is None


def test_nothing_is_left_on_the_model_and_nothing_is_taken_unasked():
    model = seeded(MODELS["linear"][0])
    _, layers = told_by(model, drawn(6, 4))
    assert not any(module._forward_hooks for module in model.modules())
    layers.begin(0)
    assert layers.told([list(model.parameters())], loss_scale=1.0, scale_of_gradients=1.0) == ()
    assert layers.num_told == 0


def test_layers_are_hooked_from_the_first_begin_until_they_may_rest():
    model = seeded(MODELS["linear"][0])
    layers = LayerNorms(model)

    def are_hooked():
        return any(module._forward_hooks for module in model.modules())

    layers.begin(6)
    assert not are_hooked()
    with layers.watching():
        assert not are_hooked()
        for num_samples, hooked in ((0, False), (6, True), (0, True), (6, True)):
            layers.begin(num_samples)
            assert are_hooked() == hooked
        layers.rest()
        assert not are_hooked()
        layers.begin(6)
    assert not are_hooked()


def test_values_that_are_not_finite_tell_nothing():
    _, layers = told_by(seeded(MODELS["linear"][0]), drawn(6, 4))
    assert layers.moments([math.inf, 1.0], batch_samples=6) is None
    assert layers.moments([2.0, math.nan], batch_samples=6) is None
    assert layers.moments([12.0, 1.0], batch_samples=6) is not None


# The handover


def controller(**measuring):
    return StepController(
        AdaScale(),
        base_batch_size=16,
        num_steps=1000,
        compensation=None,
        measuring=Measuring(**measuring),
    )


def decide(one, moments, *, single=False):
    samples = None if moments is None else [moments]
    return one.decide(samples, batch_samples=48, nominal_samples=48, momentum=0.0, single=single)


def commit(one, moments, *, single):
    decision = decide(one, moments, single=single)
    one.commit(decision)
    return decision


ALONE, TOGETHER = Moments(variance=10.0, sqr_norm=1.0), Moments(variance=48.0, sqr_norm=1.0)


@pytest.mark.parametrize("averaging", ["debiased", "paper"])
def test_two_gradients_take_over_in_some_twenty_steps_and_without_a_jump(averaging):
    one = controller(averaging=averaging)
    for _ in range(50):
        commit(one, ALONE, single=True)
    found = [commit(one, TOGETHER, single=False) for _ in range(61)]
    shares = [decision.single_share for decision in found]
    assert shares[:20] == pytest.approx([0.9**k for k in range(20)])
    assert shares[-1] == 0.0
    inverse = [1 / noise_scale(decision.moments) for decision in found]
    assert inverse == pytest.approx([a / 10 + (1 - a) / 48 for a in shares])
    assert found[-1].moments.variance == pytest.approx(48.0)
    gains = [decision.gain for decision in found]
    assert gains[:40] == sorted(gains[:40])  # later ones agree to the last digit but one
    assert gains[0] == pytest.approx((10 / 16 + 1) / (10 / 48 + 1))


def test_a_worker_that_is_left_alone_goes_on_from_what_two_gradients_said():
    one = controller(smoothing=0.99)
    for _ in range(500):
        commit(one, TOGETHER, single=False)
    found = [commit(one, ALONE, single=True) for _ in range(200)]
    assert found[0].single_share == 0.0
    share = 1 - 0.99**100
    assert found[100].single_share == pytest.approx(share)
    assert 1 / noise_scale(found[100].moments) == pytest.approx(share / 10 + (1 - share) / 48)


def test_steps_without_moments_leave_the_share_as_it_is():
    one = controller()
    commit(one, ALONE, single=True)
    kept = one.state_dict()["stopgaps"]
    commit(one, None, single=True)
    commit(one, None, single=False)
    assert one.state_dict()["stopgaps"] == kept
    assert decide(one, None).single_share == 1.0


def test_current_takes_a_single_gradient_of_the_step_itself():
    assert decide(controller(), ALONE, single=True).moments is None
    now = decide(controller(current=True), ALONE, single=True)
    assert (now.moments, now.single_share) == (ALONE, 1.0)


def test_a_decision_that_is_not_committed_leaves_no_trace_in_the_stopgap():
    one = controller()
    commit(one, ALONE, single=True)
    before = one.state_dict()
    decide(one, TOGETHER, single=False)
    decide(one, TOGETHER, single=True)
    assert one.state_dict() == before


@always()
@given(st.lists(st.tuples(st.booleans(), st.floats(-5, 5)), min_size=1, max_size=80))
def test_the_read_out_lies_between_what_the_samples_said(samples):
    one = controller()
    for single, value in samples:
        commit(one, Moments(variance=2.0 + single, sqr_norm=value), single=single)
    decision = decide(one, None)
    ratios = [value / (2.0 + single) for single, value in samples]
    found = decision.moments.sqr_norm / decision.moments.variance
    assert min(ratios) - 1e-9 <= found <= max(ratios) + 1e-9
    assert 0 <= decision.single_share <= 1


def test_without_noise_there_is_no_ratio_and_the_larger_share_speaks():
    quiet = Moments(variance=0.0, sqr_norm=1.0)
    stopgap = Stopgap(average=MomentAverage()).updated(quiet, smoothing=0.9, others_known=False)
    assert stopgap.blended(TOGETHER) == quiet
    for _ in range(10):
        stopgap = stopgap.faded()
    assert stopgap.blended(TOGETHER) == TOGETHER


def test_the_state_of_the_handover_comes_back_and_a_strange_one_is_refused():
    one, other = controller(), controller()
    for single in (True, True, False):
        commit(one, ALONE, single=single)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert commit(other, ALONE, single=True) == commit(one, ALONE, single=True)
    before = other.state_dict()
    for change in (
        lambda state: state["stopgaps"][0].pop("share"),
        lambda state: state["stopgaps"][0]["average"].update(averaging="paper"),
        lambda state: state.pop("stopgaps"),
        lambda state: state["stopgaps"].clear(),
    ):
        state = one.state_dict()
        change(state)
        with pytest.raises(StateError):
            other.load_state_dict(state)
        assert other.state_dict() == before


# In the session


def run(*, steps=12, loss_of=F.cross_entropy, **options):
    """Train; return the results, each step's weights and samples, and the state."""
    model, seen, results = build_model(FLOAT64), [], []
    options.setdefault("batch", LocalBatch(32))
    session, _ = build_session(model, dataset=Digits(dtype=FLOAT64), compensation=None, **options)
    with session:
        for images, labels, _ in session:
            weights = {name: one.clone() for name, one in model.state_dict().items()}
            session.backward(loss_of(session.model(images), labels))
            result = session.step()
            if result is not None:
                seen.append((weights, images, labels))
                results.append(result)
            if len(results) == steps:
                break
        return results, seen, session.state_dict()


def by_hand(seen, *, every=1):
    """Return the averaged moments before each step, from one backward a sample."""
    model, average, found = build_model(FLOAT64), MomentAverage(), []
    for step, (weights, images, labels) in enumerate(seen):
        found.append(average.read())
        if step % every:
            continue
        model.load_state_dict(weights)
        losses = F.cross_entropy(model(images), labels, reduction="none")
        rows = [
            torch.cat(
                [
                    part.reshape(-1)
                    for part in torch.autograd.grad(loss, model.parameters(), retain_graph=True)
                ]
            )
            for loss in losses
        ]
        samples = torch.stack(rows)
        sample = estimate_moments(
            weighted_sqr_norm=float(samples.square().sum()),
            mean_sqr_norm=float(samples.mean(0).square().sum()),
            batch_samples=len(rows),
            num_gradients=len(rows),
        )
        theta = max(1 - len(rows) / 8 / 1000, 0.9)
        average = average.updated(sample, smoothing=theta ** (every if step else 1))
    return found


@pytest.mark.parametrize("every", [1, 3])
def test_one_worker_with_one_micro_batch_knows_its_gain(every):
    results, seen, _ = run(measuring=Measuring(every=every))
    expected = by_hand(seen, every=every)
    assert results[0].moments is None
    assert len({one.batch_samples for one in results}) == 2  # with the epoch's short batch
    for result, moments in zip(results[1:], expected[1:], strict=True):
        assert result.moments.variance == pytest.approx(moments.variance, rel=1e-9)
        assert result.moments.sqr_norm == pytest.approx(moments.sqr_norm, rel=1e-9)
        assert (result.single_share, result.num_gradients) == (1.0, 1)
    assert results[-1].gain > 1.05


def test_two_micro_batches_tell_by_themselves():
    results, _, state = run(batch=LocalBatch(32, micro_batches=2), steps=5)
    assert [one.single_share for one in results] == [0.0] * 5
    assert state["controller"]["stopgaps"][0]["average"]["count"] == 0


def test_single_gradients_can_be_left_out_and_the_gain_stays_one_then():
    with pytest.warns(UserWarning, match="one gradient a step"):
        results, _, _ = run(measuring=Measuring(single="off"), steps=5)
    assert [one.gain for one in results] == [1.0] * 5
    assert [one.moments for one in results] == [None] * 5
    with pytest.raises(ArgumentError, match=r"single='pair'.*'layers', 'off'"):
        Measuring(single="pair")


def test_the_loss_scale_is_divided_out():
    plain, _, _ = run(steps=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)  # doubles thrice
    scaled, _, _ = run(steps=8, scaler=scaler)
    for one, other in zip(plain[1:], scaled[1:], strict=True):
        assert other.moments.variance == pytest.approx(one.moments.variance, rel=1e-9)
        assert other.moments.sqr_norm == pytest.approx(one.moments.sqr_norm, rel=1e-9)


def test_gradients_that_are_not_finite_are_left_out():
    calls = iter(range(1000))

    def sometimes_nan(outputs, labels):
        loss = F.cross_entropy(outputs, labels)
        return loss * math.nan if next(calls) in (3, 4, 7) else loss

    plain, _, _ = run(steps=9)
    broken, _, _ = run(steps=12, loss_of=sometimes_nan)
    kept = [one for one in broken if not one.skipped]
    assert len(kept) == 9
    assert [one.moments for one in kept] == [one.moments for one in plain]
    assert [one.progress for one in kept] == [one.progress for one in plain]


@pytest.mark.parametrize(("share", "shown"), [(0.3, True), (0.0, False), (None, False)])
def test_the_status_of_a_job_says_when_its_gain_is_from_single_gradients(share, shown):
    console = Console(width=100, record=True, file=StringIO())
    console.print(status_picture({"gain": 1.5, "single_share": share}))
    assert ("1.5, from single gradients" in console.export_text()) is shown


# The benchmark


def test_on_a_quadratic_layers_are_within_a_tenth_of_the_truth_in_the_median_of_twenty_seeds():
    found = [quadratic(seed, momentum=0.9, num_steps=100) for seed in range(20)]
    assert np.median([one["errors"]["layers"] for one in found]) < 0.10
    assert max(one["drift"] for one in found) < 0.01
    # What the others would have made of it: the noise of so few pairs, and no bias yet.
    assert np.median([one["errors"]["pair"] for one in found]) < 0.15


def test_a_pair_of_equal_batches_says_what_two_micro_batches_would():
    left, right = drawn(2, 50)
    product = float(left @ right)
    mean = (left + right) / 2
    wanted = estimate_moments(
        weighted_sqr_norm=8 * float(left @ left + right @ right),
        mean_sqr_norm=float(mean @ mean),
        batch_samples=16,
        num_gradients=2,
    )
    found = pair_moments(left, right, product=product, batch=8)
    assert found.variance == pytest.approx(wanted.variance)
    assert found.sqr_norm == pytest.approx(wanted.sqr_norm)


def test_a_resumed_run_goes_on_to_the_bit():
    def fresh():
        model = build_model()
        return model, *build_session(model, batch=LocalBatch(32), num_steps=60)

    _, session, _ = fresh()
    with session:
        straight = train(session)
    model, session, optimizer = fresh()
    with session:
        first = train(session, max_steps=7)
        weights = {name: one.clone() for name, one in model.state_dict().items()}
        saved = (optimizer.state_dict(), session.state_dict())
    model, session, optimizer = fresh()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved[0])
    session.load_state_dict(saved[1])
    with session:
        rest = train(session)
    assert first["gain"] + rest["gain"] == straight["gain"]
    assert torch.equal(rest["weights"], straight["weights"])
    assert max(straight["gain"]) > 1.05
