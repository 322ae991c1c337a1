"""Arguments of Hugging Face's Trainer for workers that elastane holds together.

Keeps accelerate out of process groups, and refuses what would be wrong or without effect. Knows
nothing of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from elastane import _env
from elastane.errors import ArgumentError, describe
from elastane.replica import fewest_samples

__all__ = ["ElasticTrainingArguments", "check_arguments", "check_model", "check_options"]

_OWN_OPTIONS = {
    *("model", "optimizer", "dataset", "base_batch_size", "num_steps", "num_epochs", "schedule"),
    *("rule", "batch", "step", "scaler", "max_norm", "shard"),
}


class ElasticTrainingArguments(TrainingArguments):
    """`TrainingArguments` under which each process is alone, as far as accelerate knows.

    All else is as in `TrainingArguments`. Under `elastane run` and `torchrun` those would open a
    process group as soon as they are built, which can't follow workers that come and go. Here the
    session opens it. `process_index` is the worker's rank as the trainer learns it, `world_size`
    stays 1: `trainer.session.world` knows how many workers there are.

    Several arguments of one worker's `TrainingArguments` have another meaning or are refused; the
    trainer says which when it is built.

    Example:
        >>> from tempfile import mkdtemp
        >>> args = ElasticTrainingArguments(mkdtemp(), use_cpu=True, report_to="none")
        >>> args.world_size, args.parallel_mode.value
        (1, 'not_parallel')
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Find the device: on GPUs the one of this process's place on its machine."""
        for name in ("ddp_backend", "deepspeed", "fsdp", "parallelism_config"):
            _check(name, getattr(self, name))
        with _env.hidden_launch():
            device = super()._setup_devices
        self._n_gpu = min(self._n_gpu, 1)
        place = _env.local_rank()
        if device.type == "cuda" and place is not None:
            device = torch.device("cuda", place)
            self._accelerate().device = device
            torch.cuda.set_device(device)
        return device

    def _accelerate(self) -> PartialState:
        assert self.distributed_state is not None
        return self.distributed_state

    @property
    def distributed_type(self) -> DistributedType:
        """What accelerate takes this process for."""
        return self._accelerate().distributed_type

    def take_place(self, rank: int) -> None:
        """Be this worker from now on: number 0 writes files and reports."""
        self._rank = rank

    @property
    def process_index(self) -> int:
        """This worker's rank; before it takes part, the launcher's guess."""
        launch = _env.launch()
        return getattr(self, "_rank", launch.rank if launch else 0)

    @property
    def local_process_index(self) -> int:
        """The same: one worker of all reports, not one of each machine."""
        return self.process_index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """An argument that can't be followed.

    Attributes:
        fine: whether a value of it can be.
        rule: why not.
        way_out: what to do instead.
    """

    fine: Callable[[Any], bool]
    rule: str
    way_out: str


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == []


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: str(getattr(value, "value", value)) in values


def _none_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: not _one_of(*values)(value)


