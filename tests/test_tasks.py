"""The tasks of the tables that need no scenes: their data, losses and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.tasks import load_task
from benchmarks.tasks.schedules import cosine
from benchmarks.tasks.speech import SpokenStrings, collate, decode, edit_distance
from benchmarks.tasks.speech import build as build_recogniser
from benchmarks.tasks.task import Data, Task
from benchmarks.tasks.translation import BEGIN, LOSS_WORDS, read_pairs
from benchmarks.tasks.translation import build as build_translator
from benchmarks.tasks.verses import aligned_parts, vocabulary
from examples.digits.data import NUM_TRAIN

SHORTEST = 6  # frames of a recording
NAMES = ("fashion", "mnist", "speech", "translation", "language")


def task_named(name: str) -> Task:
    task = load_task(name)
    reason = task.missing()
    if reason is not None:
        pytest.skip(reason)
    return task


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> Task:
    return task_named(request.param)


def batch_of(data: Data, indices: Iterable[int]) -> Any:
    train: Any = data.train
    loader = DataLoader(
        Subset(train, list(indices)),
        batch_size=len(train),
        collate_fn=data.collate,
        generator=torch.Generator(),
    )
    return next(iter(loader))


def small(data: Data) -> Data:
    validation: Any = data.validation
    return Data(train=data.train, validation=Subset(validation, range(40)), collate=data.collate)


def test_the_loss_of_two_halves_averages_to_the_loss_of_the_whole(task: Task) -> None:
    data = task.load(True)
    torch.manual_seed(0)
    # In evaluation mode, for BatchNorm takes its statistics from the batch: a half has others.
    model = task.build().eval()
    parts = [range(8), range(4), range(4, 8)]
    whole, *halves = (task.loss(model, batch_of(data, part)).item() for part in parts)
    assert sum(halves) / 2 == pytest.approx(whole, rel=1e-5)


def test_evaluation_gives_metric_and_loss_and_leaves_the_model_in_training_mode(
    task: Task,
) -> None:
    torch.manual_seed(0)
    model = task.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    result = task.evaluate(model, small(task.load(True)))
    assert {task.metric, "loss"} <= result.keys()
    assert all(isinstance(value, float) for value in result.values())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_two_builds_with_one_seed_are_equal_and_with_another_are_not(task: Task) -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(torch.nn.utils.parameters_to_vector(task.build().parameters()))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_a_few_base_steps_lower_the_loss(task: Task) -> None:
    data, recipe = task.load(True), task.quick_recipe
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    batch = batch_of(data, range(recipe.base_batch_size))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_only_the_length_differs_between_a_recipe_and_its_quick_form(task: Task) -> None:
    assert task.quick_recipe.num_steps < task.recipe.num_steps
    for name in ("base_batch_size", "lr", "momentum", "weight_decay", "schedule"):
        assert getattr(task.quick_recipe, name) == getattr(task.recipe, name)


def test_a_batch_of_64_base_batches_fits_into_an_epoch(task: Task) -> None:
    train: Any = task.load(False).train
    assert len(train) >= 64 * task.recipe.base_batch_size


def test_no_picture_of_mnist_is_on_both_sides() -> None:
    data = task_named("mnist").load(False)
    train, validation = pixels(data.train), pixels(data.validation)
    assert (len(train), len(validation)) == (NUM_TRAIN, 1_000)
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in validation}


def test_no_picture_of_fashion_mnist_is_on_both_sides() -> None:
    data = task_named("fashion").load(False)
    train, validation = pixels(data.train), pixels(data.validation)
    assert (len(train), len(validation)) == (60_000, 10_000)
    both = {row.tobytes() for row in train} & {row.tobytes() for row in validation}
    assert not both


def pixels(dataset: Any) -> Any:
    assert isinstance(dataset, TensorDataset)
    return dataset.tensors[0].numpy()


def test_no_recording_is_on_both_sides() -> None:
    data = task_named("speech").load(False)
    train, validation = (recordings(side) for side in (data.train, data.validation))
    assert len(train) > 2_000
    assert len(validation) > 500
    assert not train & validation


def recordings(dataset: Any) -> set[int]:
    assert isinstance(dataset, SpokenStrings)
    return set(itertools.chain.from_iterable(dataset.strings))


def test_no_verse_and_no_pair_of_sentences_is_on_both_sides() -> None:
    task_named("translation")
    train, validation = read_pairs()
    assert len(train) > 10_000
    assert len(validation) > 500
    assert not {pair.verse for pair in train} & {pair.verse for pair in validation}
    sides = [{(pair.english, pair.spanish) for pair in side} for side in (train, validation)]
    assert not sides[0] & sides[1]


def test_the_constant_under_the_losses_of_sentences_is_their_mean_length() -> None:
    train: Any = task_named("translation").load(False).train
    assert (train.tensors[1] > BEGIN).sum().item() / len(train) == pytest.approx(
        LOSS_WORDS, abs=0.005
    )


def test_a_translation_does_not_see_the_words_that_it_has_to_give() -> None:
    torch.manual_seed(0)
    model = build_translator().eval()
    source, target = torch.tensor([[5, 6, 0]]), torch.tensor([[BEGIN, 7, 8, 9]])
    other = torch.tensor([[BEGIN, 7, 8, 10]])
    logits, others = model(source, target), model(source, other)
    torch.testing.assert_close(logits[:, :3], others[:, :3])
    assert not torch.allclose(logits[:, 3], others[:, 3])
    padded = torch.tensor([[5, 6, 0, 0, 0]])
    torch.testing.assert_close(model(padded, target), logits)


def test_parts_of_verses_are_pairs_only_where_both_sides_have_as_many() -> None:
    english = ["In the beginning. And God said: Amen.", "One; two.", "Amen."]
    spanish = ["EN el principio; y dijo Dios. Am\u00e9n.", "Uno.", "Am\u00e9n."]
    pairs = aligned_parts(english, spanish, max_words=3)
    assert [(pair.verse, pair.english, pair.spanish) for pair in pairs] == [
        (0, ("in", "the", "beginning"), ("en", "el", "principio")),
        (0, ("and", "god", "said"), ("y", "dijo", "dios")),
        (0, ("amen",), ("am\u00e9n",)),
    ]


def test_a_vocabulary_numbers_the_most_frequent_words() -> None:
    sentences = [("b", "a"), ("b", "c", "b"), ("a",)]
    assert vocabulary(sentences, size=2, first=4) == {"b": 4, "a": 5}


def test_edits_are_counted() -> None:
    assert edit_distance([1, 2, 3], [1, 2, 3]) == 0
    assert edit_distance([], [1, 2]) == 2
    assert edit_distance([1, 2, 3], [2, 3, 4]) == 2
    assert edit_distance([3, 1, 4, 1, 5], [3, 1, 1, 6]) == 2


def test_what_a_best_path_says_has_neither_repetitions_nor_blanks() -> None:
    assert decode([0, 3, 3, 0, 3, 4, 4, 0]) == [3, 3, 4]
    assert decode([5, 5]) == [5]
    assert decode([0, 0]) == []


def test_a_string_sounds_the_same_beside_a_longer_one() -> None:
    torch.manual_seed(0)
    model = build_recogniser().eval()
    short, long = torch.randn(7, 13), torch.randn(20, 13)
    symbols = torch.tensor([1, 2])
    alone, _ = model(*collate([(short, symbols)])[:2])
    beside, lengths = model(*collate([(long, symbols), (short, symbols)])[:2])
    assert lengths.tolist() == [7, 3]
    torch.testing.assert_close(beside[1, :3], alone[0])


def test_even_five_times_the_shortest_recording_has_room_for_its_symbols() -> None:
    task = task_named("speech")
    data: Any = task.load(True)
    shortest = min(len(frames) for side in (data.train, data.validation) for frames, _ in side)
    assert shortest >= 3 * SHORTEST
    torch.manual_seed(0)
    string = torch.randn(5 * SHORTEST, 13), torch.tensor([7] * 5)
    assert task.loss(build_recogniser(), collate([string])).isfinite()


def test_the_cosine_falls_from_one_to_zero_and_stays_there() -> None:
    assert [cosine(part) for part in (0, 0.5, 1, 1.5)] == pytest.approx([1, 0.5, 0, 0])
