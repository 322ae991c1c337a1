"""Entering a generation: open its group, find who is ahead, copy state to whoever is not.

One function, for members that have met already. Knows nothing of the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from elastane._compat import PrefixStore, TCPStore
from elastane.batching import World
from elastane.elastic.cut import own_pieces
from elastane.elastic.handover import fill
from elastane.elastic.opening import open_beside, open_group
from elastane.elastic.sockets import GroupSockets
from elastane.elastic.standing import Entry, Standing, TornError, sources
from elastane.elastic.team import Team
from elastane.elastic.transfer import receive_state, send_state
from elastane.errors import CommunicationError, StateError
from elastane.group import Trainee, Wrapping
from elastane.peers import Breaker, Peers, digest_of
from elastane.replicated import ReplicatedWrapping
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["enter_group"]


def enter_group(
    entry: Entry,
    *,
    prefix: str,
    world: World,
    store: Callable[[], TCPStore],
    wrapping: Wrapping | ShardedWrapping | ReplicatedWrapping,
    trainee: Trainee,
    sockets: GroupSockets,
    breaker: Breaker,
    pause: Callable[[str], AbstractContextManager[None]],
    team: Team,
) -> Entry:
    """Open the group of a generation and make all its members equal.

    Args:
        entry: what this member brings.
        prefix: of the group's keys; no other group has had it.
        world: this process's place among those of all members.
        store: gives a client of the job's store, for the group alone.
        wrapping: takes the group for the model.
        trainee: gives and takes state.
        sockets: remembers the group's sockets.
        breaker: ends every wait for the others.
        pause: tells that copying takes its time.
        team: this member's processes; what one of them can't finish none has finished.

    Raises:
        CommunicationError: the group broke. The state is as it was, or a newcomer's and void.
        StateError: this newcomer trains something else than the others.
    """
    if world.world_size == team.size:
        return _enter_alone(entry, wrapping=wrapping, trainee=trainee, team=team)
    device = wrapping.device

    def arrive() -> _Arrived:
        with sockets.opening():
            peers = _open(prefix, store, world=world, device=device, breaker=breaker, team=team)
        known = {"trainee": trainee, "peers": peers, "device": device, "team": team}
        standings, reached = _gather(entry, **known), entry
        if not any(standing.is_current for standing in standings):
            reached = _resumed(entry, trainee=trainee)
            standings = _gather(reached, **known)
        with pause("copying state"):
            if wrapping.in_shards and any(standing.is_current for standing in standings):
                wrapping.use(peers, spread_weights=False)  # its shards are to be filled
                reached = fill(reached, standings, peers=peers, trainee=trainee)
                return _Arrived(peers=peers, entry=reached)
            return _equalize(reached, standings, peers=peers, trainee=trainee, team=team)

    def use() -> None:
        if wrapping.peers is not arrived.peers:
            wrapping.use(arrived.peers, spread_weights=False)
        wrapping.merge_statistics(counted=arrived.entry.is_current)

    arrived = team.together(arrive)
    if arrived.state is not None:
        with pause("copying state"):
            trainee.load_state_dict(arrived.state)
    team.together(use)
    return arrived.entry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A member in its group: what it has now, and a state that it is still to take up."""

    peers: Peers
    entry: Entry
    state: Mapping[str, Any] | None = None


def _open(
    prefix: str,
    store: Callable[[], TCPStore],
    *,
    world: World,
    device: torch.device,
    breaker: Breaker,
    team: Team,
) -> Peers:
    """Open the group of all members, and for teams that of those with the same shards."""

    def opened(name: str, place: World, *, of: Callable[..., dist.ProcessGroup]) -> Peers:
        keys = f"{prefix}{name}"
        known = {"world": place, "device": device, "breaker": breaker}
        return Peers(of(lambda: PrefixStore(keys, store()), **known), breaker=breaker)

    if team.size == 1:
        return opened("", world, of=open_group)
    rank, size = world.rank // team.size, world.world_size // team.size
    everyone = opened("/all", world, of=open_beside)
    everyone.replicas = opened(f"/{team.index}", World(rank=rank, world_size=size), of=open_beside)
    return everyone


