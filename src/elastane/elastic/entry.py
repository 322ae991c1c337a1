"""Entering a generation: open its group, find who is ahead, copy state to whoever is not.

One function, for members that have met already. Knows nothing of the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from elastane._compat import PrefixStore, TCPStore
from elastane.batching import World
from elastane.elastic.handover import fill, take_part
from elastane.elastic.opening import open_group
from elastane.elastic.sockets import GroupSockets
from elastane.elastic.standing import TORN, Entry, Standing, TornError, sources
from elastane.elastic.transfer import receive_state, send_state
from elastane.errors import CommunicationError, StateError
from elastane.group import Trainee, Wrapping
from elastane.peers import Breaker, Peers, digest_of
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["enter_group"]


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
            entry = fill(
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
            take_part(entry.parts[0], wrapping=wrapping, trainee=trainee)
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
