"""The stream loader and the feed: any range, from any position, by any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import random
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from elastane.batching import GlobalBatch, LocalBatch, World
from elastane.collation import batchwise
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, UnsupportedError, UsageError
from elastane.feed import Feed
from elastane.order import stream_indices
from elastane.planning import plan_step

always = partial(settings, derandomize=True, deadline=None, database=None)

RANGES = [(0, 5), (5, 9), (9, 20), (20, 21), (21, 40), (38, 44)]


class Squares(Dataset):
    """Sample i is (i, i^2)."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, float(index**2)


class Broken(Squares):
    """Sample 3 can't be read."""

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("sample 3 is broken")
        return index


class WhoLoads(Squares):
    """Sample i is the mark of the loader process that read it."""

    mark = -1

    def __getitem__(self, index):
        return WhoLoads.mark, os.getpid()


def set_mark(worker):
    WhoLoads.mark = 100 + worker


def wanted(ranges, *, size, seed=0, shuffle=True):
    return [
        stream_indices(start, stop, num_samples=size, seed=seed, shuffle=shuffle).tolist()
        for start, stop in ranges
    ]


def indices(iterator, count=None):
    return [batch[0].tolist() for batch in islice(iterator, count)]


def loader_of(dataset, **options):
    return StreamLoader(dataset, options=LoaderOptions(**options))


@pytest.fixture
def group():
    """A gloo group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def no_process_left():
    """Whatever loader processes a test starts have ended with it."""
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.join(timeout=10)
    assert not [process for process in left if process.is_alive()]


# Ranges


@always(max_examples=150)
@given(
    size=st.integers(1, 60),
    seed=st.integers(-5, 5),
    shuffle=st.booleans(),
    ranges=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 30)).map(lambda r: (r[0], sum(r))),
        max_size=6,
    ),
)
def test_reading_is_indexing_the_dataset_in_the_streams_order(size, seed, shuffle, ranges):
    loader = loader_of(Squares(size), seed=seed, shuffle=shuffle)
    assert loader.num_samples == size
    batches = list(loader.read(ranges))
    assert [batch[0].tolist() for batch in batches] == wanted(
        ranges, size=size, seed=seed, shuffle=shuffle
    )
    for index, square in batches:
        assert torch.equal(square, index.double() ** 2)


def test_endless_ranges_are_read_as_far_as_asked():
    def endless():
        start = 0
        while True:
            yield start, start + 3
            start += 3

    iterator = loader_of(Squares(7)).read(endless())
    assert indices(iterator, 5) == wanted([(i, i + 3) for i in range(0, 15, 3)], size=7)


def test_where_the_next_range_cannot_be_had_those_before_it_come_first():
    def ends():
        yield from [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
        raise RuntimeError("no more of them")

    iterator = loader_of(Squares(20), shuffle=False).read(ends())
    assert indices(iterator, 5) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    with pytest.raises(RuntimeError, match="no more of them"):
        next(iterator)


def test_few_ranges_are_dealt_ahead_at_first_and_never_many():
    taken = []

    def counted():
        for start in range(0, 10**6, 3):
            taken.append(start)
            yield start, start + 3

    iterator = loader_of(Squares(100)).read(counted())
    next(iterator)
    assert len(taken) == 1
    for number in range(1_000):
        next(iterator)
        assert len(taken) <= min(2 * number + 3, number + 2 + 256)


def test_batches_are_collated_as_the_user_says():
    loader = loader_of(Squares(9), shuffle=False, collate_fn=lambda samples: samples[::-1])
    assert list(loader.read([(2, 4)])) == [[(3, 9.0), (2, 4.0)]]


def test_any_sized_sequence_is_a_dataset():
    tensors = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    (batch,) = loader_of(tensors, shuffle=False).read([(4, 8)])
    assert [column.tolist() for column in batch] == [[4, 5, 0, 1], [8, 10, 0, 2]]
    (batch,) = loader_of(["a", "b", "c"], shuffle=False).read([(1, 3)])
    assert batch == ["b", "c"]


def same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


class InOneGo(Squares):
    """Samples can be had by several."""

    def __getitems__(self, places):
        return [(place, float(place**2), "all at once") for place in places]


TENSORS = TensorDataset(
    torch.randn(12, 3, 2).transpose(1, 2),
    torch.arange(12, dtype=torch.int16),
    torch.randn(12, 2, dtype=torch.complex64),
    torch.arange(12) % 2 == 0,
    torch.empty(12, 0, dtype=torch.bfloat16),
)


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        TensorDataset(torch.arange(12.0)),
        Subset(TENSORS, [3, 1, 4, 5, 9, 2, 6, 0]),
        Squares(12),
        InOneGo(12),
        [{"text": "a", "number": 1}, {"text": "b", "number": 2}],
    ],
    ids=["tensors", "one tensor", "subset", "own", "several at once", "mappings"],
)
@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.processes)], ids=["here", "process"]
)
@pytest.mark.usefixtures("no_process_left")
def test_batches_are_those_of_a_plain_data_loader(dataset, num_workers):
    loader = loader_of(dataset, num_workers=num_workers)
    batches = wanted(RANGES, size=len(dataset), seed=0)
    plain = DataLoader(dataset, batch_sampler=batches)
    for found, expected in zip(loader.read(RANGES), plain, strict=True):
        same(found, expected)
    loader.close()


def test_rows_of_tensors_are_taken_at_once_and_only_where_nobody_would_see():
    class Augmented(TensorDataset):
        """What it gives is no row."""

    assert batchwise(TENSORS, None)[0] is not TENSORS
    assert batchwise(TENSORS, default_collate) == (TENSORS, default_collate)
    for other in (
        Augmented(*TENSORS.tensors),
        Squares(12),
        TensorDataset(torch.nn.Parameter(torch.zeros(4))),
        TensorDataset(torch.eye(4).to_sparse()),
    ):
        assert batchwise(other, None) == (other, None)


def test_collation_that_the_user_has_changed_is_kept_to(monkeypatch):
    def count(batch, *, collate_fn_map):  # noqa: ARG001
        return len(batch)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, count)
    assert list(loader_of(TENSORS).read([(0, 3)])) == [[3] * 5]


def test_gradients_reach_tensors_that_are_a_dataset():
    rows = torch.zeros(5, 2, requires_grad=True)
    (batch,) = loader_of(TensorDataset(rows), shuffle=False).read([(1, 3)])
    batch[0].sum().backward()
    assert rows.grad[:, 0].tolist() == [0, 1, 1, 0, 0]


def test_reading_anew_from_any_position_gives_the_same():
    loader = loader_of(Squares(17))
    whole = indices(loader.read(RANGES))
    for first in range(len(RANGES)):
        iterator = loader.read(RANGES[first:])
        next(iterator)
        assert indices(loader.read(RANGES[first:])) == whole[first:]


# Loader processes


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_forked_loader_processes_read_the_same_in_the_same_order(num_workers):
    loader = loader_of(Squares(17), seed=3, num_workers=num_workers)
    assert indices(loader.read(RANGES)) == wanted(RANGES, size=17, seed=3)
    kinds = {type(process).__name__ for process in multiprocessing.active_children()}
    assert kinds == {"ForkProcess"}
    assert len(multiprocessing.active_children()) == num_workers
    loader.close()


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left", "group")
def test_with_a_group_open_the_fork_server_starts_them():
    """A forked process would hold the group's sockets: a death is then noticed after seconds."""
    loader = loader_of(Squares(17), num_workers=2)
    assert indices(loader.read(RANGES)) == wanted(RANGES, size=17)
    kinds = {type(process).__name__ for process in multiprocessing.active_children()}
    assert kinds == {"ForkServerProcess"}
    assert indices(loader.read(RANGES[2:])) == wanted(RANGES[2:], size=17)
    loader.close()


