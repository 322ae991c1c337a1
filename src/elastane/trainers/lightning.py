"""PyTorch Lightning: a strategy under which the Trainer's own loop makes steps of a session.

Knows the Trainer's hooks and counters, and of elastane what users know; measures, decides and
communicates nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elastane import _env
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError, describe
from elastane.reporting import StepResult
from elastane.session import Session
from elastane.trainers.lightning_arguments import (
    base_steps,
    check_metrics,
    check_module,
    check_options,
    check_trainer,
    loader_options,
    schedules_of,
)
from elastane.trainers.lightning_parts import Stream, forwarding

__all__ = ["ElasticStrategy"]

_CHECKPOINT_KEY = "elastane"
_END = object()
_RANK_ZERO: Any = rank_zero_only
"""The function whose `rank` all of Lightning asks who writes."""


class ElasticStrategy(SingleDeviceStrategy):
    """Trains a LightningModule as it was tuned for one small batch, on whatever workers there are.

    `Trainer(strategy=ElasticStrategy(...))` is all that changes: `training_step`,
    `configure_optimizers`, the DataLoader and the callbacks stay. The DataLoader's `batch_size` is
    the base batch, `max_epochs` or `max_steps` the length of the run in base steps, and the
    session averages, measures, clips, steps and moves the schedule.

    An epoch is as many base steps as the DataLoader has batches. A batch of the Trainer's is a
    step of all workers, or as many as come to one base step: with more than one micro-batch a
    step, `training_step` is called for each.

    Args:
        device: this worker's.
        seed: of the order of the samples.
        session: further arguments of `elastane.Session`, such as `rule`, `batch`, `checkpoint`.

    Raises:
        ArgumentError: no argument of the session, or one that the Trainer says already; in
            `Trainer(...)` and `Trainer.fit` a setting that breaks a rule.
        UnsupportedError: a kind of dataloader, scheduler or module that is refused by name.
    """

    strategy_name = "elastane"

    def __init__(
        self, *, device: torch.device | str = "cpu", seed: int = 0, **session: Any
    ) -> None:
        super().__init__(device)
        check_options(session)
        self._seed = seed
        self._options = {"progress_bar": False, **session}
        self._schedules: list[LRScheduler] = []
        self._stream: Stream | None = None
        self._session: Session | None = None
        self._saved: dict[str, Any] | None = None
        self._open, self._pause = ExitStack(), ExitStack()
        self._is_open = self._is_over = False
        self._num_steps = 0
        self._batches: Iterator[Any] = iter(())
        self._later: Any = _END
        self._closure: Callable[[], Any] | None = None
        self._error: BaseException | None = None
        self.result: StepResult | None = None
        """What the newest step did; `None` before there is one."""

    @property
    def session(self) -> Session:
        """The session, from the start of training on.

        Raises:
            UsageError: training has not begun.
        """
        if self._session is None:
            raise UsageError("there is no session before Trainer.fit has begun to train")
        return self._session

    # What the Trainer is not to do itself ----------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """This worker's one device; the Trainer sets what it was given."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            way_out = f"Take devices=1, and start with `elastane run --workers {len(devices)}`."
            raise _not_by_trainer("devices", len(devices), way_out=way_out)

    @property
    def num_nodes(self) -> int:
        """One: a worker is a process of its own, wherever it runs."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number > 1:
            raise _not_by_trainer("num_nodes", number, way_out="Take 1, and `elastane run --join`.")

    @property
    def _layer_sync(self) -> None:
        return None

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: object) -> None:
        if layer_sync is not None:
            rule = "the session gets the model as it is"
            way_out = (
                "Call torch.nn.SyncBatchNorm.convert_sync_batchnorm in your module's __init__."
            )
            raise ArgumentError(
                describe("Trainer(sync_batchnorm)", True, rule=rule, way_out=way_out)
            )

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes logs and checkpoints: the session's rank 0."""
        return _RANK_ZERO.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether a value that is logged now may differ on other workers."""
        return self._is_open and self._trainer.training and _is_launched()

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return a validation's value as it is, for each worker sees the whole set.

        Raises:
            UsageError: for a value of the training, of which each worker has its own.
        """
        if self.is_distributed:
            raise UsageError(_NO_SYNC)
        return tensor

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor where there is no other worker.

        Raises:
            UsageError: there may be others.
        """
        if _is_launched():
            raise UsageError(_NO_GATHER)
        return tensor

    # From the Trainer's set-up to the session ------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Check what the session will have to keep to."""
        if trainer.state.fn == TrainerFn.FITTING:
            if self._session is not None:
                raise UsageError(_TWO_FITS)
            check_trainer(trainer)
            check_module(self._module)
            if _is_launched():
                check_metrics(self._module)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Take the schedules out of the Trainer's hands, so that it never steps them."""
        super().setup_optimizers(trainer)
        self._schedules = schedules_of(self.lr_scheduler_configs)
        self.lr_scheduler_configs = []

    def process_dataloader(self, dataloader: object) -> object:
        """Put the session's stream in the place of the DataLoader to train on."""
        if not self._trainer.training:
            return dataloader
        options = loader_options(dataloader, seed=self._seed)
        assert isinstance(dataloader, DataLoader)
        self._stream = Stream(dataloader, take=self._take)
        self._options["loader"] = options
        return self._stream

    def on_train_start(self) -> None:
        """Open the session."""
        trainer, stream = self._trainer, self._stream
        if stream is None or trainer.train_dataloader is not stream:
            raise UnsupportedError(_SEVERAL_LOADERS)
        self._num_steps = base_steps(trainer, an_epoch=len(stream))
        self._session = Session(
            self._module,
            optimizer=self.optimizers[0],
            schedule=self._schedules[0] if len(self._schedules) == 1 else self._schedules or None,
            dataset=stream.dataset,
            base_batch_size=stream.batch_size,
            num_steps=self._num_steps,
            max_norm=trainer.gradient_clip_val or None,
            **self._options,
        )
        if self._saved is not None:
            self._session.load_state_dict(self._saved)
        self._open.enter_context(self._session)
        self._is_open = True
        self._batches = iter(self._session)
        trainer.val_check_batch = math.inf  # a validation is due where `is_last_batch` says so

    def on_exception(self, exception: BaseException) -> None:
        """Remember what the session is to be told at its end."""
        self._error = exception

    def teardown(self) -> None:
        """Close the session."""
        error, self._error, self._is_open, self._closure = self._error, None, False, None
        try:
            self._pause.close()
            self._open.__exit__(type(error) if error else None, error, None)
        finally:
            super().teardown()

    # A step ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step through the session's model, on the micro-batch at work.

        Raises:
            UsageError: it returned no loss.
        """
        if self._later is not _END:
            args = (self._later, *args[1:])
        with self.precision_plugin.train_step_context(), forwarding(self._module):
            output = self.session.model(*args, **kwargs)
        if output is None:
            raise UsageError(_NO_LOSS)
        return output

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run backward by the session, between the Trainer's hooks."""
        module, session = self._module, self.session
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        session.backward(loss)
        loss = self.precision_plugin.post_backward(loss, module)
        if session.is_last_micro_batch:
            hook, optimizer = "on_before_optimizer_step", self.optimizers[0]
            call._call_callback_hooks(self._trainer, hook, optimizer)
            call._call_lightning_module_hook(self._trainer, hook, optimizer)
        return loss

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make steps until one more base step is done; the first micro-batch is the Trainer's.

        Args:
            optimizer: the module's; the session steps it.
            closure: runs `training_step` and `backward` once.
            model: the module.
            kwargs: none.

        Raises:
            UsageError: somebody gave the Trainer a schedule to step, or accumulates.
        """
        del optimizer, model
        if kwargs or self.lr_scheduler_configs or self._trainer.accumulate_grad_batches != 1:
            raise UsageError(_CHANGED)
        self._closure = closure
        loss = closure()
        while not self._step():
            self._later = next(self._batches, _END)
            if self._later is _END:
                self._over()
                break
            self._later = self._moved(self._later)
            loss = closure()
        self._later = _END
        return loss

    def on_train_end(self) -> None:
        """End the session; where the Trainer ends early, after a step that all workers agree on."""
        if not self._is_over:
            if not _is_launched() or self._closure is None:
                return
            self.session.stop()
        while (batch := next(self._batches, _END)) is not _END:
            assert self._closure is not None
            self._later = self._moved(batch)
            self._closure()
            if self._step():
                self._steps_made.increment_completed()
        self._later = _END

    def _step(self) -> bool:
        """End a micro-batch; return whether a base step is done, and with it a Trainer's batch."""
        result = self.session.step()
        if result is None:
            return False
        self.result = result
        _RANK_ZERO.rank = self.global_rank = self.session.world.rank
        if result.progress >= self._num_steps:
            self._over()
        assert self._stream is not None
        self._count(result, an_epoch=len(self._stream))
        return result.crossed(1) or self._is_over

    def _count(self, result: StepResult, *, an_epoch: int) -> None:
        """Have the Trainer count as the run does, also on a worker that has just joined."""
        loop = self._trainer.fit_loop
        epoch = math.floor(result.previous_progress / an_epoch)
        for counted in (loop.epoch_progress.total, loop.epoch_progress.current):
            counted.load_state_dict(
                {"ready": epoch + 1, "started": epoch + 1, "processed": epoch, "completed": epoch}
            )
        steps = min(result.step, math.floor(result.progress))
        self._steps_made.total.load_state_dict({"ready": steps, "completed": steps - 1})
        loop.epoch_loop.batch_progress.is_last_batch = result.crossed(an_epoch) or self._is_over

    def _take(self) -> Any:
        """Return the first micro-batch of a Trainer's batch."""
        batch = next(self._batches, _END)
        if batch is _END:
            self._over()
            raise StopIteration
        return batch

    def _over(self) -> None:
        self._is_over = self._trainer.should_stop = True
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def _moved(self, batch: Any) -> Any:
        """Return a further micro-batch, as the Trainer would hand out the first one."""
        batch = self.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch)

    # Beside the steps ------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Have the others not take a validation for a hang."""
        if self._is_open:
            self._pause.enter_context(self.session.pause("validation"))

    def on_validation_end(self) -> None:
        """End the pause."""
        self._pause.close()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the session's state along with the Trainer's."""
        if self._session is not None:
            checkpoint[_CHECKPOINT_KEY] = self._session.state_dict()
        with self.session.pause("checkpoint") if self._is_open else ExitStack():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and keep the session's state until there is a session.

        Raises:
            StateError: to go on training, one that was saved without a session.
        """
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self._trainer.state.fn == TrainerFn.FITTING:
            if _CHECKPOINT_KEY not in checkpoint:
                raise StateError(_NO_STATE)
            self._saved = checkpoint[_CHECKPOINT_KEY]
        return checkpoint

    @property
    def _steps_made(self) -> Any:
        """What `global_step` is read from; the Trainer adds the step at work when it is made."""
        loop = self._trainer.fit_loop.epoch_loop
        return loop.automatic_optimization.optim_progress.optimizer.step

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer


