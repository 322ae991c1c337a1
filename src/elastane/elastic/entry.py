"""Entering a generation: open its group, find who is ahead, copy state to whoever is not.

One function, for members that have met already. Knows nothing of the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elastane._compat import PrefixStore, TCPStore
from elastane.batching import World
from elastane.elastic.cut import cut, put_together
from elastane.elastic.opening import open_group
from elastane.elastic.sockets import GroupSockets
from elastane.elastic.transfer import receive_state, send_state
from elastane.errors import CommunicationError, StateError
from elastane.group import Trainee, Wrapping
from elastane.peers import Breaker, Peers, digest_of
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["TORN", "Entry", "Standing", "TornError", "enter_group", "parts_of", "sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a member brings to a group, and what it has after it entered.

    Attributes:
        turns: steps, evaluations and the like that it has ended with the others.
        outcome: of the last turn that was no step.
        is_current: whether its state is the job's; not that of a process that has just started,
            or was left behind.
        source: rank whose state was the most advanced.
        parts: where each member has a part of the state only: what it, and each of those that
            take their state from it, is to have, by rank. All of them were cut from the group
            before, so that nobody's state is another's.
    """

    turns: int
    outcome: Any
    is_current: bool
    source: int = 0
    parts: Mapping[int, Any] = field(default_factory=dict[int, Any])


class TornError(CommunicationError):
    """A newcomer's state came only in part: it is worth less than none."""


TORN = Entry(turns=-1, outcome=None, is_current=False)
"""What a newcomer brings whose state is torn: nobody may take it, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a member stands, as all members know it of each other."""

    is_current: bool
    turns: int


def sources(standings: Sequence[Standing]) -> list[int]:
    """Return for each rank whose state it takes: its own, or one of the most advanced.

    The most advanced are the current members with most turns, or if none is current the lowest
    of the ranks with most turns alone: then only one state can be the job's. Whoever needs a
    state takes one of the most advanced in turn, so that no one has to serve all.

    Args:
        standings: of each rank.

    Example:
        >>> ahead, behind = (Standing(is_current=True, turns=t) for t in (7, 6))
        >>> new = Standing(is_current=False, turns=0)
        >>> sources([behind, ahead, new, ahead])
        [1, 1, 3, 3]
    """
    ranks = range(len(standings))
    current = [rank for rank in ranks if standings[rank].is_current]
    most = max(standings[rank].turns for rank in current or ranks)
    ahead = [rank for rank in current or ranks if standings[rank].turns == most]
    if not current:
        ahead = ahead[:1]
    needy = [rank for rank in ranks if rank not in ahead]
    taken = {rank: ahead[place % len(ahead)] for place, rank in enumerate(needy)}
    return [taken.get(rank, rank) for rank in ranks]


def enter_group(
    entry: Entry,
    *,
    prefix: str,
    world: World,
    store: Callable[[], TCPStore],
    wrapping: Wrapping | ShardedWrapping,
    trainee: Trainee,
    sockets: GroupSockets,
    breaker: Breaker,
    pause: Callable[[str], AbstractContextManager[None]],
) -> Entry:
    """Open the group of a generation and make all its members equal.

    Args:
        entry: what this member brings.
        prefix: of the group's keys; no other group has had it.
        world: this member's place.
        store: gives a client of the job's store, for the group alone.
        wrapping: takes the group for the model.
        trainee: gives and takes state.
        sockets: remembers the group's sockets.
        breaker: ends every wait for the others.
        pause: tells that copying takes its time.

    Raises:
        CommunicationError: the group broke. The state is as it was, or a newcomer's and void.
        StateError: this newcomer trains something else than the others.
    """
    if world.world_size == 1:
        return _enter_alone(entry, wrapping=wrapping, trainee=trainee)
    device = wrapping.device
    with sockets.opening():
        group = open_group(
            lambda: PrefixStore(prefix, store()), world=world, device=device, breaker=breaker
        )
    peers = Peers(group, breaker=breaker)
    standings = _gather(entry, trainee=trainee, peers=peers, device=device, rank=world.rank)
    if not any(standing.is_current for standing in standings):
        entry = _resumed(entry, trainee=trainee)
        standings = _gather(entry, trainee=trainee, peers=peers, device=device, rank=world.rank)
    with pause("copying state"):
        if wrapping.in_shards and any(standing.is_current for standing in standings):
            wrapping.use(peers, spread_weights=False)  # its shards are to be filled
            entry = _fill(
                entry, standings, rank=world.rank, peers=peers, wrapping=wrapping, trainee=trainee
            )
        else:
            entry = _equalize(entry, standings, rank=world.rank, peers=peers, trainee=trainee)
            wrapping.use(peers, spread_weights=False)
    wrapping.merge_statistics(counted=entry.is_current)
    return entry


def _enter_alone(entry: Entry, *, wrapping: Wrapping | ShardedWrapping, trainee: Trainee) -> Entry:
    wrapping.use(None)
    if entry.is_current:
        if entry.parts:
            _take_part(entry.parts[0], wrapping=wrapping, trainee=trainee)
        return replace(entry, parts={})
    return replace(_resumed(entry, trainee=trainee), is_current=True)


