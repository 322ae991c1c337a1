"""All loops of a setting in processes of their own, in rounds in which each makes some steps.

Knows how steps are timed; nothing of what they do, or of tables.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fixed.loops import Setting, Step, plain_step, session_step
from benchmarks.fixed.recorder import Recorder
from benchmarks.processes import run_together

__all__ = ["CLOCKS", "LOOPS", "TIMED", "measure"]

_WARM_STEPS, _BLOCK_STEPS, _LIMIT_S = 20, 20, 1_800

LOOPS = ("plain", "plain again", "elastane", "elastane with events")
TIMED = ("plain", "elastane", "elastane with events")
"""Those that are there a second time, with their parts timed."""

Times = dict[str, list[dict[str, float]]]


CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def measure(workers: int, micro_batches: int, *, rounds: int, clock: str) -> dict[str, Any]:
    """Return what rank 0 saw: microseconds of each step by part, of each loop.

    Args:
        workers: number of them.
        micro_batches: of each worker's step.
        rounds: blocks of each loop.
        clock: name of it.

    Raises:
        RuntimeError: a process failed, or took too long.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="elastane-fixed-") as folder:
        processes = [
            context.Process(
                target=_work,
                args=(Setting(workers=workers, micro_batches=micro_batches, rank=rank),),
                kwargs={"folder": folder, "rounds": rounds, "clock": clock},
            )
            for rank in range(workers)
        ]
        run_together(processes, deadline=time.monotonic() + _LIMIT_S)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes ended with exit codes {codes}")
        return json.loads(Path(folder, "times.json").read_text())


def _work(setting: Setting, *, folder: str, rounds: int, clock: str) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    if setting.workers > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=setting.rank,
            world_size=setting.workers,
        )
    recorder = Recorder(CLOCKS[clock])
    with ExitStack() as stack:
        untimed = _steps(setting, None, stack, folder=Path(folder, "untimed"))
        timed = _steps(setting, recorder, stack, folder=Path(folder, "timed"))
        whole, parts = _rounds(
            untimed, {name: timed[name] for name in TIMED}, recorder, rounds=rounds
        )
    if setting.rank == 0:
        found = {"whole": whole, "parts": parts, "call_us": recorder.call_ns / 1e3}
        Path(folder, "times.json").write_text(json.dumps(found))
    if setting.workers > 1:
        dist.destroy_process_group()


def _steps(
    setting: Setting, recorder: Recorder | None, stack: ExitStack, *, folder: Path
) -> Mapping[str, Step]:
    builders: Mapping[str, Callable[..., Step]] = {
        "plain": plain_step,
        "plain again": plain_step,
        "elastane": session_step,
        "elastane with events": partial(session_step, run_dir=folder),
    }
    wanted = LOOPS if recorder is None else TIMED
    return {name: builders[name](setting, recorder, stack) for name in wanted}


def _rounds(
    untimed: Mapping[str, Step], timed: Mapping[str, Step], recorder: Recorder, *, rounds: int
) -> tuple[Times, Times]:
    """Return the steps of the loops without timed parts, and of those with them."""
    whole: Times = {name: [] for name in untimed}
    parts: Times = {name: [] for name in timed}
    steps = [(step, False, whole[name]) for name, step in untimed.items()]
    steps += [(step, True, parts[name]) for name, step in timed.items()]
    for step, is_timed, _ in steps:
        _block(step, recorder, [], is_timed=is_timed, count=_WARM_STEPS)
    for number in range(rounds):
        shift = number // 2 % len(steps)
        order = steps[shift:] + steps[:shift]
        for step, is_timed, found in order if number % 2 == 0 else reversed(order):
            _block(step, recorder, found, is_timed=is_timed, count=_BLOCK_STEPS)
    return whole, parts


def _block(
    step: Step,
    recorder: Recorder,
    found: list[dict[str, float]],
    *,
    is_timed: bool,
    count: int,
) -> None:
    if dist.is_initialized():
        dist.barrier()
    clock = recorder.clock
    for _ in range(count):
        began = clock()
        step()
        step_ns = clock() - began
        found.append(recorder.step(step_ns) if is_timed else {"step": step_ns / 1e3})
