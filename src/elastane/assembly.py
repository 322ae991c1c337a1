"""Builds the parts of a session from what the user gave, checked first.

Changes nothing outside: no file, no process, no group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elastane import _env, arguments, jointly, replica
from elastane.adaptive import check_follow
from elastane.batching import BatchPolicy, LocalBatch, World
from elastane.controller import StepController
from elastane.durability import Checkpointing, Keeper
from elastane.elastic.resharding import Resharding
from elastane.elastic.runtime import ElasticMembership
from elastane.elastic.team import Team
from elastane.errors import ArgumentError, UnsupportedError, describe
from elastane.evaluation import Evaluator
from elastane.feed import Feed
from elastane.fixed import FixedMembership, discover_world
from elastane.follow import Follow
from elastane.group import Membership, Wrapping
from elastane.loop import Loop
from elastane.optimizers import AnyOptimizer, joined, members_of
from elastane.replicated import ReplicatedWrapping
from elastane.reporting import Reporter
from elastane.sharded import ShardedTap
from elastane.sharded_wrapping import ShardedWrapping
from elastane.sharding import is_sharded, sharding_of
from elastane.state import SessionState
from elastane.stepper import Stepper
from elastane.training import Training
from elastane.zero import check_zero, is_zero

__all__ = ["Parts", "assemble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a session joins.

    Attributes:
        feed: gives micro-batches.
        stepper: makes steps of them.
        membership: the workers.
        reporter: tells what happens.
        keeper: keeps checkpoints.
        loop: orders the others.
        evaluator: evaluates over the workers.
        state: what is saved.
        training: all that workers have in common.
    """

    feed: Feed
    stepper: Stepper
    membership: Membership
    reporter: Reporter
    keeper: Keeper
    loop: Loop
    evaluator: Evaluator
    state: SessionState
    training: Training

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Tell how long a block took, and all the while that it is no hang."""
        with self.membership.pause(reason), self.reporter.pause(reason):
            yield


_NOT_IN_PLACE = (
    "the model has SyncBatchNorm, which waits for the other workers in forward: when one dies, the "
    "others fail in your code, and all start again from the last checkpoint; with BatchNorm they "
    "go on in place, and its statistics are merged at each change"
)
_RESTARTED = (
    "the model is sharded, so no worker can do without the others: any change of the workers ends "
    "all of them, and all start again from the last checkpoint; leave fully_shard to the session, "
    "with shard=, and they may join and leave in place, or take --group-size, and whole copies of "
    "the model come and go"
)
_NOT_SHARDED = (
    "this worker has {size} processes (--group-size), and the model is not sharded over them: call "
    "fully_shard(model) before the optimizer is built, or leave --group-size out"
)
_GAIN_TOO_LARGE = (
    "the model has SyncBatchNorm, which ties the workers' gradients to one another: the noise "
    "measured between them is too large, and with it the gain, up to the scale itself; take "
    "BatchNorm, or a rule that does not look at the gain, such as WarmUp(rule=Linear())"
)


_WHOLE_GRADIENTS = (
    "the model is sharded, and its gradients are measured before they are cut into shards, where "
    "the optimizer's second moments are not to be had: leave Measuring(precondition=True) and "
    'Follow(second_moment="base") out'
)


def assemble(given: Mapping[str, Any], *, model: replica.Replica) -> Parts:
    """Return the parts of a session.

    Args:
        given: the arguments of `Session` by name.
        model: what users will hold; its inner module is the model given.
    """
    launch, loader, measuring = _env.elastic_launch(), given["loader"], given["measuring"]
    team = Team() if launch is None else Team(size=launch.group_size, index=launch.group_index)
    by_user = is_sharded(model.inner)
    sharded = by_user or given["shard"] is not None
    _check_team(team, by_user=by_user, shard=given["shard"])
    elastic = launch if team.size > 1 or not by_user else None
    world = discover_world() if elastic is None else _expected_world(elastic, team)
    if by_user:
        sharding_of(model.inner, world_size=world.world_size if elastic is None else team.size)
    optimizer = joined(given["optimizer"])
    follow: Follow = given["follow"]
    check_follow(follow, optimizer)
    if sharded and (follow.takes_squares or measuring.precondition):
        raise UnsupportedError(_WHOLE_GRADIENTS)
    zeros = [one for one in members_of(optimizer) if is_zero(one)]
    for one in zeros:
        check_zero(
            one,
            world_size=world.world_size,
            is_elastic=launch is not None,
            is_sharded=sharded,
        )
    policy: BatchPolicy = given["batch"] or LocalBatch(given["base_batch_size"])
    waits_in_forward = jointly.communicates_in_forward(model)
    most_workers = world.world_size if elastic is None else team.size * elastic.max_workers
    feed = Feed(
        given["dataset"],
        options=loader,
        policy=policy,
        world=world,
        most_workers=most_workers,
        loader_number=world.rank if launch is None else team.size * launch.worker + team.index,
        min_samples=replica.fewest_samples(model),
        in_step="cut" if waits_in_forward else "company" if sharded else None,
    )
    num_steps = arguments.base_steps(
        given["num_steps"],
        num_epochs=given["num_epochs"],
        num_samples=feed.num_samples,
        base=given["base_batch_size"],
    )
    controller = StepController(
        given["rule"],
        base_batch_size=given["base_batch_size"],
        num_steps=num_steps,
        compensation=given["compensation"],
        measuring=measuring,
        num_groups=len(arguments.parameter_groups(optimizer, per=measuring.per)),
    )
    if waits_in_forward and most_workers > 1 and controller.depends_on_gain(2.0):
        warnings.warn(_GAIN_TOO_LARGE, stacklevel=4)
    stepper = Stepper(
        optimizer,
        model=model.inner,
        controller=controller,
        schedule=given["schedule"],
        step=given["step"],
        scaler=given["scaler"],
        max_norm=given["max_norm"],
        per=measuring.per,
        follow=follow,
        sharded=sharded,
    )
    build = None
    if given["shard"] is not None:
        build = _builder(model.inner, stepper, optimizer=optimizer, shard=given["shard"])
    membership = _membership(
        model,
        stepper,
        world=world,
        launch=launch,
        team=team,
        ddp=given["ddp"] or {},
        build=build,
    )
    run = {
        "num_samples": feed.num_samples,
        "base_batch_size": given["base_batch_size"],
        "seed": loader.seed,
        "shuffle": int(loader.shuffle),
        "straddle_epochs": int(loader.straddle_epochs),
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    run_dir = given["run_dir"] or (launch.run_dir if launch else None)
    checkpointing = given["checkpoint"] or (Checkpointing() if launch else None)
    keeper = Keeper(checkpointing, run_dir=run_dir, in_shards=sharded or bool(zeros))
    reporter = Reporter(
        controller,
        world=world,
        facts=run | {"rule": repr(given["rule"]), "policy": repr(policy), "parameters": size},
        run_dir=run_dir,
        sinks=given["sinks"],
        progress_bar=given["progress_bar"],
    )
    loop = Loop(
        model,
        feed=feed,
        stepper=stepper,
        membership=membership,
        reporter=reporter,
        keeper=keeper,
    )
    device = next(model.parameters()).device
    state = SessionState(run, loop=loop, membership=membership, device=device)
    training = Training(
        model=model.inner,
        optimizer=optimizer,
        identity={
            **run,
            "num_steps": num_steps,
            "parameters": size,
            "stateful": sorted(given["stateful"]),
        },
        loop=loop,
        feed=feed,
        reporter=reporter,
        keeper=keeper,
        state=state,
        stateful=given["stateful"],
    )
    return Parts(
        feed=feed,
        stepper=stepper,
        membership=membership,
        reporter=reporter,
        keeper=keeper,
        loop=loop,
        evaluator=Evaluator(model.inner, options=loader, membership=membership),
        state=state,
        training=training,
    )


def _builder(
    model: nn.Module,
    stepper: Stepper,
    *,
    optimizer: AnyOptimizer,
    shard: Callable[[nn.Module, DeviceMesh], Any],
) -> Callable[[DeviceMesh], nn.Module]:
    """Return what shards the model over a mesh, and has its new parameters measured."""
    resharding = Resharding(model, optimizer=optimizer, shard=shard)

    def build(mesh: DeviceMesh) -> nn.Module:
        root = resharding(mesh)
        stepper.take_parameters()
        return root

    return build


def _check_team(
    team: Team, *, by_user: bool, shard: Callable[[nn.Module, DeviceMesh], Any] | None
) -> None:
    """Refuse a model that a worker's processes do not hold one sharded copy of between them."""
    if team.size == 1:
        return
    if shard is not None:
        rule = f"given to a worker of {team.size} processes (--group-size), which shard it already"
        way_out = (
            "Leave --group-size out, and the session shards the model over all workers; or call "
            "fully_shard over the worker's processes yourself, and leave shard out."
        )
        raise ArgumentError(describe("shard", shard, rule=rule, way_out=way_out))
    if not by_user:
        raise UnsupportedError(_NOT_SHARDED.format(size=team.size))