def _enter_alone(
    entry: Entry,
    *,
    wrapping: Wrapping | ShardedWrapping | ReplicatedWrapping,
    trainee: Trainee,
    team: Team,
) -> Entry:
    wrapping.use(None, spread_weights=False)
    if entry.is_current:
        if entry.parts:
            trainee.load_state_dict(entry.parts[0])
        return replace(entry, parts={})
    reached = replace(_resumed(entry, trainee=trainee), is_current=True)
    if not team.agree(team.told(lambda: reached.turns) == reached.turns):
        raise StateError(_DIFFERENT_CHECKPOINTS)
    return reached


def _resumed(entry: Entry, *, trainee: Trainee) -> Entry:
    """Go on from the newest checkpoint; without one, from what there is, if it is whole.

    Raises:
        StateError: it is torn.
    """
    if trainee.resume() or not entry.is_torn:
        return Entry(turns=trainee.step, outcome=None, is_current=False)
    raise StateError(
        "the last worker that held the state died while it was copied to this one, and there is "
        "no checkpoint: training has to begin anew, with another worker"
    )


def _gather(
    entry: Entry, *, trainee: Trainee, peers: Peers, device: torch.device, team: Team
) -> list[Standing]:
    """Return all members' standings; refuse to be a newcomer that trains something else.

    Raises:
        StateError: the first current member, or else the first, is another run; or a process of a
            member differs from its leader.
    """
    identity = trainee.identity()
    place = [int(entry.is_current), entry.turns, entry.followed]
    own = [*place, *(digest_of(v) for v in identity.values())]
    row = torch.tensor(own, dtype=torch.int64, device=device)
    rows = [one.tolist() for one in peers.gather(row)]
    values = rows[:: team.size]
    if any(row[:3] != values[rank // team.size][:3] for rank, row in enumerate(rows)):
        raise StateError(_DIFFERENT_CHECKPOINTS)
    reference = next((one for one in values if one[0]), values[0])
    differing = [n for n, a, b in zip(identity, own[3:], reference[3:], strict=True) if a != b]
    if differing and not entry.is_current:
        shown = ", ".join(f"{name}={identity[name]!r}" for name in differing)
        raise StateError(
            f"this worker (rank {peers.group.rank()}) differs from the others in what must be the "
            f"same on all, here {shown}: start all of them with the same arguments"
        )
    return [Standing(is_current=bool(one[0]), turns=one[1], followed=one[2]) for one in values]


def _equalize(
    entry: Entry, standings: Sequence[Standing], *, peers: Peers, trainee: Trainee, team: Team
) -> _Arrived:
    """Copy state so that all stand where the most advanced do; equal parts between teams."""
    taken, place = sources(standings), peers.group.rank() // team.size
    source = taken[place]
    receivers = [one for one, its_source in enumerate(taken) if its_source == place != one]
    following = [one for one in receivers if _has_followed(standings[one], standings[place])]
    for some, state_of in (
        (following, trainee.rest_of_state),
        ([one for one in receivers if one not in following], trainee.state_dict),
    ):
        ranks = [team.size * one + team.index for one in some]
        if ranks:
            training = own_pieces(state_of()) if team.size > 1 else state_of()
            state = {"training": training, "outcome": entry.outcome}
            send_state(state, to=ranks, group=peers.group, breaker=peers.breaker)
    if source == place:
        return _Arrived(peers=peers, entry=replace(entry, is_current=True, source=source))
    # A member that lags behind keeps its own state until the whole of the other's has come, and
    # a process of a team until it has come to all of them.
    has_followed = _has_followed(standings[place], standings[source])
    into = () if entry.is_current or has_followed or team.size > 1 else trainee.tensors()
    sender = team.size * source + team.index
    try:
        state = receive_state(source=sender, group=peers.group, into=into, breaker=peers.breaker)
    except CommunicationError as error:
        why = str(error)
    else:
        turns, outcome = standings[source].turns, state["outcome"]
        reached = Entry(turns=turns, outcome=outcome, is_current=False, source=source)
        training = state["training"]
        if has_followed:
            training = trainee.completed(training)
        return _Arrived(peers=peers, entry=reached, state=training)
    raise TornError(why) if into else CommunicationError(why)


def _has_followed(newcomer: Standing, source: Standing) -> bool:
    """Return whether a newcomer has all of a member's state but the rest."""
    return not newcomer.is_current and newcomer.followed == source.turns


_DIFFERENT_CHECKPOINTS = (
    "the processes of one worker, which shard one model between them, stand at different steps: "
    "they have found different checkpoints, or only some of them have found any"
)
