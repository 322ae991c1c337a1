"""The one file that reads the environment: what a launcher says of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = [
    "ElasticLaunch",
    "Launch",
    "elastic_launch",
    "follow_bytes",
    "gloo_interface",
    "hidden_launch",
    "launch",
    "local_rank",
    "runtime_dir",
    "worker_defaults",
]


_PLACES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""By which other libraries know that a launcher started this process."""

_FOLLOW_MB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What torchrun, or a launcher like it, set for this process."""

    rank: int
    world_size: int


def launch() -> Launch | None:
    """Return the launcher's settings, or `None` under plain python."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None or "MASTER_ADDR" not in os.environ:
        return None
    return Launch(rank=int(rank), world_size=int(world_size))


def follow_bytes() -> float:
    """Return from how many bytes of parameters on newcomers follow: `ELASTANE_FOLLOW_MB`.

    Raises:
        ValueError: it is no number.
    """
    given = os.environ.get("ELASTANE_FOLLOW_MB") or _FOLLOW_MB
    try:
        return float(given) * 2**20
    except ValueError:
        raise ValueError(
            f"ELASTANE_FOLLOW_MB={given!r} must be a number of megabytes of parameters, from which "
            f"on newcomers follow: {_FOLLOW_MB} if it is left out; with inf none does"
        ) from None


def local_rank() -> int | None:
    """Return this process's place on its machine, or `None` under plain python."""
    place = os.environ.get("LOCAL_RANK")
    return None if place is None else int(place)


@contextmanager
def hidden_launch() -> Iterator[None]:
    """Hide for the length of a block that a launcher started this process.

    For libraries that would open a process group of their own as soon as they find one.
    """
    hidden = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLaunch:
    """What `elastane run` sets for a worker, each as `ELASTANE_` and the name in capitals.

    Attributes:
        store: HOST:PORT of the job's store.
        job: name of the job.
        worker: this worker's id, never used by another.
        agent: id of the agent that started it.
        slot: number of its place on that agent.
        run_dir: the run's folder.
        expected_workers: how many there will be, for the discarded step.
        max_workers: how many there may be.
        beat_interval_s: seconds between two beats.
        orphan_limit_s: seconds without a launcher after which it writes a checkpoint and exits.
        group_size: processes of this worker, which shard one copy of the model between them.
        group_index: number of this process among them; the first one speaks for the worker.
    """

    store: str
    job: str
    worker: int
    agent: str
    slot: int
    run_dir: str
    expected_workers: int = 1
    max_workers: int = 1
    beat_interval_s: float = 0.2
    orphan_limit_s: float = 300.0
    group_size: int = 1
    group_index: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables to set for the worker."""
        names = (one.name for one in fields(self))
        return {f"ELASTANE_{name.upper()}": str(getattr(self, name)) for name in names}


def elastic_launch() -> ElasticLaunch | None:
    """Return what `elastane run` set for this process, or `None` under another launcher."""
    if "ELASTANE_STORE" not in os.environ:
        return None
    kinds = {"int": int, "float": float, "str": str}
    values = {
        one.name: kinds[str(one.type)](os.environ[f"ELASTANE_{one.name.upper()}"])
        for one in fields(ElasticLaunch)
        if f"ELASTANE_{one.name.upper()}" in os.environ
    }
    return ElasticLaunch(**values)


def runtime_dir() -> Path | None:
    """Return the folder that the system set aside for this user's sockets, if it says so."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) if folder else None


def gloo_interface() -> str | None:
    """Return the network interface that process groups were told to use, if they were."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def worker_defaults() -> dict[str, str]:
    """Return what a worker's environment holds unless it is set already.

    One OpenMP thread, as under torchrun. And no C++ warnings: torch writes a page of them whenever
    a connection ends that an elastic job ends on purpose.
    """
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
