"""What the generations that a worker has heard of add up to. Pure.

Knows records; nothing of stores, groups or threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elastane.protocol import Generation

__all__ = ["History"]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All generations up to the newest.

    Attributes:
        newest: number 0 before there is one.
        dismissed: workers that were ever told to leave; none of them comes back.
        lost: for each worker that was ever lost, the newest generation that said so.
        mended: newest generation that had all meet again because a group broke, or 0.
    """

    newest: Generation = field(default_factory=Generation)
    dismissed: frozenset[int] = frozenset()
    lost: Mapping[int, int] = field(default_factory=dict[int, int])
    mended: int = 0

    def after(self, generation: Generation) -> History:
        """Return the history with one more generation; an older one changes nothing.

        Some in between may be missing, when a launcher has come back.
        """
        if generation.number <= self.newest.number:
            return self
        return History(
            newest=generation,
            dismissed=self.dismissed | set(generation.dismissed),
            lost={**self.lost, **dict.fromkeys(generation.lost, generation.number)},
            mended=generation.number if generation.cause == "broken" else self.mended,
        )

    def is_broken(self, members: Collection[int], *, since: int) -> bool:
        """Return whether a group of these members can't hold any longer.

        Args:
            members: of the group.
            since: generation that the group was opened for.

        Example:
            >>> history = History().after(Generation(number=3, members=(1, 2)))
            >>> history.is_broken((1, 2), since=3), history.is_broken((1, 2, 4), since=2)
            (False, True)
        """
        if self.newest.number <= since:
            return False
        gone = set(members) - {*self.newest.members, *self.dismissed}
        lost = any(self.lost.get(member, 0) > since for member in members)
        return bool(gone) or lost or self.mended > since
