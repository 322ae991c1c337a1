"""From the ranks' records to rows: the oracle follows their samples, and the two are compared.

Knows records and the oracle; nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.oracle.features import Feature
from benchmarks.oracle.features.feature import Record
from benchmarks.oracle.job import AVERAGE, MicroBatch, Trace, Window
from benchmarks.oracle.reference import follow

__all__ = ["Row", "compare", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        feature: its name.
        ranks: number of workers, or the numbers that the run went through.
        gain_error: largest relative error of the gain over all steps and ranks.
        moment_error: of the two averaged moments, likewise; see `_moment_error`.
        weight_error: of the weights in the end, relative to how far they moved; likewise that of
            running statistics and averages of the weights, relative to their size.
        bound: on each error.
        ok: whether all are within the bound, and what the row is about took place.
        why: the reason for a bound above the usual one, or for the failure.
    """

    feature: str
    ranks: int | str
    gain_error: float | None
    moment_error: float | None
    weight_error: float | None
    bound: float
    ok: bool
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


def compare(feature: Feature, phases: Sequence[Sequence[Record]]) -> Row:
    """Return the row of one run.

    Args:
        feature: what was trained.
        phases: the ranks' records, for each number of workers that the run went through.
    """
    worlds = [len(records) for records in phases]
    wanted = follow(feature.job, _windows(feature, phases))
    found = [
        _trace(records, rank=rank, first=phases[0][0])
        for rank, records in enumerate(_by_rank(phases))
    ]
    errors = (
        max(_gain_error(one, wanted) for one in found),
        max(_moment_error(one, wanted) for one in found),
        max(_weight_error(one, wanted) for one in found),
    )
    happened = all(feature.happened(records) for records in phases)
    gain_error, moment_error, weight_error = errors
    return Row(
        feature=feature.name,
        ranks=_ranks(worlds),
        gain_error=gain_error,
        moment_error=moment_error,
        weight_error=weight_error,
        bound=feature.bound,
        ok=happened and all(error <= feature.bound for error in errors),
        why=feature.why if happened else "what the row is about did not take place",
    )


def failed(feature: Feature, worlds: Sequence[int], *, why: str) -> Row:
    """Return the row of a run that came to no end."""
    return Row(
        feature=feature.name,
        ranks=_ranks(worlds),
        gain_error=None,
        moment_error=None,
        weight_error=None,
        bound=feature.bound,
        ok=False,
        why=why,
    )


def _ranks(worlds: Sequence[int]) -> int | str:
    return worlds[0] if len(worlds) == 1 else "-".join(map(str, worlds))


def _windows(feature: Feature, phases: Sequence[Sequence[Record]]) -> list[Window]:
    """Return all ranks' micro-batches of each window."""
    windows: list[Window] = []
    for records in phases:
        nominal = feature.form.batch(len(records)).batch_samples(len(records))
        for ranks in zip(*(record["windows"] for record in records), strict=True):
            micro_batches = [
                MicroBatch(rank=rank, indices=tuple(indices))
                for rank, window in enumerate(ranks)
                for indices in window["micro_batches"]
            ]
            number = len(windows)
            windows.append(
                Window(number=number, micro_batches=tuple(micro_batches), nominal_samples=nominal)
            )
    return windows


def _by_rank(phases: Sequence[Sequence[Record]]) -> list[list[Record]]:
    """Return the records of each rank of the last phase, with one of each phase before it."""
    *earlier, last = phases
    return [[*(records[0] for records in earlier), record] for record in last]


def _trace(records: Sequence[Record], *, rank: int, first: Record) -> Trace:
    windows = [one for record in records for one in record["windows"] if not one["skipped"]]
    return Trace(
        gains=[window["gain"] for window in windows],
        moments=[window["moments"] for window in windows],
        weights=records[-1]["weights"],
        start=first["start"],
        batches=[sum(map(len, window["micro_batches"])) for window in windows],
        others={
            name if name == AVERAGE else f"rank {rank} {name}": value
            for name, value in records[-1]["buffers"].items()
        },
    )


def _gain_error(found: Trace, wanted: Trace) -> float:
    pairs = zip(found.gains, wanted.gains, strict=True)
    return max(abs(own - right) / right for own, right in pairs)


def _moment_error(found: Trace, wanted: Trace) -> float:
    """Return the largest error of the moments: of all steps, and relative to themselves at the end.

    `mu^2` is a difference that passes near zero, so that of each step is relative to the terms
    that it is the difference of: `mu^2 + s / B`, by which the gain divides.
    """
    errors = [0.0]
    steps = zip(found.moments, wanted.moments, wanted.batches, strict=True)
    for own, right, samples in steps:
        if own is None or right is None:
            errors.append(0.0 if own is right else float("inf"))
            continue
        terms = abs(right[1]) + right[0] / samples
        errors += [abs(own[0] - right[0]) / right[0], abs(own[1] - right[1]) / terms]
    last, right = found.moments[-1], wanted.moments[-1]
    if last is not None and right is not None:
        errors += [abs(a - b) / abs(b) for a, b in zip(last, right, strict=True)]
    return max(errors)


def _weight_error(found: Trace, wanted: Trace) -> float:
    moved = torch.linalg.vector_norm(wanted.weights - wanted.start)
    errors = [float(torch.linalg.vector_norm(found.weights - wanted.weights) / moved)]
    for name, own in found.others.items():
        if (right := wanted.others.get(name)) is not None:
            difference = torch.linalg.vector_norm(own - right)
            errors.append(float(difference / torch.linalg.vector_norm(right)))
    return max(errors)