_LEAVE = "Leave it out."
_REFUSALS: Mapping[str, _Refusal] = {
    "fp16": _Refusal(
        fine=_is_off,
        rule="was never tried: half precision wants a GPU here",
        way_out="Take bf16=True, which needs no gradient scaler.",
    ),
    "torch_compile": _Refusal(
        fine=_is_off,
        rule="would wrap the model before the session does",
        way_out="Call model.compile() before you pass the model.",
    ),
    "auto_find_batch_size": _Refusal(
        fine=_is_off,
        rule="would start over on this worker alone when its memory is full",
        way_out="Choose per_device_train_batch_size, or GlobalBatch(max_micro_batch=...).",
    ),
    "deepspeed": _Refusal(
        fine=_is_off,
        rule="wants process groups of its own",
        way_out=f"{_LEAVE} See Session(shard=).",
    ),
    "fsdp": _Refusal(
        fine=_is_off,
        rule="wants process groups of its own",
        way_out=f"{_LEAVE} See Session(shard=).",
    ),
    "parallelism_config": _Refusal(
        fine=_is_off, rule="wants process groups of its own", way_out=_LEAVE
    ),
    "optim": _Refusal(
        fine=_none_of("lomo", "adalomo"),
        rule="steps in backward, before the workers' gradients are averaged",
        way_out="Take another optimizer, such as adamw_torch.",
    ),
    "lr_scheduler_type": _Refusal(
        fine=_none_of("reduce_lr_on_plateau", "greedy"),
        rule="has no schedule in base steps, so progress can't move it",
        way_out="Take a schedule in steps, such as cosine.",
    ),
    "train_sampling_strategy": _Refusal(
        fine=_one_of("random", "sequential"),
        rule="deals samples by their length, which can't be dealt anew when the workers change",
        way_out="Take random or sequential.",
    ),
    "dataloader_drop_last": _Refusal(
        fine=_is_off,
        rule="has no effect: the session deals every sample, and weights a short batch",
        way_out=_LEAVE,
    ),
    "dataloader_multiprocessing_context": _Refusal(
        fine=_is_off,
        rule="has no effect: a process forked at the wrong time would hold the group's sockets",
        way_out="Leave it out, or pass session_options={'loader': LoaderOptions(...)}.",
    ),
    "average_tokens_across_devices": _Refusal(
        fine=bool,
        rule="the step's loss is the mean over the tokens of all workers",
        way_out=_LEAVE,
    ),
    "include_num_input_tokens_seen": _Refusal(
        fine=_one_of("no"),
        rule="would count the tokens of one worker only",
        way_out="Leave it out; run_dir's events hold the samples of every step.",
    ),
    "load_best_model_at_end": _Refusal(
        fine=_is_off,
        rule="the worker that wrote the best checkpoint may be gone by then",
        way_out="Take save_strategy='best' and load that checkpoint after the run.",
    ),
    "save_on_each_node": _Refusal(
        fine=_is_off, rule="one worker of all writes", way_out="Leave it out, and copy the files."
    ),
    "enable_jit_checkpoint": _Refusal(
        fine=_is_off,
        rule="a worker that receives SIGTERM leaves after its step, and the others go on",
        way_out="Leave it out; the last one to leave writes a checkpoint in the run's folder.",
    ),
    "torch_empty_cache_steps": _Refusal(
        fine=_is_off, rule="has no effect in this trainer", way_out="Empty it in a callback."
    ),
    "ddp_backend": _Refusal(
        fine=_is_off, rule="the session takes nccl on a GPU and gloo on a CPU", way_out=_LEAVE
    ),
    "ddp_broadcast_buffers": _Refusal(
        fine=_is_off,
        rule="buffers are not sent in forward: batch statistics are merged when workers change",
        way_out=_LEAVE,
    ),
}


def _check(name: str, value: Any) -> None:
    """Refuse an argument of a value that can't be followed."""
    refusal = _REFUSALS[name]
    if not refusal.fine(value):
        shown = getattr(value, "value", value)
        raise ArgumentError(describe(name, shown, rule=refusal.rule, way_out=refusal.way_out))


def check_arguments(args: TrainingArguments | None) -> ElasticTrainingArguments:
    """Return the arguments; refuse those that the trainer could not follow.

    Raises:
        ArgumentError: names the argument, its value, the rule and the way out.
    """
    if not isinstance(args, ElasticTrainingArguments):
        rule = "accelerate opens a process group for these, which can't follow a change of workers"
        way_out = "Build elastane.trainers.hugging_face.ElasticTrainingArguments instead."
        raise ArgumentError(describe("args", type(args).__name__, rule=rule, way_out=way_out))
    for name in _REFUSALS:
        _check(name, getattr(args, name))
    found = args.distributed_type
    if found is not DistributedType.NO:
        rule = "accelerate was set up for several processes, which the session holds together"
        way_out = "Build no Accelerator or PartialState before the training arguments."
        raise ArgumentError(describe("distributed_type", found.value, rule=rule, way_out=way_out))
    return args


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the session that the trainer sets itself.

    Args:
        options: arguments of `elastane.Session` by name.
    """
    for name in options:
        if name in _OWN_OPTIONS:
            rule = "is set by the trainer"
            way_out = "Pass it to the trainer, or in the training arguments."
            shown = describe(
                f"session_options[{name!r}]", options[name], rule=rule, way_out=way_out
            )
            raise ArgumentError(shown)


def check_model(model: Any, args: ElasticTrainingArguments) -> None:
    """Refuse a model that these arguments would be silently wrong for."""
    is_launched = _env.launch() is not None or _env.elastic_launch() is not None
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
    if is_launched and evaluates and fewest_samples(model) > 1:
        rule = (
            "each worker evaluates by itself, and the model has BatchNorm, whose running "
            "statistics differ between workers"
        )
        way_out = "Leave it at 'no', and call trainer.session.evaluate in a callback."
        shown = describe("eval_strategy", str(args.eval_strategy), rule=rule, way_out=way_out)
        raise ArgumentError(shown)
    if args.label_smoothing_factor and type(model).__name__.startswith("Peft"):
        rule = "the Trainer does not know whether a model in PEFT's wrapper shifts its labels"
        way_out = "Leave it at 0, or pass compute_loss_func."
        name = "label_smoothing_factor"
        raise ArgumentError(describe(name, args.label_smoothing_factor, rule=rule, way_out=way_out))
