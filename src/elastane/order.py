"""The elastic order of the data: the endless stream of samples, its batches and their slices.

Pure: plain numbers and numpy arrays. Must not know torch, datasets, processes, clocks or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from elastane.errors import (
    ArgumentError,
    check_between,
    check_positive,
    check_whole,
    describe,
)
from elastane.permutation import check_dataset, check_num_samples, check_range, permute_ranges

__all__ = ["batch_stop", "cuts", "indices_of_ranges", "split", "stream_indices"]


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
        As `elastane.permutation.permute`.
    """
    return indices_of_ranges([(start, stop)], num_samples=num_samples, seed=seed, shuffle=shuffle)


def indices_of_ranges(
    ranges: Sequence[tuple[int, int]], *, num_samples: int, seed: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Return what `stream_indices` returns for each of the ranges, one behind the other.

    Many short ranges cost little more than one.

    Args:
        ranges: First position and one past the last of each, in any order; at least one.
        num_samples: Samples of the dataset, 1 to 2**62.
        seed: Any Python int.
        shuffle: As for `stream_indices`.

    Returns:
        A new array.

    Raises:
        ArgumentError: An argument is no whole number or out of its range.

    Example:
        >>> indices_of_ranges([(0, 2), (4, 7)], num_samples=5, seed=0).tolist()
        [0, 3, 4, 0, 2]

    References:
        As `elastane.permutation.permute`.
    """
    check_dataset(num_samples, seed)
    _check_flag("shuffle", shuffle)
    for start, stop in ranges:
        check_range(start, stop)
    if not shuffle:
        return np.concatenate([_unshuffled(start, stop, num_samples) for start, stop in ranges])
    by_epoch = groupby(_within_epochs(ranges, num_samples), key=itemgetter(0))
    dealt = [
        permute_ranges(
            [(first, last) for _, first, last in pieces],
            num_samples=num_samples,
            seed=seed,
            epoch=epoch,
        )
        for epoch, pieces in by_epoch
    ]
    return dealt[0] if len(dealt) == 1 else np.concatenate(dealt)


def _unshuffled(start: int, stop: int, num_samples: int) -> NDArray[np.int64]:
    return (np.arange(stop - start, dtype=np.int64) + start % num_samples) % num_samples


def _within_epochs(
    ranges: Iterable[tuple[int, int]], num_samples: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges, cut where epochs end: each part's epoch, first place, and one past."""
    for start, stop in ranges:
        epoch, first = divmod(start, num_samples)
        left = stop - start
        while True:
            last = min(first + left, num_samples)
            yield epoch, first, last
            left -= last - first
            if left == 0:
                break
            epoch, first = epoch + 1, 0


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
    check_num_samples(num_samples)
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
    check_range(start, stop)
    check_whole("parts", parts, at_least=1, way_out="Pass the world size.")
    way_out = "Pass the rank, counted from 0."
    check_between("part", part, at_least=0, at_most=parts - 1, way_out=way_out)
    if shares is None:
        size, larger = divmod(stop - start, parts)
        begin = start + part * size + min(part, larger)
        return begin, begin + size + (part < larger)
    return cuts(start, stop, shares=shares, parts=parts)[part]


def cuts(start: int, stop: int, *, parts: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return all the slices that `split` would return with these shares, in one pass.

    Args:
        start: First position of the range, from 0.
        stop: One past its last position, from start.
        parts: Number of slices, from 1.
        shares: One finite number above 0 a part, in any unit.

    Returns:
        The first position of each slice and one past its last.

    Raises:
        ArgumentError: As `split`.

    Example:
        >>> cuts(100, 110, parts=3, shares=[2, 1, 0.5])
        [(100, 106), (106, 109), (109, 110)]

    References:
        As `split`.
    """
    check_range(start, stop)
    check_whole("parts", parts, at_least=1, way_out="Pass the world size.")
    _check_shares(shares, parts)
    ends = list(accumulate(_largest_remainders(stop - start, shares), initial=start))
    return list(pairwise(ends))


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
