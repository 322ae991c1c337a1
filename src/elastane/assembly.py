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
from elastane.evaluation import Evaluator
from elastane.feed import Feed
from elastane.fixed import FixedMembership, discover_world
from elastane.group import Membership, Wrapping
from elastane.loop import Loop
from elastane.reporting import Reporter
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


def assemble(given: Mapping[str, Any], *, model: replica.Replica) -> Parts:
    """Return the parts of a session.

    Args:
        given: the arguments of `Session` by name.
        model: what users will hold; its inner module is the model given.
    """
    launch, loader, measuring = _env.elastic_launch(), given["loader"], given["measuring"]
    world = discover_world() if launch is None else World(world_size=launch.expected_workers)
    policy: BatchPolicy = given["batch"] or LocalBatch(given["base_batch_size"])
    feed = Feed(
        given["dataset"],
        options=loader,
        policy=policy,
        world=world,
        most_workers=world.world_size if launch is None else launch.max_workers,
        loader_number=world.rank if launch is None else launch.worker,
        min_samples=replica.fewest_samples(model),
        level=jointly.communicates_in_forward(model),
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
    stepper = Stepper(
        optimizer,
        model=model.inner,
        controller=controller,
        schedule=given["schedule"],
        step=given["step"],
        scaler=given["scaler"],
        max_norm=given["max_norm"],
        per=measuring.per,
    )
    wrapping = Wrapping(model, tap=stepper.tap, ddp=given["ddp"] or {})
    membership: Membership
    if launch is None:
        membership = FixedMembership(wrapping, world=world)
    else:
        membership = ElasticMembership(wrapping, launch=launch)
        if jointly.communicates_in_forward(model):
            warnings.warn(_NOT_IN_PLACE, stacklevel=4)
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
    keeper = Keeper(checkpointing, run_dir=run_dir)
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
