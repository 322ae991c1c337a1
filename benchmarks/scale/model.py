"""What a group of any size would cost on a network: formulas of latency, bandwidth and processors.

Pure arithmetic of measured constants; a sentence with each formula says what it leaves out.

The facts on gloo are those of torch 2.13: its all-reduce is a ring whatever the size
(gloo/allreduce.cc), and a group is a full mesh whose members find each other through one key each
in the store (gloo/transport/tcp/context.cc, `Context::createAndConnectAllPairs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "Group",
    "Network",
    "StoreCost",
    "connect_s",
    "gather_s",
    "meeting_store_s",
    "mesh_store_s",
    "ring_messages",
    "ring_s",
    "steady_store_ops",
    "steady_store_share",
    "transfer_s",
    "tree_s",
]

_MESH_BATCH = 128
_ELEMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between workers.

    Attributes:
        name: of it.
        latency_s: alpha, from one worker's send to the other's having it, threads included.
        bandwidth: beta, bytes a second of one worker's state copy.
        round_trip_s: of the wire alone, for a connection's handshake; 0 on one machine.
        processors: that all workers share, or `None` where each has its own.
    """

    name: str
    latency_s: float
    bandwidth: float
    round_trip_s: float = 0.0
    processors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    """Of the store's one thread.

    Attributes:
        query_s: for a request with a short answer.
        key_s: for each further key of a request for many.
        byte_s: for each byte of a value.
    """

    query_s: float
    key_s: float
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What building and using a group costs processors.

    Attributes:
        member_s: processor time of a member's own part of opening it.
        pair_s: processor time of both ends of a connection.
        message_s: processor time of both ends of a small message.
    """

    member_s: float
    pair_s: float
    message_s: float


def ring_messages(workers: int, *, elements: int) -> int:
    """Return how many messages all workers send in gloo's ring all-reduce of a small vector.

    The vector is cut into segments of `c = max(1, ceil(v / 2N))` elements, and each of the
    `ceil(v / c)` segments makes `N - 1` hops in either half: `2 (N - 1) ceil(v / c)`.

    Example:
        >>> ring_messages(2, elements=5), ring_messages(8, elements=5)
        (6, 70)
    """
    num_bytes = _ELEMENT_BYTES * elements
    segment_bytes = -(-num_bytes // (2 * workers))
    segment = -(-segment_bytes // _ELEMENT_BYTES)
    return 2 * (workers - 1) * math.ceil(elements / segment)


def ring_s(workers: int, *, elements: int, network: Network, group: Group) -> float:
    """Return the seconds of a ring all-reduce of a small vector.

    The longer of `2 (N - 1) alpha`, the hops that follow each other, and of all messages'
    processor time over the processors that the workers share. The bytes are too few to count.

    Example:
        >>> net = Network(name="", latency_s=1e-4, bandwidth=1e9)
        >>> group = Group(member_s=0, pair_s=0, message_s=0)
        >>> round(ring_s(11, elements=5, network=net, group=group), 6)
        0.002
    """
    path = 2 * (workers - 1) * network.latency_s
    if network.processors is None:
        return path
    work = ring_messages(workers, elements=elements) * group.message_s
    return max(path, work / min(network.processors, workers))


def tree_s(workers: int, *, network: Network) -> float:
    """Return the seconds of an all-reduce of a small vector up and down a binary tree.

    `2 ceil(log2 N) alpha`: what nccl does with small vectors, and a group over groups could.

    Example:
        >>> round(tree_s(1000, network=Network(name="", latency_s=1e-4, bandwidth=1e9)), 6)
        0.002
    """
    return 2 * math.ceil(math.log2(workers)) * network.latency_s


def gather_s(workers: int, *, network: Network, group: Group) -> float:
    """Return the seconds in which all workers learn a small row of each: a ring of `N - 1` hops.

    As `ring_s`, with `N (N - 1)` messages.
    """
    path = (workers - 1) * network.latency_s
    if network.processors is None:
        return path
    work = workers * (workers - 1) * group.message_s
    return max(path, work / min(network.processors, workers))


def meeting_store_s(workers: int, *, store: StoreCost, every_arrival: bool) -> float:
    """Return the store's seconds for a generation's news and its members' meeting.

    Each member is woken and reads the generation (2 queries and its reading, 1), says how it
    comes and that it is there (2), reads the outcome (1) and tells that it has entered (2): 8
    queries. If `every_arrival`, it also reads how each of the others came: `N` keys.
    """
    queries = 8 * store.query_s
    keys = workers * store.key_s if every_arrival else store.query_s
    return workers * (queries + keys)


def mesh_store_s(workers: int, *, store: StoreCost, batched: bool) -> float:
    """Return the store's seconds while a gloo group is built: each member reads each one's key.

    One by one a key takes 3 queries (wait, and a read that waits first), and each member's value
    holds a number for each member: `N^2 (3 q + (154 + 8 N) b)`. Batched, with numbers that are
    ranks: `N (2 q ceil(N / 128) + N k)` with the bytes of 154 in `k`.
    """
    if batched:
        requests = 2 * math.ceil(workers / _MESH_BATCH)
        return workers * (requests * store.query_s + workers * store.key_s)
    value_bytes = 154 + 8 * workers
    return workers**2 * (3 * store.query_s + value_bytes * store.byte_s)


def connect_s(workers: int, *, network: Network, group: Group) -> float:
    """Return the seconds in which a full mesh connects, its reading of the store apart.

    A member connects to the others one after the other and waits for each, so on own processors
    `m + (N - 1) (p / 2 + round trip)`, and on shared ones `(N m + N (N - 1) / 2 p) / processors`.
    """
    if network.processors is None:
        each = group.pair_s / 2 + network.round_trip_s
        return group.member_s + (workers - 1) * each
    pairs = workers * (workers - 1) / 2
    work = workers * group.member_s + pairs * group.pair_s
    return work / min(network.processors, workers)


def transfer_s(state_bytes: float, *, joiners: int, sources: int, network: Network) -> float:
    """Return the seconds in which joiners receive a state, dealt over the sources in turn.

    `alpha + ceil(j / s) n / beta`: a source serves its joiners over one link; on one machine all
    copies share the memory, so there `j n / beta`.

    Example:
        >>> net = Network(name="", latency_s=0.0, bandwidth=1e9)
        >>> transfer_s(4e9, joiners=3, sources=2, network=net)
        8.0
    """
    turns = math.ceil(joiners / sources) if network.processors is None else joiners
    return network.latency_s + turns * state_bytes / network.bandwidth


def steady_store_ops(
    workers: int, *, machines: int, beat_s: float, heartbeat_s: float, look_round_trips: float
) -> float:
    """Return the store's requests a second while nothing changes.

    A set of each worker every `beat_s`, a count of each machine every `heartbeat_s`, and the
    launcher's own, already a second's.
    """
    return workers / beat_s + machines / heartbeat_s + look_round_trips


def steady_store_share(ops_per_s: float, keys_per_s: float, *, store: StoreCost) -> float:
    """Return the share of the store's thread that the requests and keys of a second take."""
    return ops_per_s * store.query_s + keys_per_s * store.key_s
