"""The keyed permutation of an epoch: which sample stands at which place, without storing it.

Pure: plain numbers and numpy arrays. Must not know torch, datasets, batches, processes or clocks.
The order is part of the checkpoint format: golden values in the tests hold it still for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastane.errors import ArgumentError, check_between, check_whole, describe

__all__ = [
    "check_dataset",
    "check_num_samples",
    "check_range",
    "permute",
    "permute_range",
    "permute_ranges",
]

# Changing any of these changes the order of every saved run.
_VERSION = "elastane.order.1"
_SORT_MAX_SAMPLES = 4096  # few-round Feistel networks are visibly biased on tiny domains
_ROUNDS = 8
_GAMMA = 0x9E3779B97F4A7C15  # increment and multipliers of splitmix64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

_MASK = 2**64 - 1
_MAX_SAMPLES = 2**62  # sides then stay at or below 2**31, so 32-bit hash x side fits in 64 bits
_BLOCK = 16384  # four arrays of this length stay in a core's second-level cache


def permute(index: int, *, num_samples: int, seed: int, epoch: int) -> int:
    """Return the dataset index at place `index` of one epoch's order, in plain Python integers.

    With ``h_k(v) = mix(v * gamma + k mod 2**64)``, where `gamma` and `mix` are those of splitmix64
    (without its last xor-shift, which hardly reaches the upper half), and with the keys
    ``k_r = blake2b("elastane.order.1|seed|epoch|r")`` (hexadecimal numbers; a digest of 8 bytes,
    little-endian):

    - up to 4096 samples the order sorts the dataset indices by ``h_k0(index)``, ties by index;
    - above, place ``x * b + y`` of the domain ``a * b`` with ``a = ceil(sqrt(n))`` and
      ``b = ceil(n / a)`` goes through 8 rounds, in turn
      ``x <- (x + ((h >> 32) * a >> 32)) mod a`` with ``h = h_kr(y)`` and
      ``y <- (y + ((h >> 32) * b >> 32)) mod b`` with ``h = h_kr(x)``,
      and through all of them again until it is below ``n`` (cycle walking).

    This is the slow twin of `permute_range`: for reading and for tests.

    Args:
        index: Place within the epoch, 0 to num_samples - 1.
        num_samples: Samples of the dataset, 1 to 2**62.
        seed: Any Python int.
        epoch: Number of the epoch, from 0.

    Returns:
        A dataset index, 0 to num_samples - 1; different places give different ones.

    Raises:
        ArgumentError: An argument is no whole number or out of its range.

    Example:
        >>> [permute(index, num_samples=5, seed=0, epoch=0) for index in range(5)]
        [0, 3, 1, 2, 4]

    References:
        J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002): their
        prefix cipher (sort by a keyed value) for small domains, their generalized-Feistel cipher
        (on a x b, walking its cycles) above. The hash here mixes well and hides nothing.
        G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators"
        (OOPSLA 2014): splitmix64, with D. Stafford's "mix 13".
    """
    check_dataset(num_samples, seed)
    _check_epoch(epoch)
    check_between(
        "index",
        index,
        at_least=0,
        at_most=num_samples - 1,
        way_out="Use stream_indices for positions beyond one epoch.",
    )
    if num_samples <= _SORT_MAX_SAMPLES:
        return _sorted_twin(num_samples, seed, epoch)[index]
    return _feistel_twin(index, num_samples=num_samples, keys=_round_keys(seed, epoch))


def permute_range(
    start: int, stop: int, *, num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the dataset indices at places `start` to `stop` - 1 of one epoch's order.

    ``permute_range(start, stop)[i] == permute(start + i)``, vectorised, with memory in proportion
    to ``stop - start`` however large the dataset is.

    Args:
        start: First place, 0 to num_samples.
        stop: One past the last place, start to num_samples.
        num_samples: Samples of the dataset, 1 to 2**62.
        seed: Any Python int.
        epoch: Number of the epoch, from 0.

    Returns:
        A new array of shape (stop - start,).

    Raises:
        ArgumentError: An argument is no whole number or out of its range.

    Example:
        >>> permute_range(0, 5, num_samples=5, seed=0, epoch=0).tolist()
        [0, 3, 1, 2, 4]
        >>> permute_range(0, 3, num_samples=10**12, seed=0, epoch=7).tolist()
        [187154609817, 397354551085, 270263238099]

    References:
        As `permute`. D. Lemire, "Fast random integer generation in an interval" (TOMACS 2019),
        section 3: multiply and shift instead of a remainder.
    """
    check_dataset(num_samples, seed)
    _check_epoch(epoch)
    way_out = "Use stream_indices for positions beyond one epoch."
    check_between("start", start, at_least=0, at_most=num_samples, way_out=way_out)
    check_between("stop", stop, at_least=start, at_most=num_samples, way_out=way_out)
    return permute_ranges([(start, stop)], num_samples=num_samples, seed=seed, epoch=epoch)


