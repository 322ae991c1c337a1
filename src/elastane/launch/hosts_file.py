"""The file of hosts: which machines a job has, one a line. Pure.

    # a comment
    localhost slots=4
    node-1                  as many workers as the launcher was told with --slots, else 1
    somebody@node-2 slots=8

Knows the form of the file; nothing of how a machine is reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastane.errors import ArgumentError, describe

__all__ = ["Host", "HostsDiff", "diff_hosts", "parse_hosts", "shown"]

# A name that began with "-" would be an option of ssh; "/" would leave the folder of logs.
_NAME = re.compile(r"(?:\w[\w.-]*@)?[\w:\[][\w.:%\[\]-]*", re.ASCII)
_SLOTS = re.compile(r"slots=([1-9]\d{0,5})", re.ASCII)
_FORM = "must be HOST or HOST slots=N, N from 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A line of the file.

    Attributes:
        name: of the machine, as ssh takes it; no two lines have the same.
        slots: how many workers it may hold.
    """

    name: str
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsDiff:
    """What changed from one list of hosts to another; `changed` are those with other slots."""

    added: tuple[Host, ...] = ()
    removed: tuple[Host, ...] = ()
    changed: tuple[Host, ...] = ()


def parse_hosts(text: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    r"""Return the hosts of a file's text.

    A text that may be only the beginning of what somebody is writing is refused: one whose last
    line has no end, and one without any host.

    Raises:
        ArgumentError: the text breaks a rule. The message names line and rule.

    Example:
        >>> parse_hosts("# mine\nlocalhost slots=4\nnode-1\n")
        (Host(name='localhost', slots=4), Host(name='node-1', slots=1))
    """
    hosts: dict[str, Host] = {}
    for number, line in _lines(text):
        host = _parse_line(line, number=number, default_slots=default_slots)
        if host.name in hosts:
            rule = f"line {number}: this host has a line already"
            raise _refused(line, rule=rule, way_out="Give it one line, with all its slots.")
        hosts[host.name] = host
    if not hosts:
        way_out = "A job needs a machine; `elastane stop` ends it."
        raise _refused(text, rule="there is no host in it", way_out=way_out)
    return tuple(hosts.values())


def diff_hosts(before: Sequence[Host], after: Sequence[Host]) -> HostsDiff:
    """Return what changed.

    Example:
        >>> one, two = Host(name="one"), Host(name="two")
        >>> diff_hosts([one], [two, Host(name="one", slots=2)]).changed
        (Host(name='one', slots=2),)
    """
    old = {host.name: host for host in before}
    new = {host.name: host for host in after}
    return HostsDiff(
        added=tuple(host for name, host in new.items() if name not in old),
        removed=tuple(host for name, host in old.items() if name not in new),
        changed=tuple(host for name, host in new.items() if old.get(name, host) != host),
    )


def shown(diff: HostsDiff) -> str:
    """Return a difference in words, "" if there is none.

    Example:
        >>> shown(diff_hosts([Host(name="one")], [Host(name="two", slots=4)]))
        'two (4 slots) is new; one is gone'
    """
    parts = [
        *_part(diff.added, "new"),
        *([f"{_names(diff.removed)} {_is(diff.removed)} gone"] if diff.removed else []),
        *_part(diff.changed, "changed"),
    ]
    return "; ".join(parts)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and content of the lines that have any."""
    for number, whole in enumerate(text.splitlines(keepends=True), start=1):
        if not whole.endswith(("\n", "\r")):
            rule = f"line {number}: has no end, so the file may be half written"
            raise _refused(whole, rule=rule, way_out="End its last line too.")
        line = whole.partition("#")[0].strip()
        if line:
            yield number, line


def _parse_line(line: str, *, number: int, default_slots: int) -> Host:
    name, *options = line.split()
    slots = [_SLOTS.fullmatch(one) for one in options]
    if not _NAME.fullmatch(name) or len(slots) > 1 or None in slots:
        rule = f"line {number}: {_FORM}"
        raise _refused(line, rule=rule, way_out="For example: node-1 slots=4.")
    return Host(name=name, slots=int(slots[0][1]) if slots and slots[0] else default_slots)


def _refused(value: str, *, rule: str, way_out: str) -> ArgumentError:
    return ArgumentError(describe("hosts", value, rule=rule, way_out=way_out))


def _part(hosts: Sequence[Host], word: str) -> list[str]:
    if not hosts:
        return []
    sizes = ", ".join(f"{one.name} ({one.slots} slot{'s' * (one.slots != 1)})" for one in hosts)
    return [f"{sizes} {_is(hosts)} {word}"]


def _names(hosts: Iterable[Host]) -> str:
    return ", ".join(one.name for one in hosts)


def _is(hosts: Sequence[Host]) -> str:
    return "is" if len(hosts) == 1 else "are"
