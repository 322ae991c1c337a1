"""The average of weights against torch's own at the base batch, and its memory at any other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import build_model, build_session, weights_of

from elastane import LocalBatch, WeightAverage
from elastane.averaging import averaging_weight
from elastane.errors import ArgumentError, StateError


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's result, as far as the average looks at it."""

    position: int
    batch_samples: int = 8
    scale: float = 1.0
    progress: float = 0.0


def walk(model, *, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)


def test_at_the_base_batch_it_is_torchs_moving_average():
    model = build_model()
    own = WeightAverage(model, decay=0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(5):
        walk(model, seed=number)
        own.update(Step(position=8 * (number + 1)))
        theirs.update_parameters(model)
    for one, other in zip(own.weights.values(), theirs.module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_step_of_four_base_batches_forgets_as_much_as_four_steps():
    averages = []
    for scale in (1, 4):
        model = build_model()
        average = WeightAverage(model, decay=0.9)
        average.update(Step(position=8))
        walk(model, seed=1)
        for number in range(4 // scale):
            position = 8 + 8 * scale * (number + 1)
            average.update(Step(position=position, batch_samples=8 * scale, scale=scale))
        averages.append(torch.cat([tensor.reshape(-1) for tensor in average.weights.values()]))
    assert torch.allclose(*averages, rtol=1e-5, atol=1e-6)
    assert averaging_weight(0.9, base_steps=4) == pytest.approx(1 - 0.9**4)


def test_memory_in_progress_forgets_by_what_a_step_was_worth():
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, decay=0.5, per="progress")
    nn.init.zeros_(model.weight)
    average.update(Step(position=8, progress=1.0))
    nn.init.ones_(model.weight)
    average.update(Step(position=40, scale=4, batch_samples=32, progress=3.0))
    assert average.weights["weight"].item() == 0.75


def test_inside_a_window_and_after_a_skipped_or_repeated_step_nothing_moves():
    model = build_model()
    average = WeightAverage(model, decay=0.9)
    average.update(Step(position=8))
    kept = {name: tensor.clone() for name, tensor in average.weights.items()}
    walk(model, seed=1)
    average.update(None)
    average.update(Step(position=8))
    assert all(torch.equal(average.weights[name], kept[name]) for name in kept)


def test_the_model_holds_the_average_inside_a_block_and_its_own_weights_after_it():
    model = build_model()
    average = WeightAverage(model, decay=0.9)
    average.update(Step(position=8))
    first = weights_of(model)
    walk(model, seed=1)
    own = weights_of(model)
    with pytest.raises(ZeroDivisionError), average.applied():
        assert torch.equal(weights_of(model), first)
        raise ZeroDivisionError
    assert torch.equal(weights_of(model), own)


def test_a_state_goes_on_and_loads_into_the_bare_model(tmp_path):
    model = build_model()
    average = WeightAverage(model, decay=0.9)
    average.update(Step(position=8))
    torch.save(average.state_dict(), tmp_path / "average")
    state = torch.load(tmp_path / "average", weights_only=True)
    walk(model, seed=1)
    other = WeightAverage(model, decay=0.9)
    other.load_state_dict(state)
    for one in (average, other):
        one.update(Step(position=16))
    assert all(torch.equal(average.weights[name], other.weights[name]) for name in other.weights)
    build_model().load_state_dict(state["weights"])


def test_weights_that_join_later_begin_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2))
    average = WeightAverage(model, decay=0.9)
    average.update(Step(position=8))
    model.append(nn.Linear(2, 2))
    average.update(Step(position=16))
    assert torch.equal(average.weights["1.weight"], model[1].weight)


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 1, "position": 8, "progress": 1.0, "weights": {"0.weight": torch.ones(2)}}],
    ids=["nothing", "another model's"],
)
def test_a_state_of_something_else_is_refused(state):
    average = WeightAverage(build_model(), decay=0.9)
    with pytest.raises(StateError, match="average"):
        average.load_state_dict(state)
    assert average.weights == {}


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ArgumentError, match="decay="):
        WeightAverage(build_model(), decay=decay)


def test_a_session_moves_it_and_keeps_it_in_its_checkpoints():
    model = build_model()
    average = WeightAverage(model, decay=0.9)
    session, _ = build_session(
        model,
        batch=LocalBatch(16, micro_batches=2),
        num_steps=5,
        schedule=None,
        stateful={"average": average},
    )
    with session:
        for images, labels, _ in session:
            session.backward(nn.functional.cross_entropy(session.model(images), labels))
            average.update(session.step())
    assert average.state_dict()["position"] == session.position
    assert not torch.equal(average.weights["0.weight"], model[0].weight)