def permute_ranges(
    ranges: Sequence[tuple[int, int]], *, num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return what `permute_range` returns for each of the ranges, put together in one array.

    Many short ranges cost hardly more than one: a call's price is that of some hundred operations
    on arrays, not of the samples. Arguments are checked before.
    """
    if num_samples <= _SORT_MAX_SAMPLES:
        order = _sorted_order(num_samples, seed, epoch)
        return np.concatenate([order[start:stop] for start, stop in ranges])
    each = [np.arange(start, stop, dtype=np.uint64) for start, stop in ranges]
    places = each[0] if len(each) == 1 else np.concatenate(each)
    return _feistel(places, num_samples=num_samples, keys=_round_keys(seed, epoch))


def _round_key(seed: int, epoch: int, number: int) -> int:
    """Return the 64-bit key of one round."""
    # Hexadecimal: Python limits how long a decimal number may be.
    text = f"{_VERSION}|{seed:x}|{epoch:x}|{number:x}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(_round_key(seed, epoch, number) for number in range(_ROUNDS))


def _sides(num_samples: int) -> tuple[int, int]:
    """Return the smallest nearly square domain a x b that holds `num_samples` places."""
    a = math.isqrt(num_samples - 1) + 1
    return a, -(-num_samples // a)


def _hash_twin(value: int, key: int) -> int:
    mixed = (value * _GAMMA + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MULTIPLIER_1) & _MASK
    return ((mixed ^ (mixed >> 27)) * _MULTIPLIER_2) & _MASK


@lru_cache(maxsize=4)
def _sorted_twin(num_samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    key = _round_key(seed, epoch, 0)
    return tuple(sorted(range(num_samples), key=lambda index: (_hash_twin(index, key), index)))


def _feistel_twin(place: int, *, num_samples: int, keys: Sequence[int]) -> int:
    a, b = _sides(num_samples)
    while True:
        x, y = divmod(place, b)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                x = (x + ((_hash_twin(y, key) >> 32) * a >> 32)) % a
            else:
                y = (y + ((_hash_twin(x, key) >> 32) * b >> 32)) % b
        place = x * b + y
        if place < num_samples:
            return place


def _hash(values: NDArray[np.uint64], key: int, *, out: NDArray[np.uint64]) -> None:
    """Write the 64-bit keyed hash of each value to `out`."""
    scratch = np.empty_like(out)
    np.multiply(values, _GAMMA, out=out)
    np.add(out, key, out=out)
    np.right_shift(out, 30, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MULTIPLIER_1, out=out)
    np.right_shift(out, 27, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MULTIPLIER_2, out=out)


@lru_cache(maxsize=8)
def _sorted_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    hashes = np.empty(num_samples, dtype=np.uint64)
    _hash(np.arange(num_samples, dtype=np.uint64), _round_key(seed, epoch, 0), out=hashes)
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    order.setflags(write=False)  # it is shared by all callers
    return order


def _feistel(
    places: NDArray[np.uint64], *, num_samples: int, keys: Sequence[int]
) -> NDArray[np.int64]:
    """Return the indices at places, in their memory."""
    _feistel_rounds(places, num_samples=num_samples, keys=keys)
    outside = np.flatnonzero(places >= num_samples)
    while outside.size > 0:
        walkers = places[outside]
        _feistel_rounds(walkers, num_samples=num_samples, keys=keys)
        places[outside] = walkers
        outside = outside[walkers >= num_samples]
    return places.view(np.int64)


def _feistel_rounds(places: NDArray[np.uint64], *, num_samples: int, keys: Sequence[int]) -> None:
    """Send all places through all rounds once, in place."""
    a, b = _sides(num_samples)
    for begin in range(0, len(places), _BLOCK):
        block = places[begin : begin + _BLOCK]
        x = block // b
        y = block - x * b
        scratch = np.empty_like(block)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                _feistel_round(x, y, side=a, key=key, scratch=scratch)
            else:
                _feistel_round(y, x, side=b, key=key, scratch=scratch)
        np.multiply(x, b, out=block)
        np.add(block, y, out=block)


def _feistel_round(
    changed: NDArray[np.uint64],
    other: NDArray[np.uint64],
    *,
    side: int,
    key: int,
    scratch: NDArray[np.uint64],
) -> None:
    _hash(other, key, out=scratch)
    np.right_shift(scratch, 32, out=scratch)
    np.multiply(scratch, side, out=scratch)
    np.right_shift(scratch, 32, out=scratch)
    np.add(changed, scratch, out=changed)
    # Below `side` the difference wraps around to a huge number, so the minimum is the remainder.
    np.subtract(changed, side, out=scratch)
    np.minimum(changed, scratch, out=changed)


def check_num_samples(num_samples: object) -> None:
    """Refuse a size of a dataset that the order can't have."""
    way_out = "Pass the number of samples of the dataset as a Python int."
    check_between("num_samples", num_samples, at_least=1, at_most=_MAX_SAMPLES, way_out=way_out)


def check_dataset(num_samples: object, seed: object) -> None:
    """Refuse a size or a seed that the order can't have."""
    check_num_samples(num_samples)
    if isinstance(seed, bool) or not isinstance(seed, int):
        rule = "must be a whole number"
        way_out = "Pass any Python int; int(...) converts numpy's integers and tensors."
        raise ArgumentError(describe("seed", seed, rule=rule, way_out=way_out))


def _check_epoch(epoch: object) -> None:
    way_out = "Pass the number of epochs before this one, 0 for the first."
    check_whole("epoch", epoch, at_least=0, way_out=way_out)


def check_range(start: int, stop: int) -> None:
    """Refuse a range of places or positions that runs backwards or below 0."""
    way_out = "Pass the first position of the range."
    check_whole("start", start, at_least=0, way_out=way_out)
    way_out = "Pass one past the last position of the range, at least start."
    check_whole("stop", stop, at_least=start, way_out=way_out)
