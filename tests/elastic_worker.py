"""What the workers of elastic tests run: the digits under a session, with a record of each step.

A record is a file of JSON lines: "generation" opens a place in a group, "dealt" is what a worker
takes for a step before it makes it, "step" is what came of it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from training import Digits

import elastane
from elastane import GlobalBatch, LoaderOptions, LocalBatch, Session, replay
from elastane._env import ElasticLaunch, elastic_launch
from elastane.durability import Checkpointing
from elastane.elastic import following, streams
from elastane.elastic.link import connect
from elastane.elastic.whole import gathered
from elastane.errors import CommunicationError
from elastane.peers import Peers

RULES = {"adascale": elastane.AdaScale(), "linear": elastane.Linear()}
BATCHES = {
    "local": LocalBatch(8, micro_batches=2),
    "grid": GlobalBatch(32, micro_batches=4),
    "global": GlobalBatch(32),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.002),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler | None]] = {
    "constant": lambda _: None,
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=2000),
    "multistep": lambda optimizer: MultiStepLR(optimizer, [60, 200]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a test can ask of its workers.

    Attributes:
        num_steps: the run's base steps; by default it lasts until the supervisor ends it.
        seed: of the first weights; by default another on each worker, which must not matter.
        plain_backward: call `loss.backward()` and not the session's.
        chunk: samples after which the workers wait until the supervisor opens the next gate.
        step_s: seconds a micro-batch takes at least.
        evaluate_every: steps between two evaluations; the first one waits for a gate.
        fail_at: position from which this worker's user code raises.
        nan_at: step whose loss is not finite when it is tried first.
        checkpoint_every: steps between two checkpoints.
        loses_sums_at: step whose sums this worker's second process takes for lost.
        dies_in: generation of which this worker makes the first step, and dies.
        sharded: whether the session shards the model; then each step tells a digest of the state.
        average_decay: of a moving average of the weights that is part of the state.
        optimizer: of two kinds.
        follows: whether newcomers follow members also where the model is small.
        clamps: whether weights are changed outside the optimizer, too.
    """

    num_steps: float = 1e9
    num_samples: int = 301
    dtype: str = "float32"
    seed: int | None = None
    loader_seed: int = 3
    width: int = 24
    batch_norm: bool = False
    schedule: str = "constant"
    rule: str = "adascale"
    batch: str = "local"
    num_workers: int = 0
    plain_backward: bool = False
    chunk: int | None = None
    step_s: float = 0.0
    evaluate_every: int | None = None
    fail_at: int | None = None
    nan_at: int | None = None
    checkpoint_every: int | None = None
    loses_sums_at: int | None = None
    dies_in: int | None = None
    sharded: bool = False
    average_decay: float | None = None
    optimizer: str = "sgd"
    follows: bool = False
    clamps: bool = False


