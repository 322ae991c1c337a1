"""What a Lightning Trainer and its module were given: refused, or said in the session's terms.

Free functions; each refusal names the argument, the value, the rule and the way out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torchmetrics import Metric

from elastane.data import LoaderOptions
from elastane.errors import ArgumentError, UnsupportedError, describe
from elastane.session import Session

__all__ = [
    "base_steps",
    "check_metrics",
    "check_module",
    "check_options",
    "check_trainer",
    "loader_options",
    "schedules_of",
]

_OWN_OPTIONS = {
    "model": "Pass it to Trainer.fit.",
    "optimizer": "Return it from configure_optimizers.",
    "schedule": "Return it from configure_optimizers.",
    "dataset": "Pass a DataLoader to Trainer.fit.",
    "base_batch_size": "It is the DataLoader's batch_size.",
    "loader": "The DataLoader says it; seed= is the seed of the samples' order.",
    "num_steps": "Give the Trainer max_steps.",
    "num_epochs": "Give the Trainer max_epochs.",
    "max_norm": "Give the Trainer gradient_clip_val.",
    "scaler": "Precision 16-mixed is not supported; bf16-mixed needs no scaler.",
    "shard": "Sharded models are trained with elastane.Session itself.",
}
_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_OVERRIDES = {
    "backward": "the session runs backward, to weight and to measure. Change the loss instead",
    "configure_gradient_clipping": (
        "the session clips the mean of all workers. Give the Trainer gradient_clip_val, or change "
        "the gradients in on_before_optimizer_step"
    ),
    "lr_scheduler_step": (
        "the session moves the schedule, by progress. Write a torch scheduler that counts base "
        "steps instead"
    ),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments that the session does not have, or that the Trainer says already."""
    known = inspect.signature(Session).parameters.keys() - _OWN_OPTIONS.keys()
    for name, value in options.items():
        if name in _OWN_OPTIONS:
            rule = "is not an argument of this strategy, for the Trainer says it"
            raise ArgumentError(describe(name, value, rule=rule, way_out=_OWN_OPTIONS[name]))
        if name not in known:
            rule, way_out = "no such argument", f"There are {', '.join(sorted(known))}."
            raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def check_trainer(trainer: Trainer) -> None:
    """Refuse settings of the Trainer that the session would have to break."""
    settings: Any = trainer  # some of them have no type
    if settings.accumulate_grad_batches != 1:
        rule = "counts batches, and how many a step has follows the workers"
        way_out = (
            "Leave it at 1 and give the strategy a batch policy, for example "
            "batch=LocalBatch(64, micro_batches=4)."
        )
        raise _refused("accumulate_grad_batches", settings.accumulate_grad_batches, rule, way_out)
    if settings.gradient_clip_val and settings.gradient_clip_algorithm not in (None, "norm"):
        rule = "the session clips by the norm of the mean of all workers"
        way_out = 'Take "norm", or clamp the gradients in on_before_optimizer_step.'
        algorithm = str(settings.gradient_clip_algorithm.value)
        raise _refused("gradient_clip_algorithm", algorithm, rule, way_out)
    interval = getattr(settings, "val_check_interval", "a time")
    if interval != 1.0:
        rule = "workers count batches of their own, so they would validate after different steps"
        way_out = "Leave it at 1.0 and use check_val_every_n_epoch."
        raise _refused("val_check_interval", interval, rule, way_out)
    if settings.overfit_batches:
        rule, way_out = "the session deals every sample", "Train on a torch.utils.data.Subset."
        raise _refused("overfit_batches", settings.overfit_batches, rule, way_out)
    if settings.limit_train_batches != 1.0 and not settings.fast_dev_run:
        rule = "the session deals every sample"
        way_out = "Train on a torch.utils.data.Subset, or for fewer steps with max_steps."
        raise _refused("limit_train_batches", settings.limit_train_batches, rule, way_out)
    if settings.reload_dataloaders_every_n_epochs:
        rule = "the samples that a run deals from stay the same"
        value = settings.reload_dataloaders_every_n_epochs
        raise _refused("reload_dataloaders_every_n_epochs", value, rule, "Leave it at 0.")
    if settings.min_steps is not None:
        rule = "a run takes fewer optimizer steps the larger the batch is"
        raise _refused("min_steps", settings.min_steps, rule, "Use min_epochs.")
    precision = str(settings.precision)
    if precision not in _PRECISIONS:
        rule = "the session has not been tried with it"
        raise _refused("precision", precision, rule, f"Take one of {', '.join(_PRECISIONS)}.")


def check_module(module: LightningModule) -> None:
    """Refuse a module that does what is the session's part."""
    name = type(module).__name__
    if not module.automatic_optimization:
        rule = "with optimization by hand nobody but your code knows where a step ends"
        way_out = "Leave it True, or write the loop with elastane.Session."
        raise ArgumentError(
            describe(f"{name}.automatic_optimization", False, rule=rule, way_out=way_out)
        )
    for hook, why in _OVERRIDES.items():
        if is_overridden(hook, module, parent=LightningModule):
            raise UnsupportedError(f"{name}.{hook} is overridden: {why}")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            f"{name}.training_step takes dataloader_iter: the session knows of a micro-batch only "
            "if it hands it out. Take (batch, batch_idx)"
        )


