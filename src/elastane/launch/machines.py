"""From what was asked for to the job's address, and to the watcher of its machines.

Knows options; nothing of how a machine is reached, or of what is done there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from elastane.errors import ArgumentError, describe
from elastane.launch.addresses import address_for, is_loopback, outward_address
from elastane.launch.console import Console
from elastane.launch.folder import LauncherRecord
from elastane.launch.hosts import HostsJob, HostsWatcher
from elastane.launch.hosts_plan import PlanRules
from elastane.launch.link import parse_address
from elastane.launch.options import RunOptions
from elastane.launch.ssh import Reach, is_local

__all__ = ["advertised", "host_and_port", "joinable", "local", "port_of", "watcher"]

_HERE = "127.0.0.1"


def host_and_port(host: str, port: int) -> str:
    """Return HOST:PORT.

    Example:
        >>> host_and_port("node-1", 29400), host_and_port("::1", 29400)
        ('node-1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local(port: int) -> str:
    """Return the address of a port for processes on this machine."""
    return host_and_port(_HERE, port)


def port_of(record: LauncherRecord, *, asked: int) -> int:
    """Return the port of the store: the one at which workers that live on look for it.

    Raises:
        ArgumentError: another one was asked for.
    """
    known = parse_address(record.store)[1] if record.store else 0
    if asked and known and asked != known:
        rule = f"the job of this folder is at port {known}, where its workers look for it"
        way_out = "Leave it out; only a job that has ended may come back elsewhere."
        raise ArgumentError(describe("port", asked, rule=rule, way_out=way_out))
    return known or asked


def advertised(options: RunOptions, *, port: int) -> str:
    """Return the address under which all of the job's machines reach its store."""
    remote = [one.name for one in options.hosts.hosts] if options.hosts else []
    remote = [name for name in remote if not is_local(name)]
    default = address_for(remote) if remote else _HERE
    return host_and_port(options.advertise or default, port)


def joinable(store: str) -> str:
    """Return the store's address as another machine would best reach it."""
    host, port = parse_address(store)
    return host_and_port(outward_address() if is_loopback(host) else host, port)


def watcher(
    options: RunOptions,
    *,
    record: LauncherRecord,
    run_dir: Path,
    console: Console,
    is_over: Callable[[], bool],
) -> HostsWatcher:
    """Return what keeps agents on the machines of the file of hosts."""
    given = options.hosts
    assert given is not None
    reach = Reach(
        store=record.store,
        script=options.script,
        folder=Path.cwd(),
        python=given.python or sys.executable,
        own_python=sys.executable,
        ssh=given.ssh,
        prepare=given.prepare,
    )
    rules = PlanRules(
        silence_limit_s=options.rules.heartbeat_limit_s, prepares=given.prepare is not None
    )
    job = HostsJob(
        job=record.job,
        run_dir=run_dir,
        address=local(parse_address(record.store)[1]),
        default_slots=given.default_slots,
        reach=reach,
        rules=rules,
    )
    say, follow = console.say, console.follow_file
    return HostsWatcher(
        given.path, job=job, hosts=given.hosts, is_over=is_over, say=say, follow=follow
    )
