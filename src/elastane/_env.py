"""The one file that reads the environment: what a launcher says of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launch", "launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What torchrun, or a launcher like it, set for this process."""

    rank: int
    world_size: int


def launch() -> Launch | None:
    """Return the launcher's settings, or `None` under plain python."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None or "MASTER_ADDR" not in os.environ:
        return None
    return Launch(rank=int(rank), world_size=int(world_size))
