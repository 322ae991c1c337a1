"""The stateless order of the data: which sample stands at which position, and who takes it.

Pure: plain numbers and numpy arrays. Must not know torch, datasets, processes, clocks or files.
The order is part of the checkpoint format: golden values in the tests hold it still for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastane.errors import ArgumentError, check_positive, check_whole, describe

__all__ = ["batch_stop", "permute", "permute_range", "split", "stream_indices"]

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
    _check_dataset(num_samples, seed)
    _check_epoch(epoch)
    _check_between(
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
    _check_dataset(num_samples, seed)
    _check_epoch(epoch)
    way_out = "Use stream_indices for positions beyond one epoch."
    _check_between("start", start, at_least=0, at_most=num_samples, way_out=way_out)
    _check_between("stop", stop, at_least=start, at_most=num_samples, way_out=way_out)
    return _places(start, stop, num_samples=num_samples, seed=seed, epoch=epoch)


def stream_indices(
    start: int, stop: int, *, num_samples: int, seed: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Return the dataset indices of positions `start` to `stop` - 1 of the endless stream.

    Position ``p`` is place ``p mod num_samples`` of epoch ``p // num_samples``. The range may cross
    any number of epochs.

    Args:
        start: First position in samples since the start of training, from 0.
        stop: One past the last position, from start.
        num_samples: Samples of the dataset, 1 to 2**62.
        seed: Any Python int.
        shuffle: False keeps the dataset's own order in each epoch; the seed then changes nothing.

    Returns:
        A new array of shape (stop - start,).

    Raises:
        ArgumentError: An argument is no whole number or out of its range.

    Example:
        >>> stream_indices(0, 10, num_samples=5, seed=0).tolist()
        [0, 3, 1, 2, 4, 0, 2, 4, 1, 3]
        >>> stream_indices(3, 7, num_samples=5, seed=0, shuffle=False).tolist()
        [3, 4, 0, 1]

    References:
        As `permute`.
    """
    _check_dataset(num_samples, seed)
    _check_range(start, stop)
    _check_flag("shuffle", shuffle)
    if not shuffle:
        return (np.arange(stop - start, dtype=np.int64) + start % num_samples) % num_samples
    indices = np.empty(stop - start, dtype=np.int64)
    position = start
    while position < stop:
        epoch, first = divmod(position, num_samples)
        last = min(first + stop - position, num_samples)
        end = position + last - first
        indices[position - start : end - start] = _places(
            first, last, num_samples=num_samples, seed=seed, epoch=epoch
        )
        position = end
    return indices


def batch_stop(
    position: int,
    *,
    num_samples: int,
    batch_samples: int,
    min_tail_samples: int = 1,
    straddle: bool = False,
) -> int:
    """Return the position where the global batch that starts at `position` ends.

    With ``left = num_samples - position mod num_samples``, the batch has ``left`` samples if
    ``left - batch_samples < min_tail_samples``, otherwise ``batch_samples``: it never straddles an
    epoch, the short last batch is not padded, and a remainder too small to stand alone joins it.
    Nothing but the position is remembered, so the next batch is right after any change of the
    number of workers or of the batch. Only such a change can leave less than `min_tail_samples`
    for a last batch: what has been committed can't be joined any more.

    Args:
        position: Samples committed since the start of training, from 0.
        num_samples: Samples of the dataset, 1 to 2**62.
        batch_samples: Samples of a full batch over all workers, from 1.
        min_tail_samples: Fewest samples that may remain for an epoch's last batch, from 1.
        straddle: True takes exactly `batch_samples`, also over the end of an epoch; no batch is
            short then, so `min_tail_samples` has nothing to join.

    Returns:
        A position after `position`.

    Raises:
        ArgumentError: An argument is no whole number or out of its range.

    Example:
        >>> batch_stop(4, num_samples=10, batch_samples=4)
        8
        >>> batch_stop(8, num_samples=10, batch_samples=4)
        10
        >>> batch_stop(4, num_samples=10, batch_samples=4, min_tail_samples=3)
        10
        >>> batch_stop(8, num_samples=10, batch_samples=4, straddle=True)
        12

    References:
        None; elastane's own definition.
    """
    way_out = "Pass how many samples have been committed so far."
    check_whole("position", position, at_least=0, way_out=way_out)
    _check_num_samples(num_samples)
    way_out = "Pass the samples of one optimizer step over all workers."
    check_whole("batch_samples", batch_samples, at_least=1, way_out=way_out)
    way_out = "Pass 1 to let the last batch of an epoch be as short as it comes."
    check_whole("min_tail_samples", min_tail_samples, at_least=1, way_out=way_out)
    _check_flag("straddle", straddle)
    if straddle:
        return position + batch_samples
    left = num_samples - position % num_samples
    return position + (left if left - batch_samples < min_tail_samples else batch_samples)


