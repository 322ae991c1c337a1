"""From measured constants and simulated decisions to a row for each number of workers and network.

Also what the model says of the sizes that were measured, and where the design breaks first.
Knows no clock and no process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale import model
from benchmarks.scale.members import VECTOR_LENGTH
from benchmarks.scale.model import Group, Network, StoreCost
from benchmarks.scale.simulated import BEAT_S, SLOTS
from elastane.launch.decider import LOOK_S
from elastane.launch.launcher import HEARTBEATS_A_LIMIT
from elastane.roster import Rules

__all__ = ["Constants", "checks", "constants_of", "limits", "predict"]

Row = dict[str, Any]
STATE_BYTES = {"10M": 10e6 * 8, "1B": 1e9 * 8}
"""Of a model of so many float32 parameters with momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All that the formulas take from this machine and from the description of a network."""

    networks: Sequence[Network]
    group: Group
    store: StoreCost


def constants_of(
    store: Mapping[str, Any],
    groups: Sequence[Row],
    *,
    processors: int,
    ethernet_gbit: float,
    ethernet_round_trip_us: float,
    store_gb_per_s: float,
) -> Constants:
    """Return the constants; the sums and openings of the two smallest groups give theirs.

    Opening: `cpu(N) = N m + N (N - 1) / 2 p`, solved for `m` and `p` at both sizes. A sum of two
    workers is two hops, one after the other.

    Args:
        store: of `measure_store`.
        groups: of `measure_groups`, smallest first, the first of two workers.
        processors: of this machine.
        ethernet_gbit: bandwidth of the named network.
        ethernet_round_trip_us: of the wire.
        store_gb_per_s: at which the store's thread hands out long values; this one is assumed.
    """
    two, next_one = groups[0], groups[1]
    few, more = two["workers"], next_one["workers"]
    own = two["opening_cpu_ms"] / few, next_one["opening_cpu_ms"] / more
    pair_ms = max(2 * (own[1] - own[0]) / (more - few), 0.0)
    member_ms = max(own[0] - (few - 1) / 2 * pair_ms, 0.0)
    messages = model.ring_messages(few, elements=VECTOR_LENGTH)
    hop_s = 1e-6 * two["small_reduction_us"] / (2 * (few - 1))
    wire_s = 1e-6 * ethernet_round_trip_us
    copy = 1e9 * two["copy_gb_per_s"]
    service = store["service_us"]
    return Constants(
        networks=(
            Network(name="loopback", latency_s=hop_s, bandwidth=copy, processors=processors),
            Network(
                name=f"{ethernet_gbit:g} Gbit/s Ethernet",
                latency_s=hop_s + wire_s / 2,
                bandwidth=min(copy, ethernet_gbit * 1e9 / 8),
                round_trip_s=wire_s,
            ),
        ),
        group=Group(
            member_s=1e-3 * member_ms,
            pair_s=1e-3 * pair_ms,
            message_s=1e-6 * two["small_reduction_cpu_us"] / messages,
        ),
        store=StoreCost(
            query_s=1e-6 * service["wait"],
            key_s=1e-6 * service["multi_get key"],
            byte_s=1e-9 / store_gb_per_s,
        ),
    )


def predict(
    workers: int, network: Network, constants: Constants, decided: Mapping[str, Row]
) -> Row:
    """Return a row of what a job of so many workers would cost on a network.

    Args:
        workers: in it.
        network: between them.
        constants: of this machine.
        decided: the simulated launcher's costs by change.
    """
    group, store = constants.group, constants.store
    small_s = model.ring_s(workers, elements=VECTOR_LENGTH, network=network, group=group)
    meeting_s = model.meeting_store_s(workers, store=store, every_arrival=False)
    mesh_s = model.mesh_store_s(workers, store=store, batched=True)
    connect_s = model.connect_s(workers, network=network, group=group)
    gather_s = model.gather_s(workers, network=network, group=group)
    decision_ms = decided["a worker dies"]["decide_ms"]
    regroup_ms = decision_ms + 1e3 * (meeting_s + mesh_s + connect_s + gather_s)
    ops, keys = store_load(workers, decided["none"])
    return {
        "workers": workers,
        "network": network.name,
        "small_reduction_us": round(1e6 * small_s, 1),
        "of_a_tree_us": round(1e6 * model.tree_s(workers, network=network), 1),
        "regroup_ms": round(regroup_ms, 3),
        "of_that_decision_ms": round(decision_ms, 3),
        "of_that_store_ms": round(1e3 * (meeting_s + mesh_s), 3),
        "of_that_connect_ms": round(1e3 * connect_s, 3),
        "of_that_standings_ms": round(1e3 * gather_s, 3),
        "store_ms_as_gloo_does_by_default": round(
            1e3
            * (
                model.meeting_store_s(workers, store=store, every_arrival=True)
                + model.mesh_store_s(workers, store=store, batched=False)
            ),
            3,
        ),
        "transfer_ms": {
            name: round(
                1e3
                * model.transfer_s(size, joiners=1, sources=max(workers - 1, 1), network=network),
                2,
            )
            for name, size in STATE_BYTES.items()
        },
        "decision_ms": round(decision_ms, 3),
        "launcher_load": decided["none"]["load"],
        "store_ops_per_s": round(ops),
        "store_load": round(model.steady_store_share(ops, keys, store=store), 5),
    }


def store_load(workers: int, quiet: Row) -> tuple[float, float]:
    """Return requests and keys a second at the store while nothing changes."""
    looks = 1 / LOOK_S
    ops = model.steady_store_ops(
        workers,
        machines=math.ceil(workers / SLOTS),
        beat_s=BEAT_S,
        heartbeat_s=Rules().heartbeat_limit_s / HEARTBEATS_A_LIMIT,
        look_round_trips=looks * quiet["store_round_trips"],
    )
    return ops, looks * quiet["store_keys"]


def checks(groups: Sequence[Row], constants: Constants) -> list[Row]:
    """Return what the model says of the groups that were measured, over what was measured.

    The smallest two gave the constants; the others are predicted. Wall times of a machine that is
    shared with others are longer than the model's.
    """
    network, rows = constants.networks[0], []
    for row in groups:
        workers = row["workers"]
        known: dict[str, Any] = {"network": network, "group": constants.group}
        small_us = 1e6 * model.ring_s(workers, elements=VECTOR_LENGTH, **known)
        store_s = model.mesh_store_s(workers, store=constants.store, batched=True)
        opening_ms = 1e3 * (model.connect_s(workers, **known) + store_s)
        rows += [
            _check(workers, "small_reduction_us", small_us, row["small_reduction_us"]),
            _check(workers, "opening_ms", opening_ms, row["opening_ms"]),
        ]
    return rows


def _check(workers: int, what: str, predicted: float, measured: float) -> Row:
    return {
        "workers": workers,
        "what": what,
        "predicted": round(predicted, 2),
        "measured": measured,
        "predicted / measured": round(predicted / measured, 3),
    }


_LIMITS: Mapping[str, tuple[float, Callable[[Row], float]]] = {
    "small_reduction": (10.0, lambda row: 1e-3 * row["small_reduction_us"]),
    "regroup": (1_000.0, lambda row: row["regroup_ms"]),
    "store_of_regroup": (1_000.0, lambda row: row["of_that_store_ms"]),
    "store_of_regroup_by_default": (
        1_000.0,
        lambda row: row["store_ms_as_gloo_does_by_default"],
    ),
    "connect": (1_000.0, lambda row: row["of_that_connect_ms"]),
    "launcher": (0.5, lambda row: row["launcher_load"]),
    "store": (0.5, lambda row: row["store_load"]),
}


def limits(rows: Sequence[Row]) -> list[Row]:
    """Return at which number of workers each part passes what is borne, for one network.

    The number lies where a straight line between the logarithms of two rows crosses the limit;
    `None` if none of the rows does.

    Args:
        rows: of one network, smallest first.
    """
    return [
        {"part": part, "borne": borne, "workers": _crossing(rows, value, borne)}
        for part, (borne, value) in _LIMITS.items()
    ]


def _crossing(rows: Sequence[Row], value: Callable[[Row], float], borne: float) -> int | None:
    before = None
    for row in rows:
        n, cost = row["workers"], value(row)
        if cost > borne:
            if before is None:
                return n
            share = math.log(borne / before[1]) / math.log(cost / before[1])
            return round(before[0] * (n / before[0]) ** share)
        before = n, cost
    return None
