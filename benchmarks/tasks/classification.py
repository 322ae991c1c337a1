"""Loss and metric of the tasks that sort images into classes.

Knows batches of inputs and labels; nothing of which images they are.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tasks.task import Data
from benchmarks.tasks.validation import add_up

__all__ = ["evaluate", "loss"]

Batch = list[Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def evaluate(model: nn.Module, data: Data) -> dict[str, float]:
    """Return accuracy and mean loss over the validation set."""
    result = add_up(_sums, model=model, data=data)
    return {"accuracy": result.mean("correct"), "loss": result.mean("loss")}


def _sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    inputs, labels = batch
    logits = model(inputs)
    return {
        "correct": (logits.argmax(1) == labels).sum(),
        "loss": F.cross_entropy(logits, labels, reduction="sum"),
    }
