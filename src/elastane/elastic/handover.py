"""Handing a sharded state over from one group to the next: cut in the old, dealt in the new.

Knows members and where they stand; nothing of the supervisor, or of what is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastane.elastic.cut import cut
from elastane.elastic.standing import Entry, Standing, sources
from elastane.elastic.transfer import receive_state, send_state
from elastane.group import Trainee
from elastane.peers import Peers
from elastane.sharded_wrapping import ShardedWrapping

__all__ = ["fill", "parts_of"]


def fill(
    entry: Entry,
    standings: Sequence[Standing],
    *,
    peers: Peers,
    trainee: Trainee,
) -> Entry:
    """Fill the shards of all ranks from the parts that the current ones have brought.

    Raises:
        CommunicationError: the group broke; the state of this member is void, as its part is.
    """
    rank = peers.group.rank()
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
    trainee.load_state_dict(part)
    return Entry(
        turns=standings[source].turns,
        outcome=outcome,
        is_current=source == rank,
        source=source,
    )


def parts_of(
    trainee: Trainee,
    *,
    before: Collection[int],
    members: Sequence[int],
    worker: int,
    wrapping: ShardedWrapping,
) -> Mapping[int, Any]:
    """Return what a member of a sharded group brings to the next one, by rank in that.

    Collective over the group that it is still in: also who leaves has to take part.

    Args:
        trainee: gives the state.
        before: ids of the workers in the group.
        members: of those in the next one, in the order of their ranks.
        worker: own id.
        wrapping: of the model; it has the group.

    Raises:
        CommunicationError: the group broke.
    """
    standings = [Standing(is_current=member in before, turns=0) for member in members]
    own = members.index(worker) if worker in members else None
    wanted = [rank for rank, source in enumerate(sources(standings)) if source == own]
    wrapping.reshard()
    state, peers = trainee.state_dict(), wrapping.peers

    def cut_all() -> Mapping[int, Any]:
        return cut(state, num_parts=len(members), wanted=wanted)

    return (
        cut_all() if peers is None else peers.call(cut_all, on_host=wrapping.device.type == "cpu")
    )