def _resumed(entry: Entry, *, trainee: Trainee) -> Entry:
    """Go on from the newest checkpoint; without one, from what there is, if it is whole.

    Raises:
        StateError: it is torn.
    """
    if trainee.resume() or entry != TORN:
        return Entry(turns=trainee.step, outcome=None, is_current=False)
    raise StateError(
        "the last worker that held the state died while it was copied to this one, and there is "
        "no checkpoint: training has to begin anew, with another worker"
    )


def _gather(
    entry: Entry,
    *,
    trainee: Trainee,
    peers: Peers,
    device: torch.device,
    rank: int,
) -> list[Standing]:
    """Return all members' standings; refuse to be a newcomer that trains something else.

    Raises:
        StateError: the first current member, or else rank 0, is another run.
    """
    identity = trainee.identity()
    own = [int(entry.is_current), entry.turns, *(digest_of(v) for v in identity.values())]
    row = torch.tensor(own, dtype=torch.int64, device=device)
    values = [one.tolist() for one in peers.gather(row)]
    reference = next((one for one in values if one[0]), values[0])
    differing = [n for n, a, b in zip(identity, own[2:], reference[2:], strict=True) if a != b]
    if differing and not entry.is_current:
        shown = ", ".join(f"{name}={identity[name]!r}" for name in differing)
        raise StateError(
            f"this worker (rank {rank}) differs from the others in what must be the same on all, "
            f"here {shown}: start all of them with the same arguments"
        )
    return [Standing(is_current=bool(one[0]), turns=one[1]) for one in values]


def _fill(
    entry: Entry,
    standings: Sequence[Standing],
    *,
    rank: int,
    peers: Peers,
    wrapping: Wrapping | ShardedWrapping,
    trainee: Trainee,
) -> Entry:
    """Fill the shards of all ranks from the parts that the current ones have brought.

    Raises:
        CommunicationError: the group broke; the state of this member is void, as its part is.
    """
    source = sources(standings)[rank]
    breaker = peers.breaker
    for receiver, part in entry.parts.items():
        if receiver != rank:
            state = {"training": part, "outcome": entry.outcome}
            send_state(state, to=receiver, group=peers.group, breaker=breaker)
    if source == rank:
        part, outcome = entry.parts[rank], entry.outcome
    else:
        state = receive_state(source=source, group=peers.group, breaker=breaker)
        part, outcome = state["training"], state["outcome"]
    _take_part(part, wrapping=wrapping, trainee=trainee)
    return Entry(
        turns=standings[source].turns,
        outcome=outcome,
        is_current=source == rank,
        source=source,
    )


def _take_part(part: Any, *, wrapping: Wrapping | ShardedWrapping, trainee: Trainee) -> None:
    assert isinstance(wrapping, ShardedWrapping)
    assert wrapping.mesh is not None
    trainee.load_state_dict(put_together(part, mesh=wrapping.mesh, device=wrapping.device))


def parts_of(
    trainee: Trainee,
    *,
    before: Collection[int],
    members: Sequence[int],
    worker: int,
    peers: Peers | None,
    on_host: bool,
) -> Mapping[int, Any]:
    """Return what a member of a sharded group brings to the next one, by rank in that.

    Collective over the group that it is still in: also who leaves has to take part.

    Args:
        trainee: gives the state.
        before: ids of the workers in the group.
        members: of those in the next one, in the order of their ranks.
        worker: own id.
        peers: the group; `None` for one worker.
        on_host: whether the state lies on the CPU.

    Raises:
        CommunicationError: the group broke.
    """
    standings = [Standing(is_current=member in before, turns=0) for member in members]
    own = members.index(worker) if worker in members else None
    wanted = [rank for rank, source in enumerate(sources(standings)) if source == own]
    state = trainee.state_dict()

    def cut_all() -> Mapping[int, Any]:
        return cut(state, num_parts=len(members), wanted=wanted)

    return cut_all() if peers is None else peers.call(cut_all, on_host=on_host)


def _equalize(
    entry: Entry,
    standings: Sequence[Standing],
    *,
    rank: int,
    peers: Peers,
    trainee: Trainee,
) -> Entry:
    """Copy state so that all ranks stand where the most advanced do."""
    taken = sources(standings)
    source = taken[rank]
    receivers = [one for one, its_source in enumerate(taken) if its_source == rank != one]
    if receivers:
        state = {"training": trainee.state_dict(), "outcome": entry.outcome}
        send_state(state, to=receivers, group=peers.group, breaker=peers.breaker)
    if source == rank:
        return Entry(turns=entry.turns, outcome=entry.outcome, is_current=True, source=rank)
    # A member that lags behind keeps its own state until the whole of the other's has come.
    into = () if entry.is_current else trainee.tensors()
    try:
        state = receive_state(source=source, group=peers.group, into=into, breaker=peers.breaker)
    except CommunicationError as error:
        why = str(error)
    else:
        trainee.load_state_dict(state["training"])
        turns, outcome = standings[source].turns, state["outcome"]
        return Entry(turns=turns, outcome=outcome, is_current=False, source=source)
    raise TornError(why) if into else CommunicationError(why)
