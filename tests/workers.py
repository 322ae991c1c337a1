"""Starts real worker processes for a test, over gloo and a file store, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "torch.optim", "elastane.session", "sklearn.datasets"]
)


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    folder: Path,
    timeout_s: float = 90,
    backend: str = "gloo",
) -> list[Any]:
    """Run `function(*arguments)` in each of `world_size` processes and return what they returned.

    The process group is open while the function runs; a single process has none. What is
    returned goes through torch.save. A worker's traceback fails the test, and so does a hang.
    """
    folder = folder / f"workers-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    processes = [
        _CONTEXT.Process(
            target=_work, args=(function, arguments, rank, world_size, folder, backend)
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert not hung, f"ranks {hung} did not end within {timeout_s} s"
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(world_size)]


def _work(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: Path,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size
            )
        torch.save(function(*arguments), folder / f"result-{rank}")
        if world_size > 1:
            dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