def _expected_world(launch: _env.ElasticLaunch, team: Team) -> World:
    """Return this process's place in the step of which it throws the gradients away."""
    return World(rank=team.index, world_size=team.size * launch.expected_workers)


def _membership(
    model: replica.Replica,
    stepper: Stepper,
    *,
    world: World,
    launch: _env.ElasticLaunch | None,
    team: Team,
    ddp: Mapping[str, Any],
    build: Callable[[DeviceMesh], nn.Module] | None,
) -> Membership:
    """Return the workers: those that stay, or those that come and go."""
    if isinstance(stepper.tap, ShardedTap):
        if launch is not None and team.size > 1:
            copies = ReplicatedWrapping(
                model, tap=stepper.tap, num_shards=team.size, agree=team.agree
            )
            return ElasticMembership(copies, launch=launch, team=team)
        wrapping = ShardedWrapping(model, tap=stepper.tap, build=build)
        if launch is not None and build is None:
            warnings.warn(_RESTARTED, stacklevel=5)
    else:
        wrapping = Wrapping(model, tap=stepper.tap, ddp=ddp)
    if launch is None or (wrapping.in_shards and build is None):
        return FixedMembership(wrapping, world=world)
    if jointly.communicates_in_forward(model):
        warnings.warn(_NOT_IN_PLACE, stacklevel=5)
    return ElasticMembership(wrapping, launch=launch)
