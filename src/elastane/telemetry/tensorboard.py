"""Shows events in TensorBoard.

Knows which fields of a step are curves; imports TensorBoard only when a sink is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING

from elastane.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SCALARS = (
    "loss",
    "lr",
    "factor",
    "gain",
    "scale",
    "batch_samples",
    "world_size",
    "noise_scale",
    "grad_norm",
    "progress",
)


class TensorBoardSink:
    """Writes steps and metrics as curves against the step, all other events as text.

    Values that are None are left out, and skipped steps appear as text only. The folder is created
    by the first event, so that every worker may make the sink though rank 0 alone writes.

    Args:
        log_dir: Folder for TensorBoard's files, what ``tensorboard --logdir`` is given.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"TensorBoardSink needs TensorBoard, which can't be imported ({error}). "
                "In a checkout of elastane: pip install '.[tensorboard]'"
            ) from error
        self._open = partial(SummaryWriter, fspath(log_dir))
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._closed = False

    def write(self, event: Mapping[str, object], /) -> None:
        """Add the event's curves or its text.

        Raises:
            UsageError: The sink is closed.
        """
        if self._closed:
            raise UsageError("write to a TensorBoardSink after close(). Emit before the run ends.")
        self._writer = self._writer or self._open()
        kind = str(event["event"])
        step = event.get("step")
        self._step = step if isinstance(step, int) else self._step
        if kind == "step" and not event.get("skipped"):
            self._add_scalars(kind, {name: event.get(name) for name in _SCALARS}, event=event)
            return
        if kind == "evaluation":
            self._add_scalars(kind, _metrics(event), event=event)
        self._writer.add_text(kind, _as_text(event), self._step, walltime=_time(event))

    def _add_scalars(
        self, kind: str, values: Mapping[str, object], *, event: Mapping[str, object]
    ) -> None:
        assert self._writer is not None
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{name}", value, self._step, walltime=_time(event))

    def close(self) -> None:
        """Write out what is left and close the files."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()


def _metrics(event: Mapping[str, object]) -> dict[str, object]:
    prefix = "metric_"
    return {
        name.removeprefix(prefix): value for name, value in event.items() if name.startswith(prefix)
    }


def _time(event: Mapping[str, object]) -> float | None:
    time = event.get("time")
    return time if isinstance(time, float) else None


def _as_text(event: Mapping[str, object]) -> str:
    """Return the fields as one line of Markdown, which TensorBoard renders."""
    fields = (f"{name}: `{event[name]}`" for name in event if name not in ("event", "time"))
    return ", ".join(fields)
