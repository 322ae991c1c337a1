"""What a task is: real data, a model, a loss, a metric, and the recipe tuned for its base batch.

Knows nothing of rules, scales, workers or what is compared; the tasks lie beside it, one a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["Data", "Recipe", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyper-parameters, all tuned at the base batch only; SGD with momentum, or AdamW.

    Attributes:
        base_batch_size: samples of a base step, as few as train well.
        num_steps: length of a run in base steps.
        lr: of a base step.
        momentum: of SGD.
        weight_decay: on all parameters.
        schedule: multiplier of `lr` by the part of the run that is done, 0 to 1.
        tried: what the tuning tried, for the documentation.
        betas: of AdamW; `None` for SGD.
    """

    base_batch_size: int
    num_steps: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: Callable[[float], float]
    tried: str
    betas: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Samples to train on, and others to measure on.

    Attributes:
        train: map-style dataset.
        validation: map-style dataset that shares no source sample with `train`.
        collate: makes a micro-batch of samples; `None` for torch's own way.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    collate: Callable[[Sequence[Any]], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    Attributes:
        name: as on the command line.
        title: as in tables: what is trained on what, in a few words.
        metric: its name; a key of what `evaluate` returns, beside `loss`.
        higher_is_better: of the metric.
        recipe: of the full task.
        quick_recipe: of a form that trains in about 5 s, and shows the same in small.
        load: data of the full task, or of the quick one.
        build: a fresh model; drawn from torch's global generator.
        loss: mean over the samples of a micro-batch of a loss that is a sum over nothing but that
            sample, so that the mean over micro-batches is that of the whole batch.
        evaluate: metric and mean loss over the validation set; leaves the model in training mode.
        missing: what has to be installed or fetched first, or `None`.
    """

    name: str
    title: str
    metric: str
    higher_is_better: bool
    recipe: Recipe
    quick_recipe: Recipe
    load: Callable[[bool], Data]
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module, Data], Mapping[str, float]]
    missing: Callable[[], str | None]