def split(
    start: int, stop: int, *, parts: int, part: int, shares: Sequence[float] | None = None
) -> tuple[int, int]:
    """Return the contiguous slice number `part` of the range [start, stop) in `parts` slices.

    The slices are disjoint and their union is the range. Without shares their sizes differ by at
    most 1, the larger first: slice ``i`` begins at ``start + i * q + min(i, r)`` with
    ``q, r = divmod(stop - start, parts)``. With shares ``w`` each gets the floor of its quota
    ``(stop - start) * w_i / sum(w)``, and the largest remainders, the lower part first, get one
    more. Exact integer arithmetic, so all workers agree to the sample.

    Args:
        start: First position of the range, from 0.
        stop: One past its last position, from start.
        parts: Number of slices, from 1, such as the world size.
        part: Which slice, 0 to parts - 1, such as the rank.
        shares: One finite number above 0 a part, in any unit; None for equal ones.

    Returns:
        The slice's first position and one past its last; both are equal if it is empty.

    Raises:
        ArgumentError: An argument is no whole number or out of its range, or a share is missing,
            not finite or not above 0.

    Example:
        >>> [split(100, 110, parts=4, part=part) for part in range(4)]
        [(100, 103), (103, 106), (106, 108), (108, 110)]
        >>> [split(100, 110, parts=3, part=part, shares=[2, 1, 0.5]) for part in range(3)]
        [(100, 106), (106, 109), (109, 110)]

    References:
        M. L. Balinski and H. P. Young, "Fair representation" (1982), chapter 3: Hamilton's method
        (largest remainders).
    """
    _check_range(start, stop)
    check_whole("parts", parts, at_least=1, way_out="Pass the world size.")
    way_out = "Pass the rank, counted from 0."
    _check_between("part", part, at_least=0, at_most=parts - 1, way_out=way_out)
    if shares is None:
        size, larger = divmod(stop - start, parts)
        begin = start + part * size + min(part, larger)
        return begin, begin + size + (part < larger)
    _check_shares(shares, parts)
    sizes = _largest_remainders(stop - start, shares)
    begin = start + sum(sizes[:part])
    return begin, begin + sizes[part]


def _places(start: int, stop: int, *, num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a new array of the indices at places [start, stop), arguments checked before."""
    if num_samples <= _SORT_MAX_SAMPLES:
        return _sorted_order(num_samples, seed, epoch)[start:stop].copy()
    return _feistel_range(start, stop, num_samples=num_samples, keys=_round_keys(seed, epoch))


def _round_key(seed: int, epoch: int, number: int) -> int:
    """Return the 64-bit key of one round."""
    # Hexadecimal: Python limits how long a decimal number may be.
    text = f"{_VERSION}|{seed:x}|{epoch:x}|{number:x}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _round_keys(seed: int, epoch: int) -> list[int]:
    return [_round_key(seed, epoch, number) for number in range(_ROUNDS)]


def _sides(num_samples: int) -> tuple[int, int]:
    """Return the smallest nearly square domain a x b that holds `num_samples` places."""
    a = math.isqrt(num_samples - 1) + 1
    return a, -(-num_samples // a)


# The slow twin, one number at a time.


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


# The fast path, whole arrays in place.


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


def _feistel_range(
    start: int, stop: int, *, num_samples: int, keys: Sequence[int]
) -> NDArray[np.int64]:
    places = np.arange(start, stop, dtype=np.uint64)
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


def _largest_remainders(size: int, shares: Sequence[float]) -> list[int]:
    """Return whole sizes that add up to `size`, in proportion to `shares`."""
    ratios = [share.as_integer_ratio() for share in shares]
    denominator = math.lcm(*(ratio[1] for ratio in ratios))
    weights = [ratio[0] * (denominator // ratio[1]) for ratio in ratios]
    total = sum(weights)
    quotas = [divmod(size * weight, total) for weight in weights]
    sizes = [floor for floor, _ in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda part: (-quotas[part][1], part))
    for part in by_remainder[: size - sum(sizes)]:
        sizes[part] += 1
    return sizes


def _check_between(name: str, value: object, *, at_least: int, at_most: int, way_out: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        rule = f"must be a whole number from {at_least} to {at_most}"
        raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def _check_num_samples(num_samples: object) -> None:
    way_out = "Pass the number of samples of the dataset as a Python int."
    _check_between("num_samples", num_samples, at_least=1, at_most=_MAX_SAMPLES, way_out=way_out)


def _check_dataset(num_samples: object, seed: object) -> None:
    _check_num_samples(num_samples)
    if isinstance(seed, bool) or not isinstance(seed, int):
        rule = "must be a whole number"
        way_out = "Pass any Python int; int(...) converts numpy's integers and tensors."
        raise ArgumentError(describe("seed", seed, rule=rule, way_out=way_out))


def _check_epoch(epoch: object) -> None:
    way_out = "Pass the number of epochs before this one, 0 for the first."
    check_whole("epoch", epoch, at_least=0, way_out=way_out)


def _check_range(start: int, stop: int) -> None:
    way_out = "Pass the first position of the range."
    check_whole("start", start, at_least=0, way_out=way_out)
    way_out = "Pass one past the last position of the range, at least start."
    check_whole("stop", stop, at_least=start, way_out=way_out)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        way_out = "Pass one of the two."
        raise ArgumentError(describe(name, value, rule="must be True or False", way_out=way_out))


def _check_shares(shares: Sequence[float], parts: int) -> None:
    if not isinstance(shares, (list, tuple)) or len(shares) != parts:
        rule = f"must be a list or tuple of {parts} numbers, one a part"
        way_out = "Pass one share for each part, or None for equal ones."
        raise ArgumentError(describe("shares", shares, rule=rule, way_out=way_out))
    for number, share in enumerate(shares):
        way_out = "Leave a worker out of parts to give it nothing."
        check_positive(f"shares[{number}]", share, way_out=way_out)
