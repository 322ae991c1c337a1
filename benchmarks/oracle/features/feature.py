"""What a row of the table is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.oracle.job import Job
from benchmarks.oracle.subject import Form
from elastane import GlobalBatch

__all__ = ["BOUND", "Feature", "Record", "grid_of"]

BOUND = 1e-5

Record = Mapping[str, Any]
"""What one rank told, as `Recorder.finished` returned it."""


def grid_of(micro_batches: int, *, samples: int = 32) -> Callable[[int], GlobalBatch]:
    """Return, for any number of workers, the same samples in the same micro-batches."""
    return lambda _num_workers: GlobalBatch(samples, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One thing that people train with.

    Attributes:
        name: of the row.
        form: how a user writes it down for the library.
        job: what is trained, for library and oracle.
        worlds: numbers of workers; several in one are those that a run goes through.
        bound: on all errors.
        why: the reason for a bound above the usual one.
        happened: tells from the ranks' records whether what the row is about took place.
    """

    name: str
    form: Form = field(default_factory=lambda: Form(batch=grid_of(4)))
    job: Job = field(default_factory=Job)
    worlds: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,))
    bound: float = BOUND
    why: str = ""
    happened: Callable[[Sequence[Record]], bool] = lambda _records: True
