"""What is done to a job, kind by kind, and what it cost.

Knows the driver's hold on a job and the measure; starts and ends no job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.resize.job import RunningJob, StalledError
from benchmarks.resize.measure import Change, Event, Membership, joins, measure

__all__ = ["KINDS_OF", "PHASES", "Phase", "run_phase"]

Phase = Callable[[RunningJob, int, int], Iterator[Event]]
Choice = Callable[[Sequence[int], int], Sequence[int]]


def run_phase(
    name: str, job: RunningJob, *, changes: int, most_workers: int
) -> tuple[list[Change], StalledError | None]:
    """Do what a phase does to a job, and return what each change cost.

    Args:
        name: of the phase.
        job: that runs.
        changes: of each kind, at least.
        most_workers: that the job may have.

    Returns:
        The changes, and how the last one never came to its end, if that happened.
    """
    known = max(len(job.memberships) - 1, 0)
    events: list[Event] = []
    stall: StalledError | None = None
    try:
        job.steady(most_workers)
        for event in PHASES[name](job, changes, most_workers):
            events.append(event)
    except StalledError as error:
        stall = error
    kind = "join" if name == "planned" else "refill"
    came = joins(job.memberships[known:], job.records, kind=kind)
    return [measure(event, job.records) for event in [*events, *came]], stall


def _planned(job: RunningJob, changes: int, most_workers: int) -> Iterator[Event]:
    """Go down to one worker and up again, one by one; the joins are found in the memberships."""
    down = list(range(most_workers, 1, -1))
    for _ in range(-(-changes // len(down))):
        for size in down:
            yield _leave(job, size)
        for size in reversed(down):
            job.steady(size)


def _leave(job: RunningJob, size: int) -> Event:
    before = job.steady(size)
    leaver = max(before.members)
    begin = time.monotonic()
    job.scale(size - 1)
    survivors = tuple(w for w in before.members if w != leaver)
    return _event("leave", job=job, begin=begin, before=before, survivors=survivors)


def _losses(kind: str, choose: Choice, *, fewest: int) -> Phase:
    """Return a phase that kills workers; there are fewer and fewer, and then most again.

    Args:
        kind: of the events.
        choose: returns who dies, of the members by rank and the number of the change.
        fewest: members of which some are to survive.
    """

    def phase(job: RunningJob, changes: int, most_workers: int) -> Iterator[Event]:
        for number, size in enumerate(_sizes(changes, most=most_workers, fewest=fewest)):
            yield _lose(kind, choose, job=job, size=size, number=number)

    return phase


def _lose(kind: str, choose: Choice, *, job: RunningJob, size: int, number: int) -> Event:
    before = job.steady(size)
    victims = choose(before.members, number)
    begin = time.monotonic()
    job.signal(victims, signal.SIGKILL)
    survivors = tuple(w for w in before.members if w not in victims)
    return _event(kind, job=job, begin=begin, before=before, survivors=survivors)


def _hang(job: RunningJob, changes: int, most_workers: int) -> Iterator[Event]:
    for number, size in enumerate(_sizes(changes, most=most_workers, fewest=2)):
        yield _stop(job, size, number)


def _stop(job: RunningJob, size: int, number: int) -> Event:
    """Stop a worker until the others have gone on without it; it may come back then."""
    before = job.steady(size)
    victim = before.members[number % size]
    begin = time.monotonic()
    job.signal([victim], signal.SIGSTOP)
    survivors = tuple(w for w in before.members if w != victim)
    try:
        event = _event("hang", job=job, begin=begin, before=before, survivors=survivors)
        return replace(event, limit_s=job.hang_limit_s)
    finally:
        job.signal([victim], signal.SIGCONT)


def _event(
    kind: str,
    *,
    job: RunningJob,
    begin: float,
    before: Membership,
    survivors: tuple[int, ...],
) -> Event:
    """Wait until the survivors have gone on, and return what happened."""
    after = job.went_on(survivors, since=before)
    return Event(
        kind=kind,
        begin=begin,
        generation=after.number,
        survivors=survivors,
    )


def _sizes(changes: int, *, most: int, fewest: int) -> list[int]:
    """Return how many workers there are before each change: fewer and fewer, then most again."""
    return [most - number % (most - fewest + 1) for number in range(changes)]


def _another_rank(members: Sequence[int], number: int) -> Sequence[int]:
    return [members[1 + number % (len(members) - 1)]]


def _rank_0(members: Sequence[int], _number: int) -> Sequence[int]:
    return [members[0]]


def _two_ranks(members: Sequence[int], number: int) -> Sequence[int]:
    return [members[(number + place) % len(members)] for place in (0, 1)]


PHASES: dict[str, Phase] = {
    "planned": _planned,
    "kill": _losses("kill", _another_rank, fewest=2),
    "kill_rank0": _losses("kill_rank0", _rank_0, fewest=2),
    "kill_two": _losses("kill_two", _two_ranks, fewest=3),
    "hang": _hang,
}

KINDS_OF = {name: (name,) for name in PHASES} | {"planned": ("leave", "join")}
