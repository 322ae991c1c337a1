"""Builds the parts of a session from what the user gave, checked first.

Changes nothing outside: no file, no process, no group.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastane import _env, arguments, jointly, replica
from elastane.batching import BatchPolicy, LocalBatch, World
from elastane.controller import StepController
from elastane.durability import Checkpointing, Keeper
from elastane.elastic.runtime import ElasticMembership
from elastane.elastic.team import Team
from elastane.errors import UnsupportedError
from elastane.evaluation import Evaluator
from elastane.feed import Feed
from elastane.fixed import FixedMembership, discover_world
from elastane.gradients import GradientTap
from elastane.group import Membership, Wrapping
from elastane.loop import Loop
from elastane.replicated import ReplicatedWrapping
from elastane.reporting import Reporter
from elastane.sharded import ShardedTap, ShardedWrapping
from elastane.sharding import is_sharded, sharding_of
from elastane.state import SessionState
from elastane.stepper import Stepper
from elastane.training import Training

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
    "all of them, and all start again from the last checkpoint; with --group-size whole copies of "
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


def assemble(given: Mapping[str, Any], *, model: replica.Replica) -> Parts:
    """Return the parts of a session.

    Args:
        given: the arguments of `Session` by name.
        model: what users will hold; its inner module is the model given.
    """
    launch, loader, measuring = _env.elastic_launch(), given["loader"], given["measuring"]
    sharded = is_sharded(model.inner)
    team = Team() if launch is None else Team(size=launch.group_size, index=launch.group_index)
    if team.size > 1 and not sharded:
        raise UnsupportedError(_NOT_SHARDED.format(size=team.size))
    elastic = launch if team.size > 1 or not sharded else None
    world = discover_world() if elastic is None else _expected_world(elastic, team)
    if sharded:
        sharding_of(model.inner, world_size=world.world_size if elastic is None else team.size)
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
        level=waits_in_forward,
        in_step=sharded,
    )
    num_steps = arguments.base_steps(
        given["num_steps"],
        num_epochs=given["num_epochs"],
        num_samples=feed.num_samples,
        base=given["base_batch_size"],
    )
    optimizer = given["optimizer"]
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
        tap=ShardedTap if sharded else GradientTap,
    )
    membership = _membership(
        model, stepper, world=world, launch=launch, team=team, ddp=given["ddp"] or {}
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
    keeper = Keeper(checkpointing, run_dir=run_dir, in_shards=sharded)
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
) -> Membership:
    """Return the workers: those that stay, or those that come and go."""
    if isinstance(stepper.tap, ShardedTap):
        if launch is not None and team.size > 1:
            copies = ReplicatedWrapping(
                model, tap=stepper.tap, num_shards=team.size, agree=team.agree
            )
            return ElasticMembership(copies, launch=launch, team=team)
        if launch is not None:
            warnings.warn(_RESTARTED, stacklevel=5)
        return FixedMembership(ShardedWrapping(model, tap=stepper.tap), world=world)
    wrapping = Wrapping(model, tap=stepper.tap, ddp=ddp)
    if launch is None:
        return FixedMembership(wrapping, world=world)
    if jointly.communicates_in_forward(model):
        warnings.warn(_NOT_IN_PLACE, stacklevel=5)
    return ElasticMembership(wrapping, launch=launch)
