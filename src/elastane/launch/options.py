"""What `elastane run` was asked for, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastane.launch.hosts_file import Host
from elastane.roster import Rules

__all__ = ["HostsOptions", "RunOptions", "default_most"]

_LEAST_MOST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOptions:
    """What was asked for about a file of hosts.

    Attributes:
        path: of the file.
        hosts: what it says at the start.
        default_slots: slots of a line that doesn't say.
        ssh: words of the command that takes a host and a command line.
        python: path of the interpreter on other machines, `None` for that of this one.
        prepare: to be done on a machine before an agent starts there.
    """

    path: Path
    hosts: Sequence[Host]
    default_slots: int
    ssh: Sequence[str]
    python: str | None = None
    prepare: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `elastane run` was asked for.

    Attributes:
        command: program and arguments of a worker.
        script: the part of it that is the same on all machines: the script and its arguments.
        name: what a job without a name of its own is called after.
        rules: what the job keeps to.
        initial: how many workers are wanted at first, `None` for the most.
        slots: how many workers this machine may hold, `None` for the most.
        run_dir: the run's folder, `None` for one of its own under `runs`.
        job: its name, or `None`.
        port: of the store, 0 for a free one.
        advertise: address under which other machines reach this one, `None` for what is needed.
        orphan_limit_s: seconds without a launcher after which workers end.
        group_size: processes of a worker, `None` for 1, or on a machine that joins the launcher's.
        hosts: the machines that the launcher starts agents on.
        agent: id of the agent, `None` for one after its machine.
        lifeline: whether the agent was started by a launcher, which holds its standard input.
    """

    command: Sequence[str]
    script: Sequence[str]
    name: str
    rules: Rules
    initial: int | None = None
    slots: int | None = None
    run_dir: Path | None = None
    job: str | None = None
    port: int = 0
    advertise: str | None = None
    orphan_limit_s: float = 300.0
    group_size: int | None = None
    hosts: HostsOptions | None = None
    agent: str | None = None
    lifeline: bool = False


def default_most(hosts: Sequence[Host]) -> int:
    """Return how many workers a job on these hosts may have unless it is said: room to grow.

    Example:
        >>> default_most([Host(name="node-1", slots=4)]), default_most([Host(name="a", slots=16)])
        (16, 32)
    """
    return max(_LEAST_MOST, 2 * sum(host.slots for host in hosts))
