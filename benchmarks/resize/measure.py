"""What a change of workers cost, out of what the workers wrote down. Pure.

Knows lines of records and events by their times; nothing of processes, files or the clock. All
times are seconds of one clock that all processes of a machine share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

__all__ = [
    "STEPS_AFTER",
    "STEPS_LOOKED_AT",
    "Change",
    "Event",
    "Line",
    "Membership",
    "joins",
    "measure",
    "summarize",
]

Records = Mapping[int, Sequence["Line"]]

STEPS_LOOKED_AT = 3  # a group's second step builds its buckets anew: it may be slow, too
STEPS_AFTER = 10
_STEPS_BEFORE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a worker wrote down when something had happened.

    Attributes:
        kind: step (finished), discarded (a step that broke), or ready (to join).
        worker: its id.
        pid: its process.
        time: when.
        cpu: seconds of processor time that its process has used.
        generation: that the step was made in.
        step: number of the step.
        world_size: number of workers.
    """

    kind: str
    worker: int
    pid: int
    time: float
    cpu: float = 0.0
    generation: int = 0
    step: int = 0
    world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A generation as it was published: its number, its members, why and when."""

    number: int
    members: tuple[int, ...]
    cause: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that was done to a job.

    Attributes:
        kind: what.
        begin: when; nothing before it is its doing.
        generation: number of the membership that it led to.
        survivors: workers that trained before and after it.
        joined: workers that came with it.
        limit_s: how long the job was told to wait before it gives a worker up.
        end: when the next thing happened.
    """

    kind: str
    begin: float
    generation: int
    survivors: tuple[int, ...]
    joined: tuple[int, ...] = ()
    limit_s: float = 0.0
    end: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an event cost.

    Attributes:
        kind: of the event.
        workers: how many there were afterwards.
        raw_ms: longest gap between two finished steps of a survivor, without its median step;
            of the survivor that waited longest.
        pause_ms: the same without the time that the job was told to wait.
        beyond_next_ms: the same, but without a median step of the group that came after: what the
            change itself cost where steps of more workers on these processors take longer.
        median_step_ms: the median step that was taken off.
        undisturbed_ms: the same measure over as many steps shortly before the event.
        discarded_steps: steps that broke and were made again.
        pids_unchanged: whether all survivors kept their processes.
        ready_to_first_step_ms: of each worker that joined.
    """

    kind: str
    workers: int
    raw_ms: float
    pause_ms: float
    beyond_next_ms: float
    median_step_ms: float
    undisturbed_ms: float
    discarded_steps: int
    pids_unchanged: bool
    ready_to_first_step_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """How long one survivor waited, and its steps."""

    gap_s: float
    step_s: float
    next_step_s: float
    undisturbed_s: float


def measure(event: Event, records: Records) -> Change:
    """Return what an event cost the survivor that it cost most.

    Args:
        event: what was done.
        records: the lines of each worker, oldest first.

    Raises:
        ValueError: a survivor made no step before the event, or not two after it.
    """
    waits = [_wait(event, steps_of(records[worker])) for worker in event.survivors]
    worst = max(waits, key=lambda wait: wait.gap_s - wait.step_s)
    raw_s = worst.gap_s - worst.step_s
    return Change(
        kind=event.kind,
        workers=len(event.survivors) + len(event.joined),
        raw_ms=1e3 * raw_s,
        pause_ms=1e3 * (raw_s - event.limit_s),
        beyond_next_ms=1e3 * (worst.gap_s - worst.next_step_s - event.limit_s),
        median_step_ms=1e3 * worst.step_s,
        undisturbed_ms=1e3 * max(wait.undisturbed_s for wait in waits),
        discarded_steps=max(_discarded(event, records[worker]) for worker in event.survivors),
        pids_unchanged=all(len({line.pid for line in records[w]}) == 1 for w in event.survivors),
        ready_to_first_step_ms=tuple(_entry_ms(records[worker]) for worker in event.joined),
    )


def joins(
    memberships: Sequence[Membership], records: Records, *, kind: str = "join"
) -> list[Event]:
    """Return an event for each time that new workers joined others.

    Memberships in which nobody finished a step before the next one count with that one. A worker
    that was left behind and comes back is not new. What not all members went on from is left out.

    Args:
        memberships: all that were published, oldest first.
        records: the lines of each worker.
        kind: what to call them.
    """
    made = {line.generation for lines in records.values() for line in steps_of(lines)}
    found: list[Event] = []
    before: Membership | None = None
    begin = math.inf
    for number, membership in enumerate(memberships):
        begin = min(begin, membership.time)
        if membership.number not in made:
            continue
        event = _join(membership, before=before, begin=begin, records=records)
        if event is not None:
            after = memberships[number + 1 : number + 2]
            found.append(replace(event, kind=kind, end=after[0].time if after else math.inf))
        before, begin = membership, math.inf
    return found


def summarize(changes: Iterable[Change]) -> dict[str, float | int | None]:
    """Return number, median and maximum of the pauses, and the discarded steps in all."""
    rows = list(changes)
    pauses = [row.pause_ms for row in rows]
    return {
        "n": len(rows),
        "median_ms": round(statistics.median(pauses), 1) if rows else None,
        "max_ms": round(max(pauses), 1) if rows else None,
        "median_beyond_next_ms": round(statistics.median(r.beyond_next_ms for r in rows), 1)
        if rows
        else None,
        "discarded_steps": sum(row.discarded_steps for row in rows),
    }


def steps_of(lines: Iterable[Line]) -> list[Line]:
    """Return the finished steps among lines."""
    return [line for line in lines if line.kind == "step"]


def _wait(event: Event, steps: Sequence[Line]) -> _Wait:
    before = [line.time for line in steps if line.time <= event.begin][-_STEPS_BEFORE - 1 :]
    later = [line for line in steps if line.time > event.begin]
    after = [line.time for line in later if line.generation >= event.generation]
    if not before or len(after) < 2:
        raise ValueError(f"a survivor of {event} made no step before it, or not two after it")
    last_s = after[min(STEPS_LOOKED_AT, len(after) - 1)]
    times = [before[-1], *(line.time for line in later if line.time <= last_s)]
    first, *further = pairwise(times)
    gaps = _gaps(first) + [b - a for a, b in further if b <= event.end]
    usual = _gaps(before)
    # Workers share the processors: with fewer of them steps are shorter. What is taken off is
    # the shorter of the two, so that this doesn't look like a shorter pause.
    next_step_s = statistics.median(_gaps(after[: STEPS_AFTER + 1]))
    step_s = min(statistics.median(usual), next_step_s) if usual else next_step_s
    return _Wait(
        gap_s=max(gaps),
        step_s=step_s,
        next_step_s=next_step_s,
        undisturbed_s=max(usual[-len(gaps) :]) - statistics.median(usual) if usual else 0.0,
    )


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def _discarded(event: Event, lines: Sequence[Line]) -> int:
    """Return how many steps a survivor lost until it went on."""
    on = min(
        line.time
        for line in steps_of(lines)
        if line.generation >= event.generation and line.time > event.begin
    )
    return sum(line.kind == "discarded" and event.begin < line.time <= on for line in lines)


def _entry_ms(lines: Sequence[Line]) -> float:
    """Return the time from a new worker's being ready to its first finished step."""
    ready = next(line.time for line in lines if line.kind == "ready")
    return 1e3 * (steps_of(lines)[0].time - ready)


def _join(
    membership: Membership, *, before: Membership | None, begin: float, records: Records
) -> Event | None:
    if before is None or membership.cause != "join":
        return None
    steps = {worker: steps_of(records[worker]) for worker in membership.members}
    joined = tuple(w for w in steps if w not in before.members)
    survivors = tuple(w for w in steps if any(one.time <= begin for one in steps[w]))
    is_new = not set(joined) & set(survivors)
    went_on = all(
        sum(one.generation >= membership.number for one in steps[w]) > 1 for w in survivors
    )
    if not joined or not survivors or not (is_new and went_on):
        return None
    return Event(
        kind="join",
        begin=begin,
        generation=membership.number,
        survivors=survivors,
        joined=joined,
    )