def check_metrics(module: LightningModule) -> None:
    """Refuse metrics that would talk to the other workers beside the session."""
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and (metric.sync_on_compute or metric.dist_sync_on_step):
            rule = (
                "it would wait for the other workers, who may be gone, and count a set they share"
            )
            way_out = "Build it with sync_on_compute=False: each worker validates on the whole set."
            where = f"{name}.sync_on_compute"
            raise ArgumentError(describe(where, True, rule=rule, way_out=way_out))


def loader_options(loader: object, *, seed: int) -> LoaderOptions:
    """Return how the samples of a DataLoader are to be dealt and loaded.

    Raises:
        UnsupportedError: no DataLoader, or one that chooses the samples itself.
        ArgumentError: `drop_last`.
    """
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"train_dataloaders is a {type(loader).__name__}: the session deals the samples, so "
            "pass one torch.utils.data.DataLoader of a map-style dataset"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"the DataLoader's dataset is a {type(loader.dataset).__name__}, an iterable dataset: "
            "its samples can't be dealt anew when the workers change; wrap it as a map-style "
            "dataset with __getitem__ and __len__"
        )
    shuffle = _is_shuffled(loader)
    if loader.drop_last:
        rule = "the session deals every sample, also those of the last batch of an epoch"
        way_out = "Leave drop_last out."
        raise ArgumentError(describe("DataLoader(drop_last)", True, rule=rule, way_out=way_out))
    processes: dict[str, Any] = {}
    if loader.num_workers:
        context = loader.multiprocessing_context
        processes = {
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "worker_init_fn": loader.worker_init_fn,
            "timeout_s": loader.timeout,
            "start_method": None if context is None else context.get_start_method(),
        }
    return LoaderOptions(
        seed=seed,
        shuffle=shuffle,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        pin_memory=loader.pin_memory,
        **processes,
    )


def schedules_of(configs: Sequence[LRSchedulerConfig]) -> list[LRScheduler]:
    """Return the torch schedulers, each of which must count base steps."""
    schedules: list[LRScheduler] = []
    for config in configs:
        scheduler = config.scheduler
        name = type(scheduler).__name__
        if config.reduce_on_plateau or not isinstance(scheduler, LRScheduler):
            raise UnsupportedError(
                f"{name} has no schedule in steps, so progress can't move it: return from "
                "configure_optimizers a scheduler that counts base steps"
            )
        for what, value, right in (
            ("interval", config.interval, "step"),
            ("frequency", config.frequency, 1),
        ):
            if value != right:
                rule = f"the session moves {name} once a base step, as progress says"
                way_out = (
                    f'Return {{"scheduler": {name}(...), "interval": "step"}} with the schedule in '
                    "base steps; trainer.estimated_stepping_batches is their number."
                )
                raise ArgumentError(
                    describe(f"lr_scheduler[{what!r}]", value, rule=rule, way_out=way_out)
                )
        schedules.append(scheduler)
    return schedules


def base_steps(trainer: Trainer, *, an_epoch: int) -> int:
    """Return the length of the run, `min(max_steps, max_epochs * an_epoch)`.

    Args:
        trainer: knows the limits.
        an_epoch: base steps of an epoch, the DataLoader's batches.

    Raises:
        ArgumentError: there is no limit.
    """
    max_epochs, max_steps = trainer.max_epochs, trainer.max_steps
    limits = [] if max_epochs is None or max_epochs < 0 else [max_epochs * an_epoch]
    limits += [] if max_steps < 0 else [max_steps]
    if not limits:
        rule, way_out = "the run has no end for a schedule to reach", "Give it, or max_steps."
        raise _refused("max_epochs", max_epochs, rule, way_out)
    return min(limits)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is None:
        rule, way_out = "the session deals batches", "Give the DataLoader the base batch."
        raise ArgumentError(
            describe("DataLoader(batch_size)", loader.batch_size, rule=rule, way_out=way_out)
        )
    if type(batches) is BatchSampler and isinstance(sampler, SequentialSampler):
        return False
    if type(batches) is BatchSampler and _is_permutation(sampler):
        return True
    chosen = sampler if type(batches) is BatchSampler else batches
    raise UnsupportedError(
        f"the DataLoader has a {type(chosen).__name__}: the session deals the samples, each once "
        "an epoch; pass batch_size and shuffle, and no sampler or batch_sampler"
    )


def _is_permutation(sampler: object) -> bool:
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _refused(name: str, value: object, rule: str, way_out: str) -> ArgumentError:
    return ArgumentError(describe(f"Trainer({name})", value, rule=rule, way_out=way_out))
