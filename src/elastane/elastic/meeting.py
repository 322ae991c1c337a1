"""Where the members of a generation wait for each other before they open a group.

A group that is opened while a member is missing would block until its time-out. Here nobody blocks:
who waits looks every few milliseconds whether a newer generation has made the meeting idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from elastane import protocol
from elastane._compat import TCPStore
from elastane.errors import CommunicationError

__all__ = ["Arrival", "Superseded", "meet", "participants"]

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.01


class Superseded(CommunicationError):
    """A newer generation has made the present one idle."""


class Arrival(StrEnum):
    """How a member comes to a meeting."""

    CURRENT = "current"
    """It has trained in an earlier generation."""
    EVALUATING = "evaluating"
    """So it has, and it will start an evaluation over, which newcomers can't take part in."""
    NEWCOMER = "newcomer"
    """It needs another member's state."""


def meet(
    store: Callable[[], TCPStore],
    *,
    generation: int,
    number: int,
    worker: int,
    members: Sequence[int],
    arrival: Arrival,
    is_superseded: Callable[[], bool],
) -> dict[int, Arrival]:
    """Wait for all members of a generation; return how each has come.

    Args:
        store: reaches the job's.
        generation: number of the generation.
        number: of the meeting within the generation, from 1.
        worker: own id.
        members: ids of all.
        arrival: how this worker comes.
        is_superseded: whether there is a newer generation.

    Raises:
        Superseded: there is.
        CommunicationError: the store is gone.
    """
    meeting = f"{protocol.meeting_key(generation)}/{number}"
    try:
        reached = store()
        reached.set(f"{meeting}/{worker}", arrival)
        all_came = _wait_for_all(reached, meeting, num=len(members), is_superseded=is_superseded)
        # The first to say so decides for all: else some would open the group, and wait for others.
        outcome = reached.compare_set(f"{meeting}/outcome", "", "met" if all_came else "given up")
        if outcome == b"met":
            found = reached.multi_get([f"{meeting}/{member}" for member in members])
            return {m: Arrival(text.decode()) for m, text in zip(members, found, strict=True)}
    except (OSError, RuntimeError) as error:
        raise CommunicationError(f"the store is gone, {error}") from error
    raise Superseded


def _wait_for_all(
    store: TCPStore, meeting: str, *, num: int, is_superseded: Callable[[], bool]
) -> bool:
    """Say that one more is there; return whether all came before the meeting became idle."""
    present = store.add(meeting, 1)
    wait_s = _SHORTEST_WAIT_S
    while present < num and not is_superseded():
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        present = store.add(meeting, 0)
    return present >= num


def participants(arrivals: Mapping[int, Arrival]) -> tuple[int, ...]:
    """Return who opens a group: all, or without the newcomers while an evaluation is repeated."""
    if Arrival.EVALUATING not in arrivals.values():
        return tuple(arrivals)
    return tuple(m for m, arrival in arrivals.items() if arrival is not Arrival.NEWCOMER)
