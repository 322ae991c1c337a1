"""Under which address other machines reach this one, and through which interface it reaches them.

Knows names, routes and interfaces of the system; nothing of jobs.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["address_for", "interface_to", "is_loopback", "outward_address"]

_ANYWHERE = "192.0.2.1"  # kept for documentation, RFC 5737: only its route is asked for
_SIOCGIFCONF = 0x8912
_MAX_INTERFACES_BYTES = 1 << 16


def address_for(hosts: Iterable[str]) -> str:
    """Return this machine's address on the way to the first of these hosts that can be resolved.

    Where none can, the one on the way out; without a network this machine's name.
    """
    for host in hosts:
        source = _source_to(host.rpartition("@")[2])
        if source is not None:
            return source
    return outward_address()


def outward_address() -> str:
    """Return this machine's address on the way out, or without a network its name."""
    return _source_to(_ANYWHERE) or socket.gethostname()


def interface_to(host: str) -> str | None:
    """Return the interface that has this machine's address on the way to a host.

    `None` for the loopback, where the name can't be resolved, and where the system doesn't tell.
    """
    source = _source_to(host)
    if source is None or is_loopback(source):
        return None
    with suppress(OSError):
        for address, interface in (*_ipv4(), *_ipv6()):
            if address == source:
                return interface
    return None


def is_loopback(address: str) -> bool:
    """Return whether a numeric address is one that no other machine reaches."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _source_to(host: str) -> str | None:
    """Return the address that packets to a host would bear; nothing is sent."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return None


def _ipv4() -> Iterator[tuple[str, str]]:
    """Yield address and interface; a second address of an interface has a label after a colon."""
    buffer = array.array("B", bytes(_MAX_INTERFACES_BYTES))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    size = 16 + max(16, 2 * struct.calcsize("P") + 8)
    for start in range(0, length, size):
        entry = buffer[start : start + size].tobytes()
        name = entry[:16].rstrip(b"\0").decode().partition(":")[0]
        yield socket.inet_ntoa(entry[20:24]), name


def _ipv6() -> Iterator[tuple[str, str]]:
    path = Path("/proc/net/if_inet6")
    for line in path.read_text().splitlines() if path.exists() else []:
        digits, *_, name = line.split()
        yield str(ipaddress.IPv6Address(int(digits, 16))), name