class Recorder:
    """Writes a worker's record, and waits at the gates that its supervisor opens."""

    def __init__(self, folder: Path, launch: ElasticLaunch) -> None:
        self._name = name_of(launch.worker, launch.group_index)
        self._launch = launch
        self.index = launch.group_index
        self._stop = folder / "stop"
        self._file = (folder / f"record-{self._name}.jsonl").open("a")
        self._place: tuple[int, int] | None = None
        self._passed: set[str] = set()

    @property
    def stop_asked(self) -> bool:
        return self._stop.exists()

    def write(self, kind: str, **fields: Any) -> None:
        line = {
            "kind": kind,
            "worker": self._launch.worker,
            "process": self._name,
            "time": time.monotonic(),
            **fields,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def open_place(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """Tell of the worker's state when it takes part in another group than before."""
        world = session.world
        place = world.generation, world.world_size
        if place != self._place:
            self._place = place
            self.write(
                "generation",
                generation=world.generation,
                rank=world.rank,
                world_size=world.world_size,
                position=session.position,
                digest=digest(session, optimizer),
                statistics=statistics_of(session.model),
                has_followed=has_followed(session),
            )

    def wait_at(self, gate: str, session: Session) -> None:
        """Wait, the first time, until the supervisor opens the gate, and its news are here.

        A few steps may be over before the news come by themselves.
        """
        if gate not in self._passed:
            self._passed.add(gate)
            store = connect(self._launch.store)
            store.set(f"held/{gate}/{self._name}", "")
            store.wait([f"gate/{gate}"], timedelta(minutes=5))
            if self.index == 0:
                number = int(store.get(f"gate/{gate}"))
                session._parts.membership._link.wait_newer(number - 1, timeout_s=60)


def has_followed(session: Session) -> bool:
    """Return whether the worker got its state by following a member up to this very step."""
    membership = session._parts.membership
    return membership._following.turns == membership._turns


def digest(session: Session, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all state that workers must have in common; collective if it is sharded."""
    tensors = [*session.model.parameters(), *optimizer_tensors(optimizer), *session.model.buffers()]
    state = session.state_dict()
    state.pop("rng")
    text = flat(tensors).numpy().tobytes() + repr(state).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return tensors, and shards as the whole that they are of, in one float64 vector."""
    whole = gathered(list(tensors), keep=True)
    return torch.cat([one.reshape(-1).double() for one in whole] or [torch.empty(0)])


def build_model(options: Options, *, worker: int) -> nn.Module:
    own_seed = time.time_ns() + worker
    torch.manual_seed(own_seed % 2**31 if options.seed is None else options.seed)
    width = options.width
    norm = [nn.BatchNorm1d(width)] if options.batch_norm else []
    model = nn.Sequential(nn.Linear(64, width), *norm, nn.Tanh(), nn.Linear(width, 10))
    return model.to(getattr(torch, options.dtype))


def build_session(
    options: Options, *, model: nn.Module, dataset: Digits
) -> tuple[Session, torch.optim.Optimizer, elastane.WeightAverage | None]:
    optimizer = OPTIMIZERS[options.optimizer](model)
    every = options.checkpoint_every
    stateful = {}
    if options.average_decay is not None:
        stateful["average"] = elastane.WeightAverage(model, decay=options.average_decay)
    session = Session(
        model,
        optimizer=optimizer,
        schedule=SCHEDULES[options.schedule](optimizer),
        dataset=dataset,
        base_batch_size=8,
        num_steps=options.num_steps,
        rule=RULES[options.rule],
        batch=BATCHES[options.batch],
        loader=LoaderOptions(seed=options.loader_seed, num_workers=options.num_workers),
        checkpoint=None if every is None else Checkpointing(every_s=None, every_steps=every),
        stateful=stateful,
        shard=shard if options.sharded else None,
        progress_bar=False,
    )
    return session, optimizer, stateful.get("average")


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(cast("nn.Sequential", model)[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def name_of(worker: int, index: int) -> str:
    """Return what the files of a worker's process are called after."""
    return str(worker) if index == 0 else f"{worker}.{index}"


def run(folder: Path, environment: dict[str, str], options: Options, *, index: int = 0) -> None:
    """Be a worker, or one of its processes: the target of a process of its own."""
    os.setsid()
    os.environ.update(environment, ELASTANE_GROUP_INDEX=str(index))
    launch = elastic_launch()
    assert launch is not None
    log = os.open(
        folder / f"worker-{name_of(launch.worker, index)}.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if options.follows:
        following.LEAST_BYTES, replay._PART_BYTES = 0, 1
        # On a busy machine a stream that falls behind is given up, which is no test's matter here.
        streams.MOST_WAITING, following._SILENCE_LIMIT_S = 100_000, 60.0
    recorder = Recorder(folder, launch)
    model = build_model(options, worker=launch.worker)
    if launch.group_size > 1:
        shard_in_team(model, folder=folder, launch=launch)
    dataset = Digits(options.num_samples, dtype=getattr(torch, options.dtype))
    session, optimizer, average = build_session(options, model=model, dataset=dataset)
    with session:
        train(session, optimizer, average, options=options, recorder=recorder, dataset=dataset)
        evaluation = session.evaluate(hits, dataset, batch_size=64)
        recorder.write(
            "end",
            correct=evaluation.sums["correct"],
            digest=digest(session, optimizer),
            weights=flat(model.parameters()).tolist(),
            optimizer=flat(optimizer_tensors(optimizer)).tolist(),
            average=None if average is None else flat(average.weights.values()).tolist(),
            position=session.position,
            lr=optimizer.param_groups[0]["lr"],
        )


def shard_in_team(model: nn.Module, *, folder: Path, launch: ElasticLaunch) -> None:
    """Shard a model over a worker's processes, in two units and with the default mesh."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/team-{launch.worker}",
        rank=launch.group_index,
        world_size=launch.group_size,
    )
    fully_shard(next(model.children()))
    fully_shard(model)


def statistics_of(model: nn.Module) -> list[Any]:
    return [buffer.double().tolist() for buffer in model.buffers()]


def hits(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    images, labels, indices = batch
    return {"correct": (model(images).argmax(1) == labels).sum(), "indices": indices.sum()}


@contextmanager
def losing_sums() -> Iterator[None]:
    """Have sums over the workers fail on this process when the others have got theirs."""
    add_up = Peers.sum

    def lose(self: Peers, values: torch.Tensor) -> None:
        add_up(self, values)
        raise CommunicationError("as the test wants it")

    with patch.object(Peers, "sum", lose):
        yield


def train(
    session: Session,
    optimizer: torch.optim.Optimizer,
    average: elastane.WeightAverage | None,
    *,
    options: Options,
    recorder: Recorder,
    dataset: Digits,
) -> None:
    seen: list[int] = []
    num_made, is_poisoned, has_lost = 0, False, False
    tells_digest = options.sharded and not options.batch_norm  # workers' statistics differ

    def gated_hits(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        recorder.wait_at("evaluation", session)
        return hits(model, batch)

    for images, labels, indices in session:
        if not session.warming:
            recorder.open_place(session, optimizer)
            if options.chunk:
                recorder.wait_at(str(session.position // options.chunk), session)
            seen += indices.tolist() if session.weight else []
        time.sleep(options.step_s)
        if options.fail_at is not None and session.position >= options.fail_at:
            raise RuntimeError("the user's own mistake")
        if recorder.stop_asked:
            session.stop()
        loss = F.cross_entropy(session.model(images), labels)
        if num_made + 1 == options.nan_at and not is_poisoned:
            loss = loss * float("nan")
            is_poisoned = session.is_last_micro_batch
        is_last = session.is_last_micro_batch
        if is_last and not session.warming:  # before backward, in which others get the gradients
            generation = session.world.generation
            recorder.write("dealt", generation=generation, start=session.position, seen=seen)
        loses = num_made + 1 == options.loses_sums_at and is_last and recorder.index == 1
        with losing_sums() if loses and not has_lost else nullcontext():
            if options.plain_backward:
                loss.backward()
            else:
                session.backward(loss)
        has_lost = has_lost or loses
        result = session.step()
        seen = [] if is_last else seen
        if result is None:
            continue
        num_made = result.step
        if average is not None:
            average.update(result)
        if options.clamps:
            with torch.no_grad():
                next(session.model.parameters()).mul_(0.999)
        recorder.write(
            "step",
            generation=result.generation,
            step=result.step,
            start=result.position - (0 if result.skipped else result.batch_samples),
            position=result.position,
            batch=result.batch_samples,
            lr=result.lr,
            gain=result.gain,
            progress=result.progress,
            loss=result.loss,
            scale=result.scale,
            world_size=result.world_size,
            skipped=result.skipped,
            norm=result.grad_norm,
            digest=digest(session, optimizer) if tells_digest else None,
            statistics=statistics_of(session.model) if options.batch_norm else None,
        )
        if result.generation == options.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.evaluate_every and result.step % options.evaluate_every == 0:
            evaluation = session.evaluate(gated_hits, dataset, batch_size=64)
            recorder.write("evaluation", step=result.step, sums=evaluation.sums)