@pytest.mark.usefixtures("group")
def test_forking_while_a_group_is_open_is_refused():
    with pytest.raises(UsageError, match="forkserver"):
        loader_of(Squares(4), num_workers=1, start_method="fork").read([(0, 4)])


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("consumed", [0, 1, 4])
def test_reading_anew_drops_what_was_read_ahead_and_keeps_the_processes(num_workers, consumed):
    loader = loader_of(Squares(17), num_workers=num_workers, prefetch_factor=3)
    iterator = loader.read([(i, i + 2) for i in range(0, 200, 2)])
    indices(iterator, consumed)
    before = {process.pid for process in multiprocessing.active_children()}
    del iterator
    for first in (3, 0, 5):
        assert indices(loader.read(RANGES[first:])) == wanted(RANGES[first:], size=17)
    assert {process.pid for process in multiprocessing.active_children()} == before
    loader.close()


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left")
def test_each_loader_process_runs_the_users_initialisation():
    loader = loader_of(WhoLoads(8), num_workers=2, worker_init_fn=set_mark)
    marks, pids = zip(*loader.read([(i, i + 2) for i in range(0, 8, 2)]), strict=True)
    assert {int(mark) for batch in marks for mark in batch} == {100, 101}
    assert os.getpid() not in {int(pid) for batch in pids for pid in batch}
    loader.close()


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left")
def test_closing_ends_the_processes_also_while_an_iterator_is_held():
    loader = loader_of(Squares(17), num_workers=2)
    iterator = loader.read(RANGES)
    next(iterator)
    started = multiprocessing.active_children()
    assert len(started) == 2
    loader.close()
    for process in started:
        process.join(timeout=10)
    assert not [process for process in started if process.is_alive()]
    loader.close()
    assert indices(loader.read(RANGES)) == wanted(RANGES, size=17)
    loader.close()


