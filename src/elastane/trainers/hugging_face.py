"""Hugging Face's Trainer on workers that come and go: its loop, its callbacks, its files.

One optimizer step of that loop is one window of a session, which makes it. Joins the two; what
arguments are refused lies in `hugging_face_arguments`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer, TrainerCallback

from elastane.batching import BatchPolicy, LocalBatch
from elastane.data import LoaderOptions, StreamLoader
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError, describe
from elastane.reporting import StepResult
from elastane.scaling import AdamScale, AdaScale, Rule
from elastane.session import Session
from elastane.trainers.hugging_face_arguments import (
    ElasticTrainingArguments,
    check_arguments,
    check_model,
    check_options,
)
from elastane.trainers.hugging_face_parts import Epochs, Memory, Stepped, Turns

__all__ = ["ElasticTrainer", "ElasticTrainingArguments"]

STATE_NAME = "elastane.pt"
"""The session's state, in each of the Trainer's checkpoint folders."""

_OWN_METHODS = "training_step", "get_train_dataloader", "_get_train_sampler", "get_batch_samples"


class ElasticTrainer(Trainer):
    """A `transformers.Trainer` whose steps an `elastane.Session` makes.

    The loop is the Trainer's own: losses, callbacks, logs, evaluations and checkpoints. What is
    tuned stays tuned: `max_steps`, `num_train_epochs`, `warmup_steps` and the learning rate are
    those of the base batch, and the session moves schedule and end by what each step was worth.
    `global_step`, and with it `logging_steps`, `eval_steps` and `save_steps`, counts optimizer
    steps. The gradient is the mean over all workers' tokens where the Trainer would count them,
    else over their samples; it is clipped to `max_grad_norm` by its norm over all workers.

    Args:
        model: bare module.
        args: `ElasticTrainingArguments`.
        base_batch_size: `B0`, the batch in samples for which all that was tuned: on one device
            `per_device_train_batch_size * gradient_accumulation_steps`.
        rule: scaling rule; by default `AdamScale()` for optimizers with betas, else `AdaScale()`.
        batch: batch policy; by default each worker takes `gradient_accumulation_steps`
            micro-batches of `per_device_train_batch_size` samples.
        session_options: further arguments of `elastane.Session` by name.
        others: further arguments of `transformers.Trainer`.

    Raises:
        ArgumentError: an argument that can't be followed; the message says which and why.
        UnsupportedError: a kind of model or dataset, or a method overridden that is not called.

    Attributes:
        result: what the newest step did, a `StepResult`; `None` before the first.
    """

    args: ElasticTrainingArguments  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: ElasticTrainingArguments | None = None,
        *,
        base_batch_size: int,
        rule: Rule | None = None,
        batch: BatchPolicy | None = None,
        session_options: Mapping[str, Any] = MappingProxyType({}),
        **others: Any,
    ) -> None:
        args = check_arguments(args)
        check_options(session_options)
        super().__init__(model, args, **others)
        self._check_methods()
        check_model(self.model, args)
        accumulated = args.gradient_accumulation_steps
        if batch is not None and accumulated > 1:
            rule_ = f"given together with batch={batch!r}, which deals the micro-batches"
            way_out = "Leave it at 1."
            name = "gradient_accumulation_steps"
            raise ArgumentError(describe(name, accumulated, rule=rule_, way_out=way_out))
        samples = args.per_device_train_batch_size * accumulated
        self._batch = batch or LocalBatch(samples, micro_batches=accumulated)
        self._base_batch_size = base_batch_size
        self._rule = rule
        self._options = dict(session_options)
        self._session: Session | None = None
        self._is_open = self._epoch_ends = False
        self._stack = ExitStack()
        self._micro_batches: Iterator[Any] = iter(())
        self._ahead: Any = None
        self._num_steps = self._first_position = 0
        self._flos = 0.0
        self._seen_samples = self._seen_flos = 0.0
        self._stepped: tuple[Stepped, ...] = ()
        self.result: StepResult | None = None
        self.callback_handler.callbacks.insert(0, Epochs(self._epoch))

    @property
    def session(self) -> Session:
        """The session of the training; it stays after its end."""
        if self._session is None:
            raise UsageError(
                "there is no session before train(): look at it in a callback, or after"
            )
        return self._session

    def _check_methods(self) -> None:
        for name in _OWN_METHODS:
            expected = getattr(ElasticTrainer, name)
            if getattr(type(self), name) is not expected:
                raise UnsupportedError(
                    f"{type(self).__name__}.{name} is overridden, and the session would not call "
                    "it: override compute_loss, pass a dataset and data_collator, or write a loop "
                    "of your own over elastane.Session"
                )

    def _check_callbacks(self) -> None:
        for one in self.callback_handler.callbacks:
            if type(one).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
                raise UnsupportedError(
                    f"{type(one).__name__} has on_pre_optimizer_step, and the session has made "
                    "the step when the loop comes to it: use on_optimizer_step, or read the "
                    "gradient's norm in trainer.result"
                )

    # The run ----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, as `Trainer.train`; once.

        Args:
            resume_from_checkpoint: a checkpoint folder of this trainer, or `True` for the newest.
                Under `elastane run` the run's own checkpoints go before.
            trial: not supported.
            ignore_keys_for_eval: as in `Trainer.train`.

        Raises:
            UsageError: called again.
            StateError: the folder holds no state of a session, or that of another run.
        """
        if trial is not None:
            rule, way_out = (
                "trials share a process, and a session wants its own",
                "Start each alone.",
            )
            raise ArgumentError(describe("trial", trial, rule=rule, way_out=way_out))
        if self._session is not None:
            raise UsageError(
                "this trainer has trained: build a new one; to go on with a run, pass it "
                "resume_from_checkpoint=True"
            )
        self._check_callbacks()
        with ExitStack() as self._stack:
            self._stack.callback(self._put_back, self.args.gradient_accumulation_steps)
            self.args.gradient_accumulation_steps = 1  # the loop counts windows
            return super().train(resume_from_checkpoint, None, ignore_keys_for_eval)

    def _put_back(self, gradient_accumulation_steps: int) -> None:
        self.args.gradient_accumulation_steps = gradient_accumulation_steps
        self._micro_batches, self._is_open = iter(()), False
        self.model_wrapped = self.model
        if self._stepped:
            self.optimizer, self.lr_scheduler = (one.real for one in self._stepped)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return what the loop iterates over: one empty turn for each window of the session."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return cast("DataLoader[Any]", Turns(self.train_dataset))

    def set_initial_training_values(
        self, args: Any, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the loop's lengths: epochs and steps without end, since the session ends it."""
        num_samples = StreamLoader(dataloader.dataset, options=LoaderOptions()).num_samples
        base, endless = self._base_batch_size, sys.maxsize
        num_steps = args.max_steps
        if num_steps <= 0:
            num_steps = math.ceil(args.num_train_epochs * -(-num_samples // base))
        return endless, endless, num_samples, num_steps * base, base, endless, num_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """Create the schedule in base steps, on the optimizer that the session steps."""
        return super().create_scheduler(
            num_training_steps, _bare(self.optimizer if optimizer is None else optimizer)
        )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        super()._init_training_state(*args, **kwargs)
        return int(self.state.epoch or 0), 0  # the session's state says where the data stand

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Open the session, and take part, before any callback hears of the training."""
        model, train_dataloader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        session = self._session = self._build_session(model, num_steps=max_steps)
        if resume_from_checkpoint is not None:
            session.load_state_dict(_saved_state(Path(resume_from_checkpoint)))
        self._stack.enter_context(session)
        self._is_open, self._num_steps = True, max_steps
        self._stepped = (
            Stepped(self.optimizer, "optimizer"),
            Stepped(self.lr_scheduler, "lr_scheduler"),
        )
        self.optimizer, self.lr_scheduler = cast("Any", self._stepped)
        handler = cast("Any", self.callback_handler)
        handler.optimizer, handler.lr_scheduler = self._stepped
        self._micro_batches = iter(session)
        while session.warming:
            self._take(self._next())
        self._take_place(begun=False)
        self._first_position = session.position
        self.model_wrapped = session.model
        return session.model, train_dataloader

    def _build_session(self, model: nn.Module, *, num_steps: int) -> Session:
        args, optimizer = self.args, _bare(self.optimizer)
        given = dict(self._options)
        ddp = {
            "find_unused_parameters": args.ddp_find_unused_parameters,
            "bucket_cap_mb": args.ddp_bucket_cap_mb,
            "static_graph": args.ddp_static_graph,
        }
        ddp = {name: value for name, value in ddp.items() if value is not None}
        has_betas = any("betas" in group for group in optimizer.param_groups)
        return Session(
            model,
            optimizer=optimizer,
            dataset=self.train_dataset,
            base_batch_size=self._base_batch_size,
            num_steps=num_steps,
            schedule=self.lr_scheduler,
            rule=self._rule or (AdamScale() if has_betas else AdaScale()),
            batch=self._batch,
            max_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
            loader=given.pop("loader", None) or self._loader_options(),
            ddp=ddp | given.pop("ddp", {}),
            stateful={**given.pop("stateful", {}), "hugging_face_trainer": Memory(self)},
            progress_bar=given.pop("progress_bar", False),
            **given,
        )

    def _loader_options(self) -> LoaderOptions:
        args = self.args
        return LoaderOptions(
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            num_workers=args.dataloader_num_workers,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "Training"),
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor or 2,
        )

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """End the training; its rate is that of the samples committed since this process began."""
        made = self.state.global_step - self._initial_global_step
        num_train_samples = self.session.position - self._first_position
        if made:  # the Trainer takes this share of them
            num_train_samples *= max(self.state.max_steps, 1) / made
        return super()._finalize_training(trial, num_train_samples, start_time)

    # One step ---------------------------------------------------------------------------------

    def training_step(
        self,
        model: nn.Module,  # noqa: ARG002
        inputs: dict[str, Any],  # noqa: ARG002
        num_items_in_batch: Tensor | int | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Make one optimizer step: all micro-batches of a window; return the mean loss over all.

        A window that broke, or whose gradients were not finite, is made again.
        """
        result = self._make_step()
        is_over = result is None
        if self.session.done and not is_over:
            self._ahead = self._next()  # the workers agree that it is over
            is_over = self._ahead is None
        self._follow(result, is_over=is_over)
        for one in self._stepped:
            one.is_due = True
        loss = 0.0 if result is None or result.loss is None else result.loss
        return torch.tensor(loss, device=self.args.device)

    def _epoch(self) -> float | None:
        if self.result is None:
            return None
        return self.result.position / len(cast("Any", self.train_dataset))

    def _make_step(self) -> StepResult | None:
        """Return a step's result; `None` if the others have ended the run without this worker."""
        while (batch := self._next()) is not None:
            result = self._take(batch)
            if result is None:
                handler = self.callback_handler
                self.control = handler.on_substep_end(self.args, self.state, self.control)
            elif not result.skipped:
                return result
        return None

    def _next(self) -> Any:
        """Return this worker's next micro-batch, or `None` when the run is over."""
        batch, self._ahead = self._ahead, None
        return next(self._micro_batches, None) if batch is None else batch

    def _take(self, batch: Any) -> StepResult | None:
        """Forward, backward and step of one micro-batch, as `Trainer.training_step` would."""
        session = self.session
        session.model.train()
        self.optimizer.train()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        counted = self._get_num_items_in_batch([batch], torch.device("cpu"))
        num_items = weight = None
        if counted is not None:
            weight = float(counted)
            num_items = torch.tensor(max(weight, 1.0), device=self.args.device)
            if self.loss_is_scaled_for_ga is False:
                weight = None  # the user's own loss: a mean over the samples
        inputs = self._prepare_inputs(batch)
        self._seen_flos += super().floating_point_ops(inputs)
        self._seen_samples += session.weight
        with self.compute_loss_context_manager():
            loss = self.compute_loss(session.model, inputs, num_items_in_batch=num_items)
        session.backward(cast("Tensor", loss), weight=weight)
        return session.step()

    def _follow(self, result: StepResult | None, *, is_over: bool) -> None:
        """Bring the Trainer's counters to where the session stands; the loop then adds one step."""
        self._take_place()
        state = self.state
        if result is None:
            self._epoch_ends = False
            state.global_step -= 1
            state.max_steps, self._flos = state.global_step + 1, 0.0
            return
        missed = result.step - 1 - state.global_step  # while it was no member
        state.global_step += missed
        self._globalstep_last_logged += missed
        self._initial_global_step += missed
        num_samples = len(cast("Any", self.train_dataset))
        before = result.position - result.batch_samples
        self._epoch_ends = result.position // num_samples > before // num_samples
        gained = max(result.progress - result.previous_progress, 1e-9)
        left = (self._num_steps - result.progress) / gained
        state.max_steps = result.step + (0 if is_over else max(1, math.ceil(min(left, 1e12))))
        self._flos = self._seen_flos / max(self._seen_samples, 1.0) * result.batch_samples
        self._seen_samples = self._seen_flos = 0.0
        self.result = result

    def _take_place(self, *, begun: bool = True) -> None:
        """Know whether this worker is the one that writes and reports; it may have become that."""
        state, was_first = self.state, self.state.is_world_process_zero
        self.args.take_place(self.session.world.rank)
        is_first = state.is_world_process_zero = state.is_local_process_zero = (
            self.args.process_index == 0
        )
        if begun and is_first and not was_first:
            for one in self.callback_handler.callbacks:
                if isinstance(one, ProgressCallback) and one.training_bar is None:
                    one.on_train_begin(self.args, state, self.control)

    # What the loop asks for between steps -----------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> float:  # noqa: ARG002
        """Return the gradient's norm over all workers; the session has clipped by it."""
        return 0.0 if self.result is None else self.result.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _get_learning_rate(self) -> float:
        """Return the learning rate as applied: the schedule's times the rule's factor."""
        if self._is_open and self.result is not None:
            return self.result.lr
        return super()._get_learning_rate()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the step's over all workers, estimated from this worker's share."""
        return int(self._flos) if self._is_open else super().floating_point_ops(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; the session's numbers go with a step's."""
        result = self.result
        if result is not None and "grad_norm" in logs:
            logs |= {
                "gain": result.gain,
                "scale": result.scale,
                "progress": result.progress,
                "num_workers": result.world_size,
            }
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, as `Trainer.evaluate`: each worker the whole dataset, with the same result."""
        with self._pause("evaluation"):
            return super().evaluate(*args, **kwargs)

    def _pause(self, reason: str) -> AbstractContextManager[None]:
        return self.session.pause(reason) if self._is_open else nullcontext()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Have all workers stop together when a callback wants to, after one more step."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        control = self.control
        if control.should_epoch_stop and not self._epoch_ends:
            raise UsageError(
                "a callback set control.should_epoch_stop, and a session deals every sample of an "
                "epoch: set should_training_stop, or leave samples out of the dataset"
            )
        control.should_epoch_stop = self._epoch_ends
        if control.should_training_stop and not self.session.done:
            self.session.stop()
            control.should_training_stop = False

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._pause("saving a checkpoint"):
            super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.session.state_dict(), Path(output_dir) / STATE_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        """Let one worker write the file that all would write."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the session's state has given each worker generators of its own."""


def _bare(optimizer: Any) -> Any:
    """Return the torch optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _saved_state(folder: Path) -> Mapping[str, Any]:
    path = folder / STATE_NAME
    if not path.exists():
        rule = f"has no {STATE_NAME}, so progress and place in the data are not known"
        way_out = "Take a checkpoint of ElasticTrainer, saved without save_only_model."
        raise StateError(
            describe("resume_from_checkpoint", str(folder), rule=rule, way_out=way_out)
        )
    return torch.load(path, weights_only=True)
