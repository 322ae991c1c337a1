"""Groups of a few members on this machine: opening one, a small sum, and copying a state.

Every member is a process; the library's own code opens, sums and copies. Knows nothing of models
of larger groups.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import run_together
from benchmarks.scale.forked import CONTEXT
from benchmarks.scale.store_cost import store_process
from elastane._compat import PrefixStore
from elastane.batching import World
from elastane.elastic.opening import open_beside
from elastane.elastic.transfer import receive_state, send_state
from elastane.launch.link import Store, connect
from elastane.peers import Breaker, Peers

__all__ = ["SHORT_ADDRESSES", "VECTOR_LENGTH", "measure_groups"]

VECTOR_LENGTH = 5
"""Float64 numbers of a step's small reduction with one group of parameters."""
SHORT_ADDRESSES = {
    "GLOO_ENABLE_STORE_V2_API": "1",
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1",
}
"""Gloo's members find each other by one short value each, read many at a time; without it a value
holds a number for each other member, and all read all of them one by one."""
_LIMIT_S = 120.0
_CPU = torch.device("cpu")


def measure_groups(
    sizes: Sequence[int], *, rounds: int, sums: int, state_bytes: int
) -> list[dict[str, Any]]:
    """Return what groups cost, a row for each size, medians over rounds that take turns.

    Args:
        sizes: numbers of members.
        rounds: in each of which a group of every size is opened anew.
        sums: small reductions in each.
        state_bytes: that the first member sends to the second; 0 for no copy.

    Returns:
        Rows; times from the last member's start to the last member's end, and the processor time
        of all members together. `opening_by_default_ms` is without `SHORT_ADDRESSES`,
        in groups that take turns with the others.
    """
    found: dict[int, list[list[dict[str, float]]]] = {size: [] for size in sizes}
    plain: dict[int, list[float]] = {size: [] for size in sizes}
    with store_process() as store:
        for number in range(rounds):
            for size in sizes:
                prefix = f"group/{number}/{size}"
                known = {"address": store.address, "size": size}
                short = _Group(
                    **known,
                    prefix=prefix,
                    sums=sums,
                    state_bytes=state_bytes,
                    environment=SHORT_ADDRESSES,
                )
                found[size].append(_round(short))
                one_by_one = _Group(**known, prefix=f"{prefix}/plain", sums=1)
                plain[size].append(_opening_ms(_round(one_by_one)))
    return [
        {
            **_row(size, some, state_bytes=state_bytes),
            "opening_by_default_ms": round(statistics.median(plain[size]), 3),
        }
        for size, some in found.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group that is to be measured: its keys in the store, its size, and what it does."""

    address: str
    prefix: str
    size: int
    sums: int
    state_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def _round(group: _Group) -> list[dict[str, float]]:
    """Return what each member of one group measured."""
    ranks = range(group.size)
    with tempfile.TemporaryDirectory(prefix="elastane-scale-") as folder:
        members = [CONTEXT.Process(target=_member, args=(rank, group, folder)) for rank in ranks]
        run_together(members, deadline=time.monotonic() + _LIMIT_S)
        codes = [one.exitcode for one in members]
        if any(codes):
            raise RuntimeError(f"the members of {group} ended with exit codes {codes}")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in ranks]


def _row(
    size: int, rounds: Sequence[Sequence[dict[str, float]]], *, state_bytes: int
) -> dict[str, Any]:
    opening = [_opening_ms(one) for one in rounds]
    opening_cpu = [1e3 * sum(member["open_cpu"] for member in one) for one in rounds]
    small = [max(member["sum_s"] for member in one) for one in rounds]
    small_cpu = [sum(member["sum_cpu"] for member in one) for one in rounds]
    row = {
        "workers": size,
        "rounds": len(rounds),
        "opening_ms": round(statistics.median(opening), 3),
        "opening_cpu_ms": round(statistics.median(opening_cpu), 3),
        "small_reduction_us": round(1e6 * statistics.median(small), 2),
        "small_reduction_cpu_us": round(1e6 * statistics.median(small_cpu), 2),
    }
    if state_bytes:
        copied = [one[1]["copy_s"] for one in rounds]
        row["copy_gb_per_s"] = round(state_bytes / statistics.median(copied) / 1e9, 3)
    return row


def _opening_ms(members: Sequence[dict[str, float]]) -> float:
    began = max(one["open_began"] for one in members)
    return 1e3 * (max(one["open_ended"] for one in members) - began)


def _member(rank: int, group: _Group, folder: str) -> None:
    """Be one member, and write what was measured."""
    torch.set_num_threads(1)
    os.environ.update(group.environment)  # gloo looks when a group is opened
    client, own = connect(group.address), connect(group.address)
    _meet(client, f"{group.prefix}/here", group.size)
    world, breaker = World(rank=rank, world_size=group.size), Breaker()
    cpu, began = time.process_time(), time.monotonic()
    opened = open_beside(
        lambda: PrefixStore(group.prefix, own), world=world, device=_CPU, breaker=breaker
    )
    ended, open_cpu = time.monotonic(), time.process_time() - cpu
    peers = Peers(opened, breaker=breaker)
    found = {"open_began": began, "open_ended": ended, "open_cpu": open_cpu}
    found |= _sum(peers, group.sums)
    if group.state_bytes and rank < 2:
        found["copy_s"] = _copy(peers, rank=rank, state_bytes=group.state_bytes)
    Path(folder, str(rank)).write_text(json.dumps(found))
    _meet(client, f"{group.prefix}/gone", group.size)


def _meet(client: Store, key: str, size: int) -> None:
    if client.add(key, 1) == size:
        client.set(f"{key}/all", "here")
    client.wait([f"{key}/all"])


def _sum(peers: Peers, sums: int) -> dict[str, float]:
    """Return the seconds of one small reduction, wall and processor."""
    vector = torch.ones(VECTOR_LENGTH, dtype=torch.float64)
    for _ in range(3):
        peers.sum(vector)
    times, cpu = [], time.process_time()
    for _ in range(sums):
        vector.fill_(1.0)
        began = time.perf_counter()
        peers.sum(vector)
        times.append(time.perf_counter() - began)
    cpu_s = (time.process_time() - cpu) / max(sums, 1)
    return {"sum_s": statistics.median(times), "sum_cpu": cpu_s}


def _copy(peers: Peers, *, rank: int, state_bytes: int) -> float:
    """Return the seconds in which the second member receives a state in place."""
    weights = torch.ones(state_bytes // 4)
    group, breaker = peers.group, peers.breaker
    began = 0.0
    for _ in range(2):  # the first one meets fresh pages
        began = time.perf_counter()
        if rank == 0:
            send_state({"weights": weights}, to=1, group=group, breaker=breaker)
        else:
            receive_state(source=0, group=group, into=[weights], breaker=breaker)
    return time.perf_counter() - began