def _is_launched() -> bool:
    """Return whether there may be other workers."""
    return _env.elastic_launch() is not None or _env.launch() is not None


def _not_by_trainer(name: str, value: int, *, way_out: str) -> ArgumentError:
    rule = "a worker is one process with one device, and elastane starts the workers"
    return ArgumentError(describe(f"Trainer({name})", value, rule=rule, way_out=way_out))


_NO_SYNC = (
    "sync_dist=True in training: the Trainer does not know the other workers, so the value would "
    "stay this worker's; leave it out, and take trainer.strategy.result.loss, the mean over all "
    "workers"
)
_NO_GATHER = (
    "all_gather: the Trainer does not know the other workers; sum over a dataset with "
    "trainer.strategy.session.evaluate(function, dataset)"
)
_TWO_FITS = (
    "a strategy trains once: for another Trainer.fit build a new Trainer with a new strategy, and "
    "pass ckpt_path= to go on from what the first one saved"
)
_SEVERAL_LOADERS = (
    "train_dataloaders is a collection: the session deals the samples of one dataset, so pass one "
    "DataLoader; combine datasets in one, for example torch.utils.data.StackDataset"
)
_NO_LOSS = (
    "training_step returned None: every micro-batch needs a loss, for the other workers wait for "
    "its gradient; return one that is multiplied by 0 to leave samples out"
)
_CHANGED = (
    "a callback or hook changed how the Trainer optimizes (a schedule of its own, "
    "accumulate_grad_batches, arguments of optimizer.step): the session makes the steps and moves "
    "the schedule, so leave it out"
)
_NO_STATE = (
    'the checkpoint has no "elastane": it was saved without this strategy, so nobody knows the '
    "progress; to begin anew with its weights call load_from_checkpoint and leave ckpt_path out"
)
