"""Adds up over a validation set, for all tasks alike.

Knows how to go over a set; nothing of what is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.tasks.task import Data
from elastane import LoaderOptions
from elastane.batching import World
from elastane.evaluation import Evaluation
from elastane.evaluation import evaluate as add_up_once

__all__ = ["add_up"]

_BATCH_SIZE = 250


def add_up(
    sums: Callable[[nn.Module, Any], Mapping[str, Tensor | float]], *, model: nn.Module, data: Data
) -> Evaluation:
    """Return the sums over the validation set; the model is in training mode afterwards.

    Args:
        sums: called with the model, in evaluation mode, and a batch; returns sums over its samples.
        model: that is measured.
        data: whose validation set.
    """
    evaluation = add_up_once(
        sums,
        model=model,
        dataset=data.validation,
        options=LoaderOptions(collate_fn=data.collate),
        batch_size=_BATCH_SIZE,
        world=World(),
        peers=None,
    )
    model.train()
    return evaluation
