"""The ways to make a step that are compared, each over its own copy of the model.

Knows how each library is used; nothing of how steps are timed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.overhead.models import Subject
from elastane import LocalBatch, Measuring, Session
from elastane._compat import no_buffer_sync
from elastane.norms import squared_norm_of_all

__all__ = [
    "ADAPTDL",
    "CLIPPED",
    "METHODS",
    "PLAIN",
    "Setting",
    "Step",
    "find_peers",
    "missing",
    "open_adaptdl",
]

Step = Callable[[], None]
"""Makes one optimizer step: loads samples, forward, backward, update."""

PLAIN, CLIPPED, ADAPTDL = "plain", "plain, clipped", "AdaptDL"
_LR, _MOMENTUM, _NO_CLIP = 1e-3, 0.9, 1e9
_ENDLESS = 10**12
_PEERS = Path(__file__).resolve().parents[2] / "build" / "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all methods of a comparison have in common.

    Attributes:
        subject: model and data.
        batch: samples of a micro-batch.
        processes: workers; more than one train under DDP.
        micro_batches: of a worker's step.
    """

    subject: Subject
    batch: int
    processes: int
    micro_batches: int

    def model(self) -> nn.Module:
        """Return the model; the same weights each time."""
        torch.manual_seed(0)
        return self.subject.build()

    def replica(self) -> nn.Module:
        """Return the model as it is trained by hand."""
        model = self.model()
        return DistributedDataParallel(model, **no_buffer_sync()) if self.processes > 1 else model

    def batches(self) -> Iterator[list[Tensor]]:
        """Yield this worker's micro-batches without end."""
        dataset = self.subject.dataset()
        sampler = DistributedSampler(
            dataset,
            num_replicas=self.processes,
            rank=dist.get_rank() if self.processes > 1 else 0,
        )
        loader = DataLoader(dataset, batch_size=self.batch, sampler=sampler, drop_last=True)
        while True:
            yield from loader


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)


def _by_hand(
    setting: Setting,
    *,
    before_step: Callable[[nn.Module], Any] = lambda model: None,  # noqa: ARG005
    after_backward: Callable[[nn.Module], Any] = lambda model: None,  # noqa: ARG005
    wrap: Callable[[torch.optim.SGD], Any] = lambda optimizer: optimizer,
) -> Step:
    model, batches, count = setting.replica(), setting.batches(), setting.micro_batches
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    optimizer = wrap(_sgd(model))

    def step() -> None:
        for number in range(count):
            is_last = number == count - 1
            with nullcontext() if is_last or wrapper is None else wrapper.no_sync():
                samples, labels = next(batches)
                (F.cross_entropy(model(samples), labels) / count).backward()
            after_backward(model)
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain(setting: Setting, _: ExitStack) -> Step:
    return _by_hand(setting)


def _clipped(setting: Setting, _: ExitStack) -> Step:
    return _by_hand(
        setting,
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), _NO_CLIP),
    )


@torch.no_grad()
def _read(model: nn.Module) -> None:
    squared_norm_of_all([p.grad for p in model.parameters() if p.grad is not None])


def _floor(setting: Setting, _: ExitStack) -> Step:
    """Return a plain step that reads each micro-gradient once, and the mean once more."""
    return _by_hand(setting, before_step=_read, after_backward=_read)


def _floor_of_mean(setting: Setting, _: ExitStack) -> Step:
    """Return a plain step that reads the mean gradient once, as one that is not measured does."""
    return _by_hand(setting, before_step=_read)


def _fairscale(setting: Setting, _: ExitStack) -> Step:
    from fairscale.optim import AdaScale  # pyright: ignore[reportMissingImports]

    def wrap(optimizer: torch.optim.SGD) -> Any:
        return AdaScale(
            optimizer,
            world_size=setting.processes,
            num_gradients_to_accumulate=setting.micro_batches,
        )

    return _by_hand(setting, wrap=wrap)


def _adaptdl(setting: Setting, _: ExitStack) -> Step:
    from adaptdl.torch import (  # pyright: ignore[reportMissingImports]
        AdaptiveDataLoader,
        AdaptiveDataParallel,
        remaining_epochs_until,
    )

    model = setting.model()
    optimizer = _sgd(model)
    wrapper = AdaptiveDataParallel(model, optimizer, **no_buffer_sync())
    loader = AdaptiveDataLoader(
        setting.subject.dataset(), batch_size=setting.batch * setting.processes, drop_last=True
    )
    batches = (batch for _ in remaining_epochs_until(_ENDLESS) for batch in loader)

    def step() -> None:
        samples, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(wrapper(samples), labels).backward()
        optimizer.step()

    return step


def _elastane(
    *, measuring: Measuring | None = None, max_norm: float | None = None
) -> Callable[[Setting, ExitStack], Step]:
    def build(setting: Setting, stack: ExitStack) -> Step:
        model = setting.model()
        session = Session(
            model,
            optimizer=_sgd(model),
            dataset=setting.subject.dataset(),
            base_batch_size=setting.batch,
            num_steps=_ENDLESS,
            batch=LocalBatch(
                setting.batch * setting.micro_batches, micro_batches=setting.micro_batches
            ),
            measuring=measuring or Measuring(),
            max_norm=max_norm,
            progress_bar=False,
        )
        stack.enter_context(session)
        batches = iter(session)

        def step() -> None:
            result = None
            while result is None:
                samples, labels = next(batches)
                session.backward(F.cross_entropy(session.model(samples), labels))
                result = session.step()

        return step

    return build


METHODS: Mapping[str, Callable[[Setting, ExitStack], Step]] = {
    PLAIN: _plain,
    "plain again": _plain,
    CLIPPED: _clipped,
    "floor": _floor,
    "floor, mean only": _floor_of_mean,
    "elastane": _elastane(),
    "elastane, every step": _elastane(measuring=Measuring(every=1)),
    "elastane, every 4th step": _elastane(measuring=Measuring(every=4)),
    "elastane, clipped": _elastane(max_norm=_NO_CLIP),
    "fairscale": _fairscale,
    ADAPTDL: _adaptdl,
}

_NEEDED = {"fairscale": "fairscale", ADAPTDL: "adaptdl"}


def missing(method: str, *, processes: int, micro_batches: int) -> str | None:
    """Return why a method can't be compared, or `None`."""
    if method == ADAPTDL and (processes, micro_batches) != (2, 1):
        return "AdaptDL chooses its micro-batches itself, and measures one worker by differences"
    needed = _NEEDED.get(method)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return f"{needed} is not installed: run scripts/peers"
    return None


def open_adaptdl(*, rank: int, processes: int, port: int) -> None:
    """Open the process group by AdaptDL, which wants connections of its own beside it."""
    from adaptdl import torch as adaptdl  # pyright: ignore[reportMissingImports]

    os.environ |= {
        "ADAPTDL_MASTER_ADDR": "127.0.0.1",
        "ADAPTDL_MASTER_PORT": str(port),
        "ADAPTDL_REPLICA_RANK": str(rank),
        "ADAPTDL_NUM_REPLICAS": str(processes),
    }
    adaptdl.init_process_group("gloo")


def find_peers() -> None:
    """Let what `scripts/peers` installed be imported, behind everything else."""
    if str(_PEERS) not in sys.path:
        sys.path.append(str(_PEERS))