@pytest.mark.processes
@pytest.mark.usefixtures("no_process_left")
def test_a_sample_that_raises_is_raised_here_and_closing_still_ends_the_processes():
    loader = loader_of(Broken(8), num_workers=1, shuffle=False)
    with pytest.raises(KeyError, match="sample 3 is broken") as caught:
        list(loader.read([(0, 2), (2, 4), (4, 6)]))
    assert [batch.tolist() for batch in loader.read([(4, 6)])] == [[4, 5]]
    started = multiprocessing.active_children()
    loader.close()
    for process in started:
        process.join(timeout=10)
    assert not [process for process in started if process.is_alive()]
    assert caught.value is not None  # kept, with all the frames that it holds


@pytest.mark.parametrize(
    "policy",
    [
        GlobalBatch(32, micro_batches=7),
        GlobalBatch(40, max_micro_batch=4, shares=(4, 2, 1)),
        LocalBatch(12, micro_batches=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("position", [0, 40, 96])
def test_workers_that_are_cut_further_make_as_many_micro_batches_of_their_own_samples(
    policy, position
):
    plans = [
        [
            feed_of(130, policy=policy, rank=rank, world_size=3, in_step=in_step).plan(position)
            for rank in range(3)
        ]
        for in_step in (None, "cut")
    ]
    counts = [[len(plan.micro_batches) for plan in each] for each in plans]
    assert counts[1] == [max(counts[0])] * 3
    for uneven, leveled in zip(*plans, strict=True):
        assert leveled.micro_batches[0].start == uneven.micro_batches[0].start
        assert leveled.micro_batches[-1].stop == uneven.micro_batches[-1].stop
        assert sum(m.weight for m in leveled.micro_batches) == sum(
            m.weight for m in uneven.micro_batches
        )


@pytest.mark.parametrize(
    "policy",
    [GlobalBatch(2, allow_idle_workers=True), GlobalBatch(9, max_micro_batch=2, shares=(6, 1, 1))],
    ids=["a worker without samples", "a worker with fewer samples than micro-batches"],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_workers_that_can_not_be_cut_further_are_refused_on_each_of_them(policy, rank):
    with pytest.raises(UnsupportedError, match="SyncBatchNorm wants as many micro-batches"):
        feed_of(policy=policy, rank=rank, world_size=3, in_step="cut")


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.processes)], ids=["here", "process"]
)
def test_neither_building_nor_reading_moves_the_global_generators(num_workers):
    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    torch.manual_seed(5)
    before = state()
    loader = loader_of(Squares(17), num_workers=num_workers)
    for _ in range(2):
        list(loader.read(RANGES))
    loader.close()
    assert state() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_pinned_where_asked():
    (batch,) = loader_of(Squares(4), pin_memory=True).read([(0, 4)])
    assert batch[0].is_pinned()


# Refused


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class WithoutLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "error", "match"),
    [
        (Endless(), UnsupportedError, r"Endless.*__getitem__ and __len__"),
        (DataLoader([1, 2, 3]), UnsupportedError, "pass the dataset itself"),
        (WithoutLength(), ArgumentError, "__len__"),
        ([], ArgumentError, "is empty"),
        (None, ArgumentError, "dataset=None"),
    ],
    ids=["iterable", "DataLoader", "no length", "empty", "None"],
)
def test_datasets_that_cannot_be_dealt_are_refused_with_the_way_out(dataset, error, match):
    with pytest.raises(error, match=match):
        loader_of(dataset)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 1.0}, "num_workers=1.0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"start_method": "thread"}, "start_method='thread'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        LoaderOptions(**options)


# The feed


def feed_of(size=23, *, policy=None, rank=0, world_size=1, min_samples=1, in_step=None, **options):
    return Feed(
        Squares(size),
        options=LoaderOptions(**options),
        policy=policy or LocalBatch(4, micro_batches=2),
        world=World(rank=rank, world_size=world_size),
        most_workers=world_size,
        loader_number=rank,
        min_samples=min_samples,
        in_step=in_step,
    )


def feed_steps(feed, position, num_steps):
    """Return (positions, indices) of the micro-batches of some steps, and where they end."""
    seen = []
    for _ in range(num_steps):
        plan = feed.plan(position)
        for micro_batch, batch in feed.window(plan):
            seen.append((micro_batch.start, micro_batch.stop, batch[0].tolist()))
        position = plan.stop
    return seen, position


