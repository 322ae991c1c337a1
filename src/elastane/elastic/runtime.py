"""The worker side of an elastic job: a membership whose members come, go and die.

The state machine of one worker. What it needs from others lies beside it: the line to the
supervisor, the meeting, the group and its sockets, the copying of state. Knows nothing of who
decides on members, and nothing of rules, data or schedules.

    WARMING --rehearsed--> WAITING --newer generation--> ENTERING --all there, states equal--> IN
       ^                      ^                              |  broken, or superseded           |
       |                      +------------------------------+                                  |
       |                      +--------- group broken, or all agreed to switch -----------------+
       not in the generation: evicted, comes back as a newcomer; dismissed: leaves the process
"""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from elastane import protocol
from elastane._compat import TCPStore
from elastane._env import ElasticLaunch
from elastane.batching import World
from elastane.elastic.entry import enter_group
from elastane.elastic.following import Following
from elastane.elastic.handover import parts_of
from elastane.elastic.held import HeldGroup
from elastane.elastic.leaving import LEFT_BEHIND, ORPHANED, SHARD_LOST, WorkerLeft, leave
from elastane.elastic.link import Link, connect
from elastane.elastic.meeting import Arrival, Meetings, Superseded
from elastane.elastic.memory import make_writable
from elastane.elastic.signals import on_sigterm
from elastane.elastic.standing import TORN, Entry, TornError
from elastane.elastic.team import Team
from elastane.errors import CommunicationError, UsageError
from elastane.group import Trainee, Wrapping
from elastane.peers import Peers
from elastane.protocol import Beat, Broken, Done, Entered, Generation, Leaving, Ready
from elastane.replicated import ReplicatedWrapping
from elastane.sharded_wrapping import ShardedWrapping
from elastane.sharding import local_of

__all__ = ["ElasticMembership"]

T = TypeVar("T")

_LOOK_AROUND_S = 1.0


