"""How a worker's process ends while the job goes on: why, with what exit code, and saved or not.

Knows nothing of groups, or of who decides that it ends.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NoReturn

from elastane.group import Trainee

__all__ = ["LEFT_BEHIND", "ORPHANED", "SHARD_LOST", "Reason", "WorkerLeft", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a worker ends that nobody has asked to.

    Attributes:
        why: as a warning says it.
        code: the exit code.
    """

    why: str
    code: int


ORPHANED = Reason(
    why="there is no launcher any more: this worker writes a checkpoint and ends", code=75
)
"""No launcher came back in time."""
LEFT_BEHIND = Reason(
    why="the others went on without this worker while it was in session.evaluate: it ends, and "
    "another takes its place",
    code=76,
)
"""It is in an evaluation that it can't start over with the others."""
SHARD_LOST = Reason(
    why="another worker is gone, and with it its shard of the model: all workers end, and others "
    "go on from the newest checkpoint",
    code=76,
)
"""A part of the state is gone, without which no group can hold."""


class WorkerLeft(SystemExit):
    """Ends the process of a worker that has left the job, while the others go on."""


def leave(trainee: Trainee, *, save: bool, writes: bool, code: int) -> NoReturn:
    """End this process, with a checkpoint before if it can be written.

    Args:
        trainee: gives the state, and is told that this worker leaves.
        save: whether a checkpoint is made.
        writes: whether this process writes it, or only gives its part of the state.
        code: the exit code.

    Raises:
        WorkerLeft: always.
    """
    if save:
        try:
            trainee.save(writes=writes)
        except OSError as error:
            warnings.warn(f"no checkpoint was written on leaving: {error}", stacklevel=2)
    trainee.left()
    raise WorkerLeft(code)