def check_steps(seen, size):
    for start, stop, found in seen:
        assert found == stream_indices(start, stop, num_samples=size, seed=0).tolist()


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.processes)], ids=["here", "processes"]
)
@pytest.mark.usefixtures("no_process_left")
def test_the_feed_pairs_each_micro_batch_with_its_samples_from_any_position(num_workers):
    feed = feed_of(num_workers=num_workers)
    assert feed.num_samples == 23
    feed.start(0)
    seen, position = feed_steps(feed, 0, 8)
    check_steps(seen, 23)
    assert [(a, b) for a, b, _ in seen[:4]] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    again, _ = feed_steps(feed, 8, 3)
    assert again == seen[4:10]
    onward, _ = feed_steps(feed, position, 2)
    check_steps(onward, 23)
    feed.close()
    after, _ = feed_steps(feed, 0, 2)
    assert after == seen[:4]
    feed.close()


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.processes)], ids=["here", "process"]
)
@pytest.mark.usefixtures("no_process_left")
def test_a_window_that_was_left_in_the_middle_is_read_again_whole(num_workers):
    feed = feed_of(num_workers=num_workers)
    for _ in range(2):
        window = feed.window(feed.plan(4))
        _, batch = next(window)
        assert batch[0].tolist() == stream_indices(4, 6, num_samples=23, seed=0).tolist()
        window.close()
    seen, _ = feed_steps(feed, 4, 2)
    check_steps(seen, 23)
    assert [(a, b) for a, b, _ in seen] == [(4, 6), (6, 8), (8, 10), (10, 12)]
    feed.close()


def test_steps_that_were_read_ahead_are_known_and_planned_anew_for_another_place(monkeypatch):
    planned = []
    monkeypatch.setattr(
        "elastane.feed.plan_step",
        lambda *given, position, **options: (
            planned.append(position) or plan_step(*given, position=position, **options)
        ),
    )
    feed = feed_of(policy=LocalBatch(2), world_size=2)
    planned.clear()
    _, position = feed_steps(feed, 0, 40)
    assert len(planned) - len(set(planned)) == 6  # the first of 1, 2, 4, 8, 16, 32 that are dealt
    ahead = feed.plan(position)
    assert feed.plan(position) is ahead
    feed.reset(World(rank=1, world_size=2))
    other = feed.plan(position)
    assert other.micro_batches[0].start == ahead.micro_batches[0].stop
    seen, _ = feed_steps(feed, position, 2)
    check_steps(seen, 23)
    assert seen[0][0] == other.micro_batches[0].start


class Growing:
    """A policy that comes to another batch while others have been read ahead."""

    samples = 2

    def batch_samples(self, world_size):
        return self.samples * world_size

    def num_parts(self, world_size):
        return world_size

    def deal(self, start, stop, *, world, min_samples):
        return LocalBatch(self.samples).deal(start, stop, world=world, min_samples=min_samples)


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.processes)], ids=["here", "processes"]
)
@pytest.mark.usefixtures("no_process_left")
def test_a_policy_that_changes_is_followed_at_the_next_step(num_workers):
    policy = Growing()
    feed = feed_of(101, policy=policy, num_workers=num_workers)
    for samples in (2, 5, 3):
        policy.samples = samples
        position = 10 * samples
        seen, _ = feed_steps(feed, position, 10)
        check_steps(seen, 101)
        assert [stop - start for start, stop, _ in seen] == [samples] * 10
    seen, position = [], 0
    for samples in (2, 2, 2, 7, 7, 1):
        policy.samples = samples
        some, position = feed_steps(feed, position, 1)
        seen += some
    check_steps(seen, 101)
    assert [stop - start for start, stop, _ in seen] == [2, 2, 2, 7, 7, 1]
    feed.close()


def test_the_feeds_of_all_workers_together_see_each_sample_once():
    policy, world_size = GlobalBatch(8, max_micro_batch=2), 3
    feeds = [feed_of(policy=policy, rank=rank, world_size=world_size) for rank in range(3)]
    seen = [
        index
        for feed in feeds
        for _, stop, found in feed_steps(feed, 0, 3)[0]
        for index in found
        if stop <= 23
    ]
    assert sorted(seen) == list(range(23))


def test_a_dataset_with_too_few_samples_for_the_workers_is_refused():
    with pytest.raises(ArgumentError, match=r"len\(dataset\)=5: fewer samples than the 6"):
        feed_of(5, world_size=3, min_samples=2)
    assert feed_of(6, world_size=3, min_samples=2).num_samples == 6


def test_a_policy_that_does_not_fit_the_workers_is_refused_at_once():
    with pytest.raises(ArgumentError, match="fewer than the 3 workers"):
        feed_of(policy=GlobalBatch(2), world_size=3)
