"""Where the members of a generation wait for each other before they open a group.

A group that is opened while a member is missing would block until its time-out. Here nobody blocks:
who waits looks every few milliseconds whether a newer generation has made the meeting idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from elastane import protocol
from elastane._compat import TCPStore
from elastane.elastic.link import Link
from elastane.elastic.team import Team
from elastane.errors import CommunicationError
from elastane.protocol import Generation

__all__ = ["Arrival", "Meetings", "Superseded", "meet", "participants"]

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.01
_WAIT_PER_MEMBER_S = 0.0001  # all together ask the store at most 10,000 times a second


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
) -> tuple[int, ...]:
    """Wait for all members of a generation; return who opens a group.

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
        if arrival is Arrival.EVALUATING:
            reached.add(f"{meeting}/evaluating", 1)
        all_came = _wait_for_all(reached, meeting, num=len(members), is_superseded=is_superseded)
        # The first to say so decides for all: else some would open the group, and wait for others.
        outcome = reached.compare_set(f"{meeting}/outcome", "", "met" if all_came else "given up")
        if outcome == b"met":
            if not reached.add(f"{meeting}/evaluating", 0):
                return tuple(members)  # to read how each came would be N keys for each of N
            found = reached.multi_get([f"{meeting}/{member}" for member in members])
            come = zip(members, found, strict=True)
            return participants({member: Arrival(text.decode()) for member, text in come})
    except (OSError, RuntimeError) as error:
        raise CommunicationError(f"the store is gone, {error}") from error
    raise Superseded


def _wait_for_all(
    store: TCPStore, meeting: str, *, num: int, is_superseded: Callable[[], bool]
) -> bool:
    """Say that one more is there; return whether all came before the meeting became idle."""
    present = store.add(meeting, 1)
    wait_s, longest_s = _SHORTEST_WAIT_S, max(_LONGEST_WAIT_S, num * _WAIT_PER_MEMBER_S)
    while present < num and not is_superseded():
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_s)
        present = store.add(meeting, 0)
    return present >= num


def participants(arrivals: Mapping[int, Arrival]) -> tuple[int, ...]:
    """Return who opens a group: all, or without the newcomers while an evaluation is repeated."""
    if Arrival.EVALUATING not in arrivals.values():
        return tuple(arrivals)
    return tuple(m for m, arrival in arrivals.items() if arrival is not Arrival.NEWCOMER)


class Meetings:
    """A worker's meetings with others; of its processes the leader goes, and tells what came of it.

    Args:
        link: to the supervisor and the store.
        worker: own id.
        team: the worker's processes.

    Attributes:
        generation: number of the generation that this worker has met the others for last.
        number: of the last meeting for that.
    """

    def __init__(self, link: Link, *, worker: int, team: Team) -> None:
        self._link = link
        self._worker = worker
        self._team = team
        self.generation = self.number = 0

    def come(self, generation: Generation, *, arrival: Arrival) -> tuple[int, ...]:
        """Wait for the other members; return who takes part, this worker among them.

        Raises:
            Superseded: there is a newer generation.
            CommunicationError: the store is gone.
        """
        if self.generation != generation.number:
            self.generation, self.number = generation.number, 0
        told = self._team.told(lambda: self._await_others(generation, arrival=arrival))
        self.number = told["number"]
        if told["is_superseded"]:
            raise Superseded
        if told["why"]:
            raise CommunicationError(told["why"])
        return tuple(told["taking_part"])

    def _await_others(self, generation: Generation, *, arrival: Arrival) -> dict[str, Any]:
        """Return who takes part, or why it is not known, as JSON."""
        taking_part, is_superseded, why = (), False, ""
        try:
            taking_part = self._taking_part(generation, arrival=arrival)
        except Superseded:
            is_superseded = True
        except CommunicationError as error:
            why = str(error)
        return {
            "number": self.number,
            "taking_part": taking_part,
            "is_superseded": is_superseded,
            "why": why,
        }

    def _taking_part(self, generation: Generation, *, arrival: Arrival) -> tuple[int, ...]:
        if generation.members == (self._worker,):
            return generation.members
        taking_part: tuple[int, ...] = ()
        while self._worker not in taking_part:
            self.number += 1
            taking_part = meet(
                self._link.store,
                generation=generation.number,
                number=self.number,
                worker=self._worker,
                members=generation.members,
                arrival=arrival,
                is_superseded=lambda: self._link.history.newest.number > generation.number,
            )
        return taking_part
