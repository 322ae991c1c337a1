"""Builds the parts of a session from what the user gave, checked first.

Changes nothing outside: no file, no process, no group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastane import arguments, replica
from elastane.batching import BatchPolicy, LocalBatch
from elastane.controller import StepController
from elastane.feed import Feed
from elastane.group import Membership, discover_world
from elastane.loop import Loop
from elastane.reporting import Reporter
from elastane.state import SessionState
from elastane.stepper import Stepper

__all__ = ["Parts", "assemble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a session joins.

    Attributes:
        feed: gives micro-batches.
        stepper: makes steps of them.
        membership: the workers.
        reporter: tells what happens.
        loop: orders the others.
        state: what is saved.
        run: numbers that make it this run; the same on all workers and in a saved state.
    """

    feed: Feed
    stepper: Stepper
    membership: Membership
    reporter: Reporter
    loop: Loop
    state: SessionState
    run: Mapping[str, int]


def assemble(given: Mapping[str, Any], *, model: replica.Replica) -> Parts:
    """Return the parts of a session.

    Args:
        given: the arguments of `Session` by name.
        model: what users will hold; its inner module is the model given.
    """
    world, loader, measuring = discover_world(), given["loader"], given["measuring"]
    policy: BatchPolicy = given["batch"] or LocalBatch(given["base_batch_size"])
    feed = Feed(
        given["dataset"],
        options=loader,
        policy=policy,
        world=world,
        min_samples=replica.fewest_samples(model),
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
        scaler=given["scaler"],
        max_norm=given["max_norm"],
        per=measuring.per,
    )
    membership = Membership(model, tap=stepper.tap, world=world, ddp=given["ddp"] or {})
    run = {
        "num_samples": feed.num_samples,
        "base_batch_size": given["base_batch_size"],
        "seed": loader.seed,
        "shuffle": int(loader.shuffle),
        "straddle_epochs": int(loader.straddle_epochs),
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    reporter = Reporter(
        controller,
        world=world,
        facts=run | {"rule": repr(given["rule"]), "policy": repr(policy), "parameters": size},
        run_dir=given["run_dir"],
        sinks=given["sinks"],
        progress_bar=given["progress_bar"],
    )
    loop = Loop(model, feed=feed, stepper=stepper, membership=membership, reporter=reporter)
    device = next(model.parameters()).device
    return Parts(
        feed=feed,
        stepper=stepper,
        membership=membership,
        reporter=reporter,
        loop=loop,
        state=SessionState(run, loop=loop, rank=world.rank, device=device),
        run=run,
    )
