"""What a receiver of events looks like.

Knows nothing of where events come from or go to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """A receiver of events. Any object with these two methods will do."""

    def write(self, event: Mapping[str, object], /) -> None:
        """Take one event; must not change it, and must pass over kinds that it doesn't know."""
        ...

    def close(self) -> None:
        """Finish and let go of files and terminals; closing twice is harmless."""
        ...
