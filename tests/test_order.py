"""The data order: a bijection, uniform, the same for ever, and dealt without loss or repetition."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tracemalloc
from fractions import Fraction
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from elastane import order, permutation
from elastane.errors import ArgumentError
from elastane.order import batch_stop, split, stream_indices
from elastane.permutation import permute, permute_range

LEAST_P = 1e-4  # the seeds are fixed, so a test that passes once passes always

always = partial(settings, derandomize=True, deadline=None, database=None)
seeds = st.one_of(st.integers(), st.integers(min_value=-(2**200), max_value=2**200))
epochs = st.one_of(st.integers(0, 100), st.integers(0, 2**70))
small_sizes = st.integers(1, permutation._SORT_MAX_SAMPLES)
large_sizes = st.integers(permutation._SORT_MAX_SAMPLES + 1, 20_000)


# The permutation


def places_below(num_samples):
    return np.arange(num_samples, dtype=np.uint64)


@always(max_examples=150)
@given(
    num_samples=st.one_of(st.integers(1, 20), small_sizes, large_sizes), seed=seeds, epoch=epochs
)
def test_every_epoch_is_a_permutation_of_the_dataset(num_samples, seed, epoch):
    indices = permute_range(0, num_samples, num_samples=num_samples, seed=seed, epoch=epoch)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(num_samples))


@always(max_examples=150)
@given(num_samples=st.integers(1, 1000), seed=seeds, epoch=epochs)
def test_the_feistel_network_is_a_permutation_on_small_domains_too(num_samples, seed, epoch):
    keys = permutation._round_keys(seed, epoch)
    indices = permutation._feistel(places_below(num_samples), num_samples=num_samples, keys=keys)
    twins = [
        permutation._feistel_twin(place, num_samples=num_samples, keys=keys)
        for place in range(min(num_samples, 40))
    ]
    assert np.array_equal(np.sort(indices), np.arange(num_samples))
    assert indices[:40].tolist() == twins


@always(max_examples=200)
@given(
    data=st.data(),
    num_samples=st.one_of(
        small_sizes,
        large_sizes,
        st.integers(1, 2**62),
        st.integers(65, 2**31).map(lambda side: side * side),
        st.integers(65, 2**31 - 1).map(lambda side: side * side + 1),
    ),
    seed=seeds,
    epoch=epochs,
)
def test_the_fast_path_equals_its_slow_twin(data, num_samples, seed, epoch):
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, min(num_samples, start + 50)))
    options = {"num_samples": num_samples, "seed": seed, "epoch": epoch}
    fast = permute_range(start, stop, **options)
    assert fast.tolist() == [permute(index, **options) for index in range(start, stop)]


@pytest.mark.parametrize("num_samples", [40_000, 2**30 + 1, 10**12])
def test_the_fast_path_does_not_depend_on_where_it_is_cut(num_samples):
    options = {"num_samples": num_samples, "seed": 3, "epoch": 4}
    first, last = num_samples - 40_000, num_samples
    cuts = [
        first,
        first,
        first + 1,
        first + permutation._BLOCK,
        first + permutation._BLOCK + 1,
        last,
    ]
    pieces = [permute_range(begin, end, **options) for begin, end in pairwise(cuts)]
    whole = permute_range(first, last, **options)
    assert np.array_equal(np.concatenate(pieces), whole)
    for place in (0, permutation._BLOCK - 1, permutation._BLOCK, 2 * permutation._BLOCK, 39_999):
        assert whole[place] == permute(first + place, **options)


@always(max_examples=150)
@given(
    num_samples=st.one_of(st.integers(1, 60), large_sizes, st.integers(1, 2**62)),
    seed=seeds,
    shuffle=st.booleans(),
    ranges=st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 90)), min_size=1, max_size=9),
)
def test_ranges_dealt_at_once_are_those_dealt_one_by_one(num_samples, seed, shuffle, ranges):
    ranges = [(start % (4 * num_samples), size) for start, size in ranges]
    ranges = [(start, start + size) for start, size in ranges]
    options = {"num_samples": num_samples, "seed": seed, "shuffle": shuffle}
    at_once = order.indices_of_ranges(ranges, **options)
    alone = [stream_indices(start, stop, **options) for start, stop in ranges]
    assert at_once.tolist() == np.concatenate(alone).tolist()
    if shuffle:
        slow = [
            permute(
                position % num_samples,
                num_samples=num_samples,
                seed=seed,
                epoch=position // num_samples,
            )
            for start, stop in ranges[:2]
            for position in range(start, stop)
        ]
        assert at_once[: len(slow)].tolist() == slow


def test_an_epoch_of_ten_to_the_twelve_samples_is_dealt_in_little_memory():
    count, num_samples = 65_536, 10**12
    tracemalloc.start()
    try:
        indices = permute_range(10**11, 10**11 + count, num_samples=num_samples, seed=0, epoch=12)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 8 * count
    assert indices.min() >= 0
    assert indices.max() < num_samples
    assert np.unique(indices).size == count


def test_changing_a_returned_array_does_not_change_the_order():
    options = {"num_samples": 6, "seed": 0, "epoch": 0}
    before = permute_range(0, 6, **options)
    permute_range(0, 6, **options)[:] = -1
    stream_indices(0, 6, num_samples=6, seed=0)[:] = -1
    assert np.array_equal(permute_range(0, 6, **options), before)


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "start", "golden"),
    [
        (1, 0, 0, 0, [0]),
        (8, 0, 0, 0, [0, 3, 7, 1, 6, 5, 2, 4]),
        (8, 0, 1, 0, [0, 2, 4, 1, 7, 6, 3, 5]),
        (8, 1, 0, 0, [4, 3, 6, 7, 0, 5, 1, 2]),
        (8, -1, 0, 0, [1, 2, 5, 6, 7, 0, 3, 4]),
        (8, 10**30, 10**20, 0, [4, 1, 0, 6, 5, 3, 7, 2]),
        (4096, 5, 6, 4088, [2832, 260, 1457, 1827, 3870, 2465, 2998, 373]),
        (4097, 5, 6, 4089, [152, 2646, 830, 2095, 3667, 1885, 1342, 1583]),
        (60_000, 0, 3, 1000, [49576, 59734, 43205, 14431, 45922, 59717, 763, 50752]),
        (2**30 + 1, -7, 2, 2**30 - 3, [420199708, 1029390997, 1005788296, 662395826]),
        (10**12, 42, 1, 10**12 - 1000, [590827765536, 619614826591, 784530336349, 563754812003]),
        (2**62, 0, 0, 2**61, [4009344584651921844, 646378903210936771, 2816362265862045052]),
    ],
)
def test_the_order_never_changes(num_samples, seed, epoch, start, golden):
    options = {"num_samples": num_samples, "seed": seed, "epoch": epoch}
    assert permute_range(start, start + len(golden), **options).tolist() == golden
    assert [permute(start + place, **options) for place in range(len(golden))] == golden


@pytest.mark.parametrize(
    ("num_samples", "count", "golden"),
    [
        (4096, 4096, "611c4f3d11d2d228"),
        (4097, 4097, "f0ae36ef78233cbe"),
        (10**12, 65_536, "0b42a1aa80c40636"),
    ],
)
def test_the_order_never_changes_over_long_ranges(num_samples, count, golden):
    indices = permute_range(0, count, num_samples=num_samples, seed=0, epoch=0)
    assert hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=8).hexdigest() == golden


# BC-51
def test_seed_and_epoch_are_not_confused_and_neither_is_their_size_limited():
    pairs = [(1, 11), (11, 1), (1, 1), (-1, 1), (2**64 + 1, 1), (1, 2**64 + 1), (10**5000, 0)]
    orders = [
        tuple(permute_range(0, 50, num_samples=50, seed=seed, epoch=epoch).tolist())
        for seed, epoch in pairs
    ]
    assert len(set(orders)) == len(pairs)


# Its uniformity


def sorted_orders(num_samples, draws, *, seed):
    rows = [
        permute_range(0, num_samples, num_samples=num_samples, seed=seed, epoch=epoch)
        for epoch in range(draws)
    ]
    return np.stack(rows)  # (draws, num_samples)


def feistel_orders(num_samples, draws, *, seed, rounds=permutation._ROUNDS):
    rows = [
        permutation._feistel(
            places_below(num_samples),
            num_samples=num_samples,
            keys=permutation._round_keys(seed, epoch)[:rounds],
        )
        for epoch in range(draws)
    ]
    return np.stack(rows)


def positions_p(orders, *, bins):
    """Chi-square of the table (bin of the place, bin of the index).

    One uniform permutation matrix has covariance ``C x C / (n - 1)``, C the centring matrix; summed
    over blocks of m x m it is ``m**2`` times that, on ``(bins - 1)**2`` dimensions.
    """
    draws, num_samples = orders.shape
    width = num_samples // bins
    cells = np.arange(num_samples) // width * bins + orders // width
    table = np.bincount(cells.ravel(), minlength=bins**2)
    excess = table - draws * width**2 / num_samples
    chi_square = (excess**2).sum() * (num_samples - 1) / (width**2 * draws)
    return stats.chi2.sf(chi_square, (bins - 1) ** 2)


def neighbours_p(orders):
    """Chi-square of the table of adjacent pairs, all adjacent places pooled.

    The pairs of one permutation are not independent. On the tables without marginals the covariance
    of a uniform permutation's is 1 / n (symmetric part) and (n + 1) / (n (n - 1)) (antisymmetric).
    """
    draws, n = orders.shape
    cells = orders[:, :-1] * n + orders[:, 1:]
    excess = np.bincount(cells.ravel(), minlength=n * n).reshape(n, n) - draws / n
    np.fill_diagonal(excess, 0)
    odd, even = (excess - excess.T) / 2, (excess + excess.T) / 2
    marginal = odd.sum(1) / n
    odd -= marginal[:, None] - marginal
    marginal = (even.sum(1) - even.sum() / (2 * n - 2)) / (n - 2)
    even -= marginal[:, None] + marginal
    np.fill_diagonal(even, 0)
    chi_square = n * ((even**2).sum() + (odd**2).sum() * (n - 1) / (n + 1)) / draws
    return stats.chi2.sf(chi_square, n * (n - 3) // 2 + (n - 1) * (n - 2) // 2)


def binned_neighbours_p(orders, *, bins):
    """Chi-square of adjacent pairs by bins; the terms in 1 / n that `neighbours_p` has are left."""
    draws, n = orders.shape
    width = n // bins
    binned = orders // width
    cells = binned[:, :-1] * bins + binned[:, 1:]
    table = np.bincount(cells.ravel(), minlength=bins**2).reshape(bins, bins)
    excess = table - draws * width * (width - np.eye(bins)) / n
    excess -= excess.mean(0)
    excess -= excess.mean(1)[:, None]
    chi_square = (excess**2).sum() * (n - 1) / (width**2 * draws)
    return stats.chi2.sf(chi_square, (bins - 1) ** 2)


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_permutations_of_a_tiny_dataset_are_equally_likely(num_samples):
    orders = sorted_orders(num_samples, 100 * max(math.factorial(num_samples), 20), seed=0)
    weights = num_samples ** np.arange(num_samples)
    known = np.array(list(permutations(range(num_samples)))) @ weights
    codes, counts = np.unique(orders @ weights, return_counts=True)
    assert np.array_equal(codes, np.sort(known))
    assert stats.chisquare(counts).pvalue > LEAST_P


@pytest.mark.parametrize(("num_samples", "draws"), [(10, 4000), (100, 2000)])
def test_small_orders_are_uniform_in_positions_and_neighbours(num_samples, draws):
    orders = sorted_orders(num_samples, draws, seed=1)
    assert positions_p(orders, bins=num_samples) > LEAST_P
    assert neighbours_p(orders) > LEAST_P


@pytest.mark.parametrize(("num_samples", "draws"), [(10, 4000), (100, 2000)])
def test_the_feistel_network_is_uniform_in_positions_and_neighbours(num_samples, draws):
    orders = feistel_orders(num_samples, draws, seed=1)
    assert positions_p(orders, bins=num_samples) > LEAST_P
    assert neighbours_p(orders) > LEAST_P


def test_the_test_of_neighbours_finds_a_network_of_four_rounds():
    assert neighbours_p(feistel_orders(10, 1000, seed=1, rounds=4)) < LEAST_P


def test_an_order_of_ten_thousand_is_uniform_in_positions_and_neighbours():
    orders = sorted_orders(10_000, 50, seed=1)
    assert positions_p(orders, bins=50) > LEAST_P
    assert positions_p(orders, bins=100) > LEAST_P
    assert binned_neighbours_p(orders, bins=50) > LEAST_P


def test_a_slice_of_a_huge_epoch_is_uniform_over_the_dataset():
    num_samples, bins = 2**40 + 1, 256
    indices = permute_range(10**9, 10**9 + 65_536, num_samples=num_samples, seed=1, epoch=0)
    counts = np.bincount(indices * bins // num_samples, minlength=bins)
    assert stats.chisquare(counts).pvalue > LEAST_P
    steps = np.diff(indices) % num_samples * bins // num_samples
    assert stats.chisquare(np.bincount(steps, minlength=bins)).pvalue > LEAST_P


def consecutive(kind, num_samples, draws):
    options = [
        {"seed": 5, "epoch": draw} if kind == "epochs" else {"seed": draw, "epoch": 5}
        for draw in range(draws)
    ]
    rows = [permute_range(0, num_samples, num_samples=num_samples, **option) for option in options]
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["epochs", "seeds"])
@pytest.mark.parametrize("num_samples", [1000, 10_000])
def test_consecutive_orders_are_not_correlated(kind, num_samples):
    orders = consecutive(kind, num_samples, 61)
    centred = orders - orders.mean(1, keepdims=True)
    correlations = (centred[:-1] * centred[1:]).sum(1) / (centred[0] ** 2).sum()
    chi_square = (correlations**2).sum() * (num_samples - 1)
    assert stats.chi2.sf(chi_square, 60) > LEAST_P
    assert abs(correlations.sum()) * math.sqrt((num_samples - 1) / 60) < 4
    repeats = int((orders[:-1] == orders[1:]).sum())  # one a pair is expected
    assert 2 * min(stats.poisson.cdf(repeats, 60), stats.poisson.sf(repeats - 1, 60)) > LEAST_P


@pytest.mark.parametrize("kind", ["epochs", "seeds"])
def test_what_one_order_does_to_the_one_before_is_uniform(kind):
    orders = consecutive(kind, 10, 4001)
    changes = np.take_along_axis(orders[1:], np.argsort(orders[:-1], axis=1), axis=1)
    assert positions_p(changes, bins=10) > LEAST_P
    assert neighbours_p(changes) > LEAST_P


# The stream


@always(max_examples=150)
@given(
    num_samples=st.one_of(st.integers(1, 60), st.integers(4097, 4200)),
    seed=seeds,
    first_epoch=epochs,
    offset=st.integers(0, 10_000),
    count=st.integers(0, 200),
    shuffle=st.booleans(),
)
def test_a_position_is_a_place_of_an_epoch(num_samples, seed, first_epoch, offset, count, shuffle):
    start = first_epoch * num_samples + offset
    indices = stream_indices(
        start, start + count, num_samples=num_samples, seed=seed, shuffle=shuffle
    )
    places = [divmod(start + number, num_samples) for number in range(count)]
    assert indices.dtype == np.int64
    assert indices.tolist() == [
        permute(place, num_samples=num_samples, seed=seed, epoch=epoch) if shuffle else place
        for epoch, place in places
    ]


# The batch


@always(max_examples=300)
@given(
    position=st.integers(0, 2**70),
    num_samples=st.one_of(st.integers(1, 100), st.integers(1, 2**62)),
    batch_samples=st.one_of(st.integers(1, 120), st.integers(1, 2**63)),
    min_tail_samples=st.one_of(st.integers(1, 10), st.integers(1, 2**63)),
)
def test_a_batch_ends_with_its_epoch_and_leaves_no_small_tail(
    position, num_samples, batch_samples, min_tail_samples
):
    stop = batch_stop(
        position,
        num_samples=num_samples,
        batch_samples=batch_samples,
        min_tail_samples=min_tail_samples,
    )
    epoch_stop = (position // num_samples + 1) * num_samples
    tail = epoch_stop - stop
    assert position < stop <= epoch_stop
    assert tail == 0 or tail >= min_tail_samples
    needed = epoch_stop - position - batch_samples < min_tail_samples
    assert stop == (epoch_stop if needed else position + batch_samples)
    assert stop - position < batch_samples + min_tail_samples


@pytest.mark.parametrize(
    ("position", "min_tail_samples", "stop"),
    [(20, 3, 24), (23, 3, 27), (24, 3, 30), (26, 1, 30), (25, 1, 29), (25, 2, 30), (29, 3, 30)],
)
def test_only_a_tail_below_the_least_is_joined(position, min_tail_samples, stop):
    options = {"num_samples": 10, "batch_samples": 4, "min_tail_samples": min_tail_samples}
    assert batch_stop(position, **options) == stop


@always(max_examples=50)
@given(position=st.integers(0, 1000), batch_samples=st.integers(1, 100))
def test_a_batch_that_may_straddle_is_always_full(position, batch_samples):
    options = {"num_samples": 7, "batch_samples": batch_samples, "min_tail_samples": 5}
    assert batch_stop(position, **options, straddle=True) == position + batch_samples


# The split

share_lists = st.lists(
    st.one_of(
        st.integers(1, 9),
        st.integers(1, 2**70),
        st.floats(1e-300, 1e300, allow_nan=False, allow_infinity=False),
    ),
    min_size=1,
    max_size=9,
)


@always(max_examples=200)
@given(
    start=st.integers(0, 2**70),
    size=st.one_of(st.integers(0, 30), st.integers(0, 2**70)),
    parts=st.integers(1, 20),
)
def test_even_slices_tile_the_range_the_larger_first(start, size, parts):
    slices = [split(start, start + size, parts=parts, part=part) for part in range(parts)]
    sizes = [end - begin for begin, end in slices]
    assert slices[0][0] == start
    assert slices[-1][1] == start + size
    assert all(left[1] == right[0] for left, right in pairwise(slices))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@always(max_examples=200)
@given(
    start=st.integers(0, 2**70),
    size=st.one_of(st.integers(0, 30), st.integers(0, 2**70)),
    shares=share_lists,
)
def test_weighted_slices_tile_the_range_within_one_of_their_quota(start, size, shares):
    parts = len(shares)
    slices = [
        split(start, start + size, parts=parts, part=part, shares=shares) for part in range(parts)
    ]
    total = sum(Fraction(share) for share in shares)
    assert slices[0][0] == start
    assert slices[-1][1] == start + size
    assert all(left[1] == right[0] for left, right in pairwise(slices))
    for (begin, end), share in zip(slices, shares, strict=True):
        assert abs(end - begin - size * Fraction(share) / total) < 1


@always(max_examples=100)
@given(
    size=st.integers(0, 10_000),
    parts=st.integers(1, 9),
    share=st.one_of(st.integers(1, 9), st.floats(1e-300, 1e300)),
)
def test_equal_shares_split_like_no_shares(size, parts, share):
    for part in range(parts):
        weighted = split(5, 5 + size, parts=parts, part=part, shares=[share] * parts)
        assert weighted == split(5, 5 + size, parts=parts, part=part)


def test_the_largest_remainders_get_the_samples_that_are_left():
    shares = (0.47, 0.16, 0.158, 0.12, 0.061, 0.031)  # quotas 4.7 1.6 1.58 1.2 0.61 0.31
    sizes = [
        end - begin
        for begin, end in (
            split(0, 10, parts=6, part=part, shares=shares) for part in range(len(shares))
        )
    ]
    assert sizes == [5, 2, 1, 1, 1, 0]


# All together: workers come and go

changes = st.fixed_dictionaries(
    {
        "shares": st.one_of(
            st.integers(1, 9).map(lambda world_size: [None] * world_size),
            st.lists(st.integers(1, 5) | st.floats(0.01, 100), min_size=1, max_size=9),
        ),
        "batch_samples": st.integers(1, 16) | st.integers(17, 150),
        "min_samples": st.integers(1, 3),
        "steps": st.integers(1, 7),
        "breaks": st.booleans(),
    }
)


def deal(position, change, *, num_samples, seed, straddle):
    """Return where the next batch ends and what each worker gets of it."""
    world_size = len(change["shares"])
    shares = None if change["shares"][0] is None else change["shares"]
    stop = batch_stop(
        position,
        num_samples=num_samples,
        batch_samples=change["batch_samples"],
        min_tail_samples=world_size * change["min_samples"],
        straddle=straddle,
    )
    slices = [
        split(position, stop, parts=world_size, part=rank, shares=shares)
        for rank in range(world_size)
    ]
    return stop, [stream_indices(*ends, num_samples=num_samples, seed=seed) for ends in slices]


def committed_indices(script, *, first, last, num_samples, seed, straddle):
    """Play the script, over and over, from position `first` until `last` has been committed."""
    position, committed = first, []
    while True:
        for change in script:
            for step in range(change["steps"]):
                stop, dealt = deal(
                    position, change, num_samples=num_samples, seed=seed, straddle=straddle
                )
                if change["breaks"] and step == change["steps"] - 1 and len(script) > 1:
                    break  # a worker died: nothing of this batch counts, the next world takes it
                position = stop
                committed += dealt
                if position >= last:
                    return np.concatenate(committed)


# BC-48 BC-49
@always(max_examples=500)
@given(
    script=st.lists(changes, min_size=1, max_size=5).filter(
        lambda script: any(change["steps"] > 1 or not change["breaks"] for change in script)
    ),
    num_samples=st.one_of(st.integers(1, 120), st.integers(4097, 5000)),
    seed=seeds,
    first_epoch=st.integers(0, 50),
    straddle=st.booleans(),
)
def test_each_epoch_is_dealt_exactly_once_whatever_happens_to_the_workers(
    script, num_samples, seed, first_epoch, straddle
):
    num_epochs, batch_factor = (3, 1) if num_samples <= 120 else (1, 50)  # keeps the test short
    script = [
        {**change, "batch_samples": change["batch_samples"] * batch_factor} for change in script
    ]
    first = first_epoch * num_samples
    indices = committed_indices(
        script,
        first=first,
        last=first + num_epochs * num_samples,
        num_samples=num_samples,
        seed=seed,
        straddle=straddle,
    )
    assert straddle or len(indices) == num_epochs * num_samples
    for epoch in range(num_epochs):
        dealt = indices[epoch * num_samples : (epoch + 1) * num_samples]
        assert np.array_equal(np.bincount(dealt, minlength=num_samples), np.ones(num_samples))


@always(max_examples=100)
@given(
    num_samples=st.integers(1, 300),
    world_size=st.integers(1, 8),
    min_samples=st.integers(1, 3),
    extra=st.integers(0, 20),
)
def test_no_worker_of_an_even_world_gets_too_few_samples(
    num_samples, world_size, min_samples, extra
):
    least = world_size * min_samples
    num_samples += least
    position = 0
    while position < num_samples:
        stop = batch_stop(
            position,
            num_samples=num_samples,
            batch_samples=least + extra,
            min_tail_samples=least,
        )
        begin, end = split(position, stop, parts=world_size, part=world_size - 1)
        assert end - begin >= min_samples
        position = stop


# Errors

EPOCH = {"num_samples": 10, "seed": 0, "epoch": 0}
STREAM = {"num_samples": 10, "seed": 0}
BATCH = {"num_samples": 10, "batch_samples": 4}
SPLIT = {"parts": 2, "part": 0}
SAMPLES = "Pass the number of samples of the dataset as a Python int."
SEED = "Pass any Python int; int(...) converts numpy's integers and tensors."
BEYOND = "Use stream_indices for positions beyond one epoch."
BEFORE = "Pass the number of epochs before this one, 0 for the first."
FIRST = "Pass the first position of the range."
PAST = "Pass one past the last position of the range, at least start."
RANK = "Pass the rank, counted from 0."
STEP = "Pass the samples of one optimizer step over all workers."
TAIL = "Pass 1 to let the last batch of an epoch be as short as it comes."
EACH = "Pass one share for each part, or None for equal ones."
OUT = "Leave a worker out of parts to give it nothing."
UP_TO_LIMIT = "must be a whole number from 1 to 4611686018427387904"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: permute(10, **EPOCH),
            f"index=10: must be a whole number from 0 to 9. {BEYOND}",
        ),
        (
            lambda: permute(-1, **EPOCH),
            f"index=-1: must be a whole number from 0 to 9. {BEYOND}",
        ),
        (
            lambda: permute(0, num_samples=0, seed=0, epoch=0),
            f"num_samples=0: {UP_TO_LIMIT}. {SAMPLES}",
        ),
        (
            lambda: permute(0, num_samples=10, seed=0.5, epoch=0),
            f"seed=0.5: must be a whole number. {SEED}",
        ),
        (
            lambda: permute(0, num_samples=10, seed=0, epoch=-1),
            f"epoch=-1: must be a whole number of at least 0. {BEFORE}",
        ),
        (
            lambda: permute_range(11, 11, **EPOCH),
            f"start=11: must be a whole number from 0 to 10. {BEYOND}",
        ),
        (
            lambda: permute_range(3, 2, **EPOCH),
            f"stop=2: must be a whole number from 3 to 10. {BEYOND}",
        ),
        (
            lambda: permute_range(0, 11, **EPOCH),
            f"stop=11: must be a whole number from 0 to 10. {BEYOND}",
        ),
        (
            lambda: permute_range(0, 1, num_samples=2**62 + 1, seed=0, epoch=0),
            f"num_samples=4611686018427387905: {UP_TO_LIMIT}. {SAMPLES}",
        ),
        (
            lambda: permute_range(0, 1, num_samples=10, seed="7", epoch=0),
            f"seed='7': must be a whole number. {SEED}",
        ),
        (
            lambda: permute_range(0, 1, num_samples=10, seed=0, epoch=1.0),
            f"epoch=1.0: must be a whole number of at least 0. {BEFORE}",
        ),
        (
            lambda: stream_indices(-1, 1, **STREAM),
            f"start=-1: must be a whole number of at least 0. {FIRST}",
        ),
        (
            lambda: stream_indices(5, 4, **STREAM),
            f"stop=4: must be a whole number of at least 5. {PAST}",
        ),
        (
            lambda: stream_indices(0, 1, num_samples=True, seed=0),
            f"num_samples=True: {UP_TO_LIMIT}. {SAMPLES}",
        ),
        (
            lambda: stream_indices(0, 1, num_samples=10, seed=True),
            f"seed=True: must be a whole number. {SEED}",
        ),
        (
            lambda: stream_indices(0, 1, **STREAM, shuffle="no"),
            "shuffle='no': must be True or False. Pass one of the two.",
        ),
        (
            lambda: batch_stop(-1, **BATCH),
            "position=-1: must be a whole number of at least 0. "
            "Pass how many samples have been committed so far.",
        ),
        (
            lambda: batch_stop(0, num_samples=10.0, batch_samples=4),
            f"num_samples=10.0: {UP_TO_LIMIT}. {SAMPLES}",
        ),
        (
            lambda: batch_stop(0, num_samples=10, batch_samples=0),
            f"batch_samples=0: must be a whole number of at least 1. {STEP}",
        ),
        (
            lambda: batch_stop(0, **BATCH, min_tail_samples=0),
            f"min_tail_samples=0: must be a whole number of at least 1. {TAIL}",
        ),
        (
            lambda: batch_stop(0, **BATCH, straddle=1),
            "straddle=1: must be True or False. Pass one of the two.",
        ),
        (
            lambda: split(-1, 4, **SPLIT),
            f"start=-1: must be a whole number of at least 0. {FIRST}",
        ),
        (
            lambda: split(4, 3, **SPLIT),
            f"stop=3: must be a whole number of at least 4. {PAST}",
        ),
        (
            lambda: split(0, 4, parts=0, part=0),
            "parts=0: must be a whole number of at least 1. Pass the world size.",
        ),
        (
            lambda: split(0, 4, parts=2, part=2),
            f"part=2: must be a whole number from 0 to 1. {RANK}",
        ),
        (
            lambda: split(0, 4, parts=2, part=-1),
            f"part=-1: must be a whole number from 0 to 1. {RANK}",
        ),
        (
            lambda: split(0, 4, **SPLIT, shares=[1]),
            f"shares=[1]: must be a list or tuple of 2 numbers, one a part. {EACH}",
        ),
        (
            lambda: split(0, 4, **SPLIT, shares=2.0),
            f"shares=2.0: must be a list or tuple of 2 numbers, one a part. {EACH}",
        ),
        (
            lambda: split(0, 4, **SPLIT, shares=[1, 0]),
            f"shares[1]=0: must be a finite number above 0. {OUT}",
        ),
        (
            lambda: split(0, 4, **SPLIT, shares=[math.inf, 1]),
            f"shares[0]=inf: must be a finite number above 0. {OUT}",
        ),
        (
            lambda: split(0, 4, **SPLIT, shares=[1, math.nan]),
            f"shares[1]=nan: must be a finite number above 0. {OUT}",
        ),
    ],
)
def test_a_bad_argument_is_named_with_its_value_the_rule_and_the_way_out(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message


def test_the_public_names_are_sorted_and_real():
    for module in (order, permutation):
        assert module.__all__ == sorted(module.__all__)
        assert all(callable(getattr(module, name)) for name in module.__all__)


def test_the_benchmark_prints_its_rows_as_json():
    command = [sys.executable, "-m", "benchmarks.order", "--rounds", "2", "--json", "-"]
    root = Path(__file__).parents[1]
    output = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    rows = json.loads(output.stdout)["rows"]
    assert {"num_samples", "count", "median_ms", "under_goal"} <= set(rows[0])
    assert max(row["num_samples"] for row in rows) == 10**12
