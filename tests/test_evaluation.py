"""Evaluation: each sample once, exact sums, and the model as it was."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from elastane.batching import World
from elastane.data import LoaderOptions
from elastane.errors import ArgumentError
from elastane.evaluation import Evaluation, evaluate

always = partial(settings, derandomize=True, deadline=None, database=None)


def numbers(size):
    return TensorDataset(torch.arange(size, dtype=torch.float64))


def evaluated(function, *, model=None, dataset=None, batch_size=4, world=World(), **options):  # noqa: B008
    return evaluate(
        function,
        model=model or nn.Linear(1, 1),
        dataset=dataset or numbers(10),
        options=LoaderOptions(**options),
        batch_size=batch_size,
        world=world,
        peers=None,
    )


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


# BC-53
@always(max_examples=120)
@given(size=st.integers(1, 60), batch_size=st.integers(1, 70), world_size=st.integers(1, 7))
def test_every_sample_is_seen_once_by_all_workers_together(size, batch_size, world_size):
    seen, totals = [], {"sum": 0.0, "squares": 0.0}
    for rank in range(world_size):
        own = []

        def function(_, batch, own=own):
            (values,) = batch
            assert 1 <= len(values) <= batch_size
            own.extend(values.int().tolist())
            return {"squares": values.square().sum(), "sum": float(values.sum())}

        world = World(rank=rank, world_size=world_size)
        result = evaluated(function, dataset=numbers(size), batch_size=batch_size, world=world)
        assert result.num_samples == size
        assert set(result.sums) == set(totals)
        totals = {name: totals[name] + result.sums[name] for name in totals}
        if rank < size:
            seen += own
        else:
            assert own == [0]  # a worker without samples learns the names from a repeated one
    assert seen == list(range(size))
    assert totals == {"sum": size * (size - 1) / 2, "squares": sum(n**2 for n in range(size))}


def test_a_worker_without_samples_adds_nothing_even_where_the_first_sample_is_infinite():
    world = World(rank=2, world_size=3)
    result = evaluated(lambda *_: {"loss": math.inf}, dataset=numbers(2), world=world)
    assert result.sums == {"loss": 0.0}


def test_the_batches_are_the_dataset_in_its_own_order_with_a_short_last_one():
    batches = []

    def function(_, batch):
        batches.append(batch[0].tolist())
        return {"count": len(batch[0])}

    result = evaluated(function, batch_size=4, shuffle=True, seed=3, num_workers=2)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert result.sums == {"count": 10.0}
    assert result.mean("count") == 1.0
    assert result.seconds >= 0


def test_sums_are_added_up_in_float64():
    tenth = torch.tensor(0.1, dtype=torch.float32)
    result = evaluated(lambda *_: {"x": tenth}, dataset=numbers(1000), batch_size=1)
    assert result.sums["x"] == pytest.approx(1000 * float(tenth), rel=1e-13)


def test_quantities_may_be_integers_booleans_and_tensors_of_one_element():
    result = evaluated(
        lambda _, batch: {
            "int": 1,
            "bool": torch.tensor(True),
            "long": (batch[0] > 4).sum(),
            "shaped": batch[0].sum().reshape(1, 1),
        }
    )
    assert result.sums == {"int": 3.0, "bool": 3.0, "long": 5.0, "shaped": 45.0}


def test_the_users_collation_is_kept():
    result = evaluated(lambda _, batch: {"sum": sum(batch)}, collate_fn=lambda s: [x[0] for x in s])
    assert result.sums == {"sum": 45.0}


def mixed_model():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5)))
    model[1].eval()
    return model.double()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_evaluates_without_gradients_and_comes_back_as_it_was(training):
    model = mixed_model()
    model.training = training
    before = modes(model)
    parameters = {name: value.clone() for name, value in model.state_dict().items()}

    def function(given, batch):
        assert given is model
        assert not any(modes(model).values())
        assert not torch.is_grad_enabled()
        return {"sum": given(batch[0][:, None]).sum()}

    first = evaluated(function, model=model)
    assert evaluated(function, model=model).sums == first.sums
    assert modes(model) == before
    assert any(before.values())
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())


def test_modes_and_gradients_are_restored_when_the_function_raises():
    model = mixed_model()
    before = modes(model)

    def function(*_):
        raise KeyError("from the function")

    with pytest.raises(KeyError, match="from the function"):
        evaluated(function, model=model)
    assert modes(model) == before
    assert torch.is_grad_enabled()


def test_the_global_generator_stays_where_it_was():
    model = nn.Linear(1, 1)
    before = torch.get_rng_state()
    evaluated(lambda _, batch: {"sum": batch[0].sum()}, model=model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_a_batch_size_that_makes_no_sense_is_refused(batch_size):
    with pytest.raises(ArgumentError, match="batch_size="):
        evaluated(lambda *_: {}, batch_size=batch_size)


def test_a_function_that_returns_nothing_is_refused_with_the_way_out():
    with pytest.raises(ArgumentError, match="sum"):
        evaluated(lambda *_: {})


def test_means_are_over_the_whole_dataset():
    result = Evaluation(sums={"correct": 30.0}, num_samples=40, seconds=1.0)
    assert result.mean("correct") == 0.75
