"""One comparison, in processes of its own: rounds in which each method makes some steps in turn.

Knows how methods are timed; nothing of what they do, or of tables.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overhead.methods import (
    ADAPTDL,
    METHODS,
    PLAIN,
    Setting,
    Step,
    find_peers,
    open_adaptdl,
)
from benchmarks.overhead.models import SUBJECTS
from benchmarks.processes import free_port, run_together

__all__ = ["Comparison", "compare"]

_BLOCK_S, _WARM_STEPS, _LIMIT_S = 0.1, 12, 1_800
_LEAST_STEPS, _LEAST_ROUNDS = 2, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
        model: name of the subject.
        batch: samples of a micro-batch.
        processes: workers.
        micro_batches: of a worker's step.
        methods: their names, plain first.
        rounds: number of them; fewer, but at least 12, where they would take too long.
        limit_s: how long they may take, roughly.
    """

    model: str
    batch: int
    processes: int
    micro_batches: int
    methods: Sequence[str]
    rounds: int
    limit_s: float


def compare(comparison: Comparison) -> dict[str, Any]:
    """Return each method's processor and wall seconds of a step by round, and a block's steps.

    Processor time is that of all workers.

    Raises:
        RuntimeError: a process failed, or took too long.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="elastane-overhead-") as name:
        folder = Path(name)
        processes = [
            context.Process(target=_work, args=(comparison, rank, str(folder), port))
            for rank in range(comparison.processes)
        ]
        run_together(processes, deadline=time.monotonic() + _LIMIT_S)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes ended with exit codes {codes}")
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(codes))]
    steps = ranks[0]["steps"]
    times = {
        method: {
            "cpu": [
                sum(seconds) / steps
                for seconds in zip(*(rank["cpu"][method] for rank in ranks), strict=True)
            ],
            "wall": [seconds / steps for seconds in ranks[0]["wall"][method]],
        }
        for method in comparison.methods
    }
    return {"steps": steps, "times": times}


def _work(comparison: Comparison, rank: int, folder: str, port: int) -> None:
    """Be one worker of a comparison."""
    torch.set_num_threads(1)
    find_peers()
    if ADAPTDL in comparison.methods:
        open_adaptdl(rank=rank, processes=comparison.processes, port=port)
    elif comparison.processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=comparison.processes,
        )
    setting = Setting(
        subject=SUBJECTS[comparison.model],
        batch=comparison.batch,
        processes=comparison.processes,
        micro_batches=comparison.micro_batches,
    )
    with ExitStack() as stack:
        steps = {method: METHODS[method](setting, stack) for method in comparison.methods}
        found = _rounds(steps, comparison)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if comparison.processes > 1:
        dist.destroy_process_group()


def _rounds(steps: dict[str, Step], comparison: Comparison) -> dict[str, Any]:
    for step in steps.values():
        for _ in range(_WARM_STEPS):
            step()
    count, step_s = _block(steps[PLAIN], processes=comparison.processes)
    names = list(steps)
    in_time = int(comparison.limit_s / (count * step_s * len(names)))
    rounds = min(comparison.rounds, max(in_time, _LEAST_ROUNDS))
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in order if number % 2 == 0 else reversed(order):
            _meet(comparison.processes)
            begun, began = time.process_time(), time.perf_counter()
            for _ in range(count):
                steps[name]()
            cpu[name].append(time.process_time() - begun)
            wall[name].append(time.perf_counter() - began)
    return {"steps": count, "cpu": cpu, "wall": wall}


def _block(plain: Step, *, processes: int) -> tuple[int, float]:
    """Return how many plain steps fill a block, and how long one takes: the same on all workers."""
    began = time.perf_counter()
    for _ in range(_WARM_STEPS):
        plain()
    step_s = (time.perf_counter() - began) / _WARM_STEPS
    seconds = torch.tensor(step_s, dtype=torch.float64)
    if processes > 1:
        dist.broadcast(seconds, src=0)
    step_s = float(seconds)
    return max(round(_BLOCK_S / step_s), _LEAST_STEPS), step_s


def _meet(processes: int) -> None:
    if processes > 1:
        dist.barrier()
