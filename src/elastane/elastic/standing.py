"""What members bring to a group, where each of them stands, and whose state each one takes. Pure.

Knows nothing of groups, models or how state is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastane.errors import CommunicationError

__all__ = ["TORN", "Entry", "Standing", "TornError", "sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a member brings to a group, and what it has after it entered.

    Attributes:
        turns: steps, evaluations and the like that it has ended with the others.
        outcome: of the last turn that was no step.
        is_current: whether its state is the job's; not that of a process that has just started,
            or was left behind.
        source: number of the member whose state was the most advanced.
        parts: where each member has a part of the state only: what it, and each of those that
            take their state from it, is to have, by rank. All of them were cut from the group
            before, so that nobody's state is another's.
        followed: turns behind which a newcomer stands that has followed a member; -1 if it has
            not: then it needs the whole state.
    """

    turns: int
    outcome: Any
    is_current: bool
    source: int = 0
    parts: Mapping[int, Any] = field(default_factory=dict[int, Any])
    followed: int = -1

    @property
    def is_torn(self) -> bool:
        """Whether nobody may take this state, its owner included."""
        return self.turns < 0


class TornError(CommunicationError):
    """A newcomer's state came only in part: it is worth less than none."""


TORN = Entry(turns=-1, outcome=None, is_current=False)
"""What a newcomer brings whose state is torn: nobody may take it, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a member stands, as all members know it of each other."""

    is_current: bool
    turns: int
    followed: int = -1


def sources(standings: Sequence[Standing]) -> list[int]:
    """Return for each member whose state it takes: its own, or one of the most advanced.

    The most advanced are the current members with most turns, or if none is current the lowest
    of those with most turns alone: then only one state can be the job's. Whoever needs a
    state takes one of the most advanced in turn, so that no one has to serve all.

    Args:
        standings: of each member, in the order of their ranks.

    Example:
        >>> ahead, behind = (Standing(is_current=True, turns=t) for t in (7, 6))
        >>> new = Standing(is_current=False, turns=0)
        >>> sources([behind, ahead, new, ahead])
        [1, 1, 3, 3]
    """
    ranks = range(len(standings))
    current = [rank for rank in ranks if standings[rank].is_current]
    most = max(standings[rank].turns for rank in current or ranks)
    ahead = [rank for rank in current or ranks if standings[rank].turns == most]
    if not current:
        ahead = ahead[:1]
    needy = [rank for rank in ranks if rank not in ahead]
    taken = {rank: ahead[place % len(ahead)] for place, rank in enumerate(needy)}
    return [taken.get(rank, rank) for rank in ranks]