class ElasticMembership:
    """Implements `elastane.group.Membership` for a worker that `elastane run` started.

    Args:
        wrapping: of the model.
        launch: what the launcher said of this worker.
        team: the worker's processes, if there are several. They all run this state machine; what
            comes from the supervisor or the meeting, the leader tells the others.
    """

    def __init__(
        self,
        wrapping: Wrapping | ShardedWrapping | ReplicatedWrapping,
        *,
        launch: ElasticLaunch,
        team: Team | None = None,
    ) -> None:
        self._team = team or Team()
        self._group = HeldGroup(wrapping, keeps_default=self._team.size > 1)
        self._launch = launch
        self._link = Link(
            launch, beat=self._beat, on_change=self._break_if_broken, on_beat=self._look_around
        )
        self._following = Following(worker=launch.worker, connect=lambda: connect(launch.store))
        self._meetings = Meetings(self._link, worker=launch.worker, team=self._team)
        self._trainee: Trainee | None = None
        self._members: tuple[int, ...] = ()
        self._since = 0  # generation that the group was opened for
        self._is_over = False
        self._tried = 0
        self._turns = self._arrived = 0
        self._outcome: Any = None
        self._is_current = self._is_torn = self._is_entering = False
        self._switch_agreed = self._leave_asked = self._leave_told = False
        self._doing, self._paused = "train", ""
        self.warming = True
        size = self._team.size * launch.expected_workers
        self.world = World(rank=self._team.index, world_size=size, generation=0)

    @property
    def peers(self) -> Peers | None:
        """The workers of the present group; `None` while this worker is alone."""
        return self._group.wrapping.peers

    @property
    def final_at_once(self) -> bool:
        """Whether a step that this worker has committed can't be void later: it is alone."""
        return self.world.world_size == self._team.size

    @contextmanager
    def joined(self, trainee: Trainee) -> Iterator[None]:
        """Be in touch with the supervisor for the length of a block; `rehearsed` takes part."""
        if dist.is_initialized() and self._team.size == 1:
            raise UsageError(
                "a process group is open already: under `elastane run` the session opens it, and "
                "opens it anew when the workers change; leave init_process_group out"
            )
        self._trainee = trainee
        with ExitStack() as stack:
            stack.enter_context(self._team.assembled())
            stack.callback(self._forget)
            if self._team.size > 1:
                self._group.wrapping.use(None)
            stack.enter_context(on_sigterm(self._ask_to_leave))
            stack.enter_context(self._link.connected())
            yield
            if self._members and not self._is_over:  # left by `break`, on all workers at once
                self._tell_end()

    def rehearsed(self) -> None:
        """Say that this worker is ready, wait until it is let in, and go in."""
        self.warming = False
        if isinstance(self._group.wrapping, ShardedWrapping):
            self._group.wrapping.rehearse()
        own = [local_of(tensor) for tensor in self._held().tensors()]
        make_writable(own)  # loader processes share the memory since they were forked
        self._catch_up()
        # What went before does not concern this worker.
        self._tried = self._link.history.newest.number
        self._team.agree(True)
        gc.freeze()  # an automatic collection would fall into somebody's pause, too
        self._link.tell(Ready(worker=self._launch.worker))
        self._regroup(evaluating=False)

    def start_window(self) -> None:
        """Change members if all have agreed to; wrap anew if other parameters train."""
        if self.warming and self._group.wrapping.in_shards:
            self.rehearsed()  # a whole model may fit on no device
        if self._switch_agreed:
            self._regroup(evaluating=False)
        while not self.warming:
            try:
                self._group.wrapping.refresh()
                self._group.wrapping.settle()
                self._following.answer(self._held().replay)
            except CommunicationError:
                pass
            else:
                return
            self._regroup(evaluating=False)

    def extras(self) -> Sequence[float]:
        """Return whether this worker knows of a reason to change members."""
        return (
            float(self._link.history.newest.number > self.world.generation or self._link.orphaned),
        )

    def arrived(self) -> None:
        """Tell with the next beat that this worker's own part of the step is done."""
        if not self.warming:
            self._arrived = self._turns + 1

    def finished_step(self, sums: Sequence[float]) -> None:
        """End a turn; members change before the next window if anybody knows of a reason."""
        self._turns += 1
        self._switch_agreed = self._switch_agreed or sums[0] > 0
        if not self._switch_agreed:
            self._following.advance()

    def recover(self, why: str) -> bool:  # noqa: ARG002
        """Regroup with whoever is left; say whether others had ended the turn."""
        begun = self._turns
        stayed = self._regroup(evaluating=False)
        return stayed and self._turns > begun

    def together(self, work: Callable[[], T]) -> T:
        """Return what a turn comes to, also if others ended it; alone before this worker is in."""
        if not self._members:
            return work()
        while True:
            begun, self._doing = self._turns, "evaluate"
            try:
                outcome = self._team.together(work)
            except CommunicationError:
                pass
            else:
                self._turns += 1
                self._arrived, self._outcome, self._doing = self._turns, outcome, "train"
                self._held().settled(self._held().step)
                return outcome
            self._regroup(evaluating=True)
            if self._turns > begun:
                self._doing = "train"
                return self._outcome

    def agree_on_end(self) -> None:
        """End the run for all members at once."""
        self.together(self._sum_once)
        self._is_over = True
        self._tell_end()

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Have the beat tell why this worker lets the others wait."""
        before, self._paused = self._paused, reason
        try:
            yield
        finally:
            self._paused = before

    def _catch_up(self) -> None:
        """Follow a member until little is left to be copied, if there is one."""
        can_follow = self._team.size == 1 and not self._group.wrapping.in_shards
        if can_follow and self._link.history.newest.members:
            self._following.catch_up(
                self._held().replay(), give_up=lambda: not self._link.history.newest.members
            )
            self._is_torn = self._following.has_begun

    def _forget(self) -> None:
        self._following.close()
        gc.unfreeze()
        self._members = ()
        self._group.close()
        self._trainee = None

    def _held(self) -> Trainee:
        assert self._trainee is not None
        return self._trainee

    def _sum_once(self) -> None:
        if self.peers is not None:
            self.peers.sum(torch.zeros(1, device=self._group.wrapping.device))

    # Regrouping ------------------------------------------------------------------------------

    def _regroup(self, *, evaluating: bool) -> bool:
        """Leave the group, and enter generations until one holds.

        Args:
            evaluating: whether an evaluation is started over afterwards, in which newcomers
                can't take part.

        Returns:
            Whether this worker was in all along. One that was left behind comes back as a
            newcomer: it has missed turns, and the others have done with the last one's outcome.
        """
        stayed = self._is_current
        planned, self._switch_agreed = self._switch_agreed, False
        if not planned:
            self._end_if_a_shard_is_lost()
        if not self._holds_shard:
            self._leave_group(at_once=not planned)
        while True:
            generation = self._next_generation(planned=planned, evaluating=evaluating)
            stayed = stayed and self._is_current
            planned = self._holds_shard
            try:
                is_whole = self._enter(generation, evaluating=evaluating)
            except CommunicationError as error:
                self._is_torn = self._is_torn or isinstance(error, TornError)
                why = str(error)
                if not isinstance(error, Superseded) or self._is_broken():
                    self._end_if_a_shard_is_lost()
            else:
                self._switch_agreed = not is_whole
                return stayed
            if not self._holds_shard:
                self._leave_group()
            self._tried = generation.number
            if self._link.history.newest.number == generation.number:
                self._complain(why)

    def _next_generation(self, *, planned: bool, evaluating: bool) -> Generation:
        """Return the next generation to enter; leave the process if this worker is dismissed."""
        told = self._team.told(lambda: self._await(planned=planned, evaluating=evaluating))
        self._is_current = told["is_current"]
        if "code" in told:
            self._leave(save=told["save"], code=told["code"])
        return Generation.from_mapping(told["generation"])

    def _await(self, *, planned: bool, evaluating: bool) -> dict[str, Any]:
        """Wait for a generation to enter, or a reason to leave the process; return it as JSON."""
        worker = self._launch.worker
        expects_one = self._is_current and not self._holds_shard  # its group may be whole
        while True:
            generation = self._link.wait_newer(self._tried, timeout_s=_LOOK_AROUND_S)
            if generation is None:
                if self._link.orphaned:
                    warnings.warn(ORPHANED.why, stacklevel=2)
                    return self._way_out(save=self._is_current, code=ORPHANED.code)
                if expects_one:
                    self._complain("the group broke, or all agreed to leave it")
            elif worker in self._link.history.dismissed:
                return self._dismissed(generation, planned=planned)
            elif worker not in generation.members:
                self._end_if_a_shard_is_lost()
                if evaluating:
                    warnings.warn(LEFT_BEHIND.why, stacklevel=2)
                    return self._way_out(save=False, code=LEFT_BEHIND.code)
                self._tried, self._is_current, expects_one = generation.number, False, False
                self._link.tell(Ready(worker=worker))
            elif generation.go:
                return {"is_current": self._is_current, "generation": asdict(generation)}
            else:
                self._tried, expects_one = generation.number, False

    def _dismissed(self, generation: Generation, *, planned: bool) -> dict[str, Any]:
        """Return how to leave the process; hand this worker's shard over before, if it has one."""
        nobody_stays = not generation.members
        if self._holds_shard:
            if not nobody_stays:
                self._parts(generation.members)
            return self._way_out(save=nobody_stays)  # all of them put the whole together
        may_save = self.world.rank == 0 if planned else self._is_current
        return self._way_out(save=nobody_stays and may_save)

    def _way_out(self, *, save: bool, code: int = 0) -> dict[str, Any]:
        return {"is_current": self._is_current, "save": save, "code": code}

    def _complain(self, why: str) -> None:
        number = max(self._tried, self.world.generation)
        self._link.tell(Broken(worker=self._launch.worker, generation=number, why=why))

    def _enter(self, generation: Generation, *, evaluating: bool) -> bool:
        """Enter a generation; return whether all its members take part, newcomers too."""
        if self._is_current:
            self._following.entering(generation.members, turns=self._turns)
        if self._holds_shard:
            taking_part, parts = self._part(generation)
        else:
            self._open_for(generation)
            taking_part, parts = self._meet(generation, evaluating=evaluating), {}
        if not self._team.agree(not self._is_broken()):
            raise Superseded
        worker, trainee = self._launch.worker, self._held()
        followed = -1
        if not self._is_current:
            followed = self._following.finish(is_broken=self._is_broken)
        world = World(
            rank=self._team.size * taking_part.index(worker) + self._team.index,
            world_size=self._team.size * len(taking_part),
            generation=generation.number,
        )
        with self._link.lending() as lend:
            entry = enter_group(
                Entry(
                    turns=self._turns,
                    outcome=self._outcome,
                    is_current=self._is_current,
                    parts=parts,
                )
                if not self._is_torn
                else replace(TORN, followed=followed),
                prefix=f"{protocol.group_prefix(generation.number)}/{self._meetings.number}",
                world=world,
                store=lend,
                wrapping=self._group.wrapping,
                trainee=trainee,
                sockets=self._group.sockets,
                breaker=self._group.breaker,
                pause=self.pause,
                team=self._team,
            )
        self.world = world
        self._turns = self._arrived = entry.turns
        self._outcome, self._is_current, self._is_torn = entry.outcome, True, False
        self._is_entering = False
        if entry.source != world.rank // self._team.size:
            self._following.drop()
        trainee.entered(world, cause=generation.cause)
        trainee.settled(trainee.step)
        is_whole = len(taking_part) == len(generation.members)
        if is_whole:
            self._tried = generation.number
        source = taking_part[entry.source]
        told = Entered(
            worker=worker, generation=generation.number, step=trainee.step, source=source
        )
        self._link.entered(generation, told=told)
        if self._is_over:
            self._tell_end()
        return is_whole

    def _open_for(self, generation: Generation) -> None:
        """Be between two groups: what becomes of this worker, the next one's members decide."""
        self._group.renew()
        self._members, self._since = generation.members, generation.number
        # Who holds a shard can't give a generation up that it has met the others for.
        self._is_entering = not self._group.wrapping.in_shards

    def _part(self, generation: Generation) -> tuple[tuple[int, ...], Mapping[int, Any]]:
        """Meet the next group, and only then leave this one: its last act cuts the state anew."""
        if self._is_broken():
            raise Superseded
        taking_part = self._meet(generation, evaluating=False)
        parts = self._parts(taking_part)
        self._leave_group(at_once=False)
        self._open_for(generation)
        return taking_part, parts

    def _parts(self, members: Sequence[int]) -> Mapping[int, Any]:
        wrapping = self._group.wrapping
        assert isinstance(wrapping, ShardedWrapping)
        with self.pause("cutting the state anew"):
            return parts_of(
                self._held(),
                before=self._members,
                members=members,
                worker=self._launch.worker,
                wrapping=wrapping,
            )

    @property
    def _holds_shard(self) -> bool:
        """Whether a part of the job's state is on this worker alone."""
        return self._is_current and self._group.wrapping.in_shards

    def _end_if_a_shard_is_lost(self) -> None:
        """End this process where no group can hold that lacks a member of the last one."""
        if self._holds_shard:
            warnings.warn(SHARD_LOST.why, stacklevel=2)
            self._leave(save=False, code=SHARD_LOST.code)

    def _tell_end(self) -> None:
        self._link.tell(Done(worker=self._launch.worker, step=self._held().step))

    def _meet(self, generation: Generation, *, evaluating: bool) -> tuple[int, ...]:
        """Wait for the other members; return who takes part, this worker among them."""
        arrival = Arrival.NEWCOMER
        if self._is_current:
            arrival = Arrival.EVALUATING if evaluating else Arrival.CURRENT
        return self._meetings.come(generation, arrival=arrival)

    def _is_broken(self) -> bool:
        """Return whether the group can't hold any longer.

        While it is being entered, any newer generation ends that for all alike: one member that
        went on to the newer one would keep the others waiting.
        """
        history, since = self._link.history, self._since
        if self._is_entering:
            return history.newest.number > since
        return history.is_broken(self._members, since=since)

    def _leave_group(self, *, at_once: bool = True) -> None:
        self._members = ()
        self._group.let_go(at_once=at_once)

    def _leave(self, *, save: bool, code: int = 0) -> NoReturn:
        # Others give their parts of the state to the process that writes.
        writes = self._team.is_leader and not (self._holds_shard and self.world.rank > 0)
        leave(self._held(), save=save, writes=writes, code=code)

    # Called by other threads ------------------------------------------------------------------

    def _break_if_broken(self) -> None:
        """Break the group if a member is gone who has not agreed to go."""
        if self._members and self._is_broken():
            self._group.break_up("a member is gone")

    def _look_around(self, store: TCPStore) -> None:
        """Find out which newcomers want to follow; the first member answers them."""
        if self._members and self.world.rank == 0 and self._team.size == 1:
            self._following.look(store)

    def _beat(self, count: int) -> Beat:
        if self._leave_asked and not self._leave_told:
            self._leave_told = True
            why = "the worker received SIGTERM"
            self._link.post(Leaving(worker=self._launch.worker, why=why))
        trainee, world = self._trainee, self.world
        is_first = world.rank == 0 and bool(self._members)
        return Beat(
            count=count,
            generation=world.generation if self._members else 0,
            met=self._meetings.generation,
            step=trainee.step if trainee else 0,
            arrived=self._arrived,
            doing=self._doing,
            paused=self._paused,
            status=dict(trainee.status()) if trainee and is_first else {},
        )

    def _ask_to_leave(self) -> None:
        """Leave after the present step; before this worker is in, or asked again, at once."""
        if self._leave_asked or not self._members:
            raise WorkerLeft(0 if not self._leave_asked else 128 + signal.SIGTERM)
        self._leave_asked = True
