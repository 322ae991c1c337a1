"""The processes of the table: each carries out all runs of one number of workers, one by one.

A run has a process group of its own, so that one that fails leaves the others alone.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.oracle.features import FEATURES
from benchmarks.oracle.job import NUM_STEPS
from benchmarks.oracle.subject import train
from benchmarks.processes import run_together
from elastane._compat import FileStore, Store

__all__ = ["Case", "carry_out", "errors_of", "records_of"]

_GROUP_LIMIT_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.oracle.worker", "elastane.session"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        feature: its name.
        worlds: numbers of workers that it goes through.
    """

    feature: str
    worlds: tuple[int, ...]

    def file(self, folder: Path, *, world_size: int, kind: str) -> Path:
        """Return where something of the run lies."""
        name = self.feature.replace("/", " ")
        worlds = "-".join(map(str, self.worlds))
        return folder / f"{name}, {worlds}, {world_size}, {kind}"


def carry_out(cases: Sequence[Case], *, folder: Path, limit_s: float) -> None:
    """Carry out all runs that have no record yet; those through several worlds in their order."""
    deadline = time.monotonic() + limit_s
    by_length = sorted(cases, key=lambda case: len(case.worlds), reverse=True)
    worlds = list(dict.fromkeys(world for case in by_length for world in case.worlds))
    for world_size in worlds:
        now = [case for case in cases if world_size in case.worlds]
        now = [case for case in now if not _is_done(case, folder=folder, world_size=world_size)]
        if not now:
            continue
        for case in now:
            for kind in ("store", *(f"error {rank}" for rank in range(world_size))):
                case.file(folder, world_size=world_size, kind=kind).unlink(missing_ok=True)
        processes = [
            _CONTEXT.Process(target=_work, args=(now, folder, rank, world_size))
            for rank in range(world_size)
        ]
        run_together(processes, deadline=deadline)


def _is_done(case: Case, *, folder: Path, world_size: int) -> bool:
    """Return whether all ranks have left a record, by an earlier call."""
    kinds = [f"record {rank}" for rank in range(world_size)]
    return all(case.file(folder, world_size=world_size, kind=kind).exists() for kind in kinds)


def records_of(case: Case, *, folder: Path) -> list[list[dict[str, Any]]]:
    """Return the ranks' records of each phase of a run."""
    return [
        [
            torch.load(case.file(folder, world_size=world, kind=f"record {r}"), weights_only=True)
            for r in range(world)
        ]
        for world in case.worlds
    ]


def errors_of(case: Case, *, folder: Path) -> list[str]:
    """Return what went wrong in a run, if anything: a rank's error, or that it has no end."""
    errors = []
    for world in case.worlds:
        for rank in range(world):
            error = case.file(folder, world_size=world, kind=f"error {rank}")
            record = case.file(folder, world_size=world, kind=f"record {rank}")
            if error.exists():
                errors.append(error.read_text(encoding="utf-8"))
            elif not record.exists():
                errors.append(f"rank {rank} of {world} came to no end")
    return errors


def _work(cases: Sequence[Case], folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=UserWarning)
    warnings.filterwarnings("ignore", message="the model has SyncBatchNorm")
    for case in cases:
        try:
            record = _train(case, folder=folder, rank=rank, world_size=world_size)
            torch.save(record, case.file(folder, world_size=world_size, kind=f"record {rank}"))
        except Exception:
            error = case.file(folder, world_size=world_size, kind=f"error {rank}")
            error.write_text(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _train(case: Case, *, folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    feature = FEATURES[case.feature]
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            store=_store(case, folder=folder, world_size=world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_GROUP_LIMIT_S),
        )
    phase = case.worlds.index(world_size)
    ends = [NUM_STEPS * (done + 1) // len(case.worlds) for done in range(len(case.worlds))]
    before = case.worlds[phase - 1] if phase else None
    state = case.file(folder, world_size=world_size, kind="state")
    return train(
        feature.form,
        feature.job,
        num_steps=ends[phase] - (ends[phase - 1] if phase else 0),
        state=None if before is None else case.file(folder, world_size=before, kind="state"),
        save=None if phase + 1 == len(ends) else state,
    )


def _store(case: Case, *, folder: Path, world_size: int) -> Store:
    path = case.file(folder, world_size=world_size, kind="store")
    return FileStore(str(path), world_size)
