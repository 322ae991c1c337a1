"""Under Lightning's Trainer a session makes the same steps as in a loop of one's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy
from training import Digits, build_model, weights_of

from elastane import GlobalBatch, Linear, LoaderOptions, LocalBatch, Session
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.launch.jobs import ask, find_job
from elastane.telemetry import read_events
from elastane.trainers.lightning import ElasticStrategy
from elastane.trainers.lightning_arguments import loader_options

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]

ROOT = Path(__file__).parents[1]
ELASTANE = [sys.executable, "-m", "elastane"]
LIMIT_S = 180
SEED = 3
MICRO = GlobalBatch(32, micro_batches=4)


class Module(L.LightningModule):
    """The network of the session tests, tuned for batches of 8."""

    def __init__(self, *, schedule: bool = True) -> None:
        super().__init__()
        self.layers = build_model()
        self.schedule = schedule
        self.epochs: list[int] = []
        self.validated: list[int] = []
        self.before_steps: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels, _ = batch
        return F.cross_entropy(self(images), labels)

    def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.before_steps.append(float(torch.stack(norms).norm()))
        self.log("grad_norm", self.before_steps[-1])

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.trainer.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        if not self.schedule:
            return optimizer
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = CosineAnnealingLR(optimizer, T_max=num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Validated(Module):
    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels, _ = batch
        self.log("loss", F.cross_entropy(self(images), labels), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.global_step)


class Results(L.Callback):
    """Keeps what each of the Trainer's batches came to."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.results.append(trainer.strategy.result)
        self.steps.append(trainer.global_step)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def loader(dataset: Any = None, *, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    options.setdefault("shuffle", "sampler" not in options)
    return DataLoader(Digits() if dataset is None else dataset, batch_size=batch_size, **options)


def trainer_of(strategy: ElasticStrategy | None = None, **options: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 100,
    }
    strategy = strategy or ElasticStrategy(seed=SEED, batch=MICRO)
    return L.Trainer(strategy=strategy, **(defaults | options))


def fit(
    module: L.LightningModule,
    *,
    train: Any = None,
    validate: bool = False,
    strategy: ElasticStrategy | None = None,
    **options: Any,
) -> tuple[L.Trainer, Results]:
    results = Results()
    callbacks = [results, *options.pop("callbacks", [])]
    ckpt_path = options.pop("ckpt_path", None)
    trainer = trainer_of(strategy, callbacks=callbacks, **options)
    validation = loader(shuffle=False, batch_size=100) if validate else None
    trainer.fit(module, loader() if train is None else train, validation, ckpt_path=ckpt_path)
    return trainer, results


def plain(
    *, num_steps: float = 100, bfloat16: bool = False, base: int = 8, **options: Any
) -> tuple[nn.Module, list[Any]]:
    """Return the model and the results of the same training in a loop over a session."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    results = []
    with Session(
        model,
        optimizer=optimizer,
        schedule=CosineAnnealingLR(optimizer, T_max=int(num_steps)),
        dataset=Digits(),
        base_batch_size=base,
        num_steps=num_steps,
        loader=LoaderOptions(seed=SEED),
        progress_bar=False,
        **({"batch": MICRO} | options),
    ) as session:
        for images, labels, _ in session:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16, cache_enabled=False):
                loss = F.cross_entropy(session.model(images), labels)
            session.backward(loss)
            result = session.step()
            if result is not None:
                results.append(result)
    return model, results


def numbers(results: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (one.step, one.position, one.progress, one.lr, one.factor, one.gain, one.loss)
        for one in results
    ]


@pytest.mark.parametrize(
    ("trainer", "session"),
    [
        ({}, {}),
        ({"gradient_clip_val": 0.3}, {"max_norm": 0.3}),
        ({"precision": "bf16-mixed"}, {"bfloat16": True}),
    ],
    ids=["plain", "clipped", "bfloat16"],
)
def test_the_trainer_makes_the_steps_of_a_session_to_the_bit(trainer, session):
    module = Module()

    under_lightning, recorded = fit(module, **trainer)
    model, results = plain(**session)

    assert numbers(recorded.results) == numbers(results)
    assert torch.equal(weights_of(module), weights_of(model))
    assert under_lightning.global_step == len(results) < 100
    assert recorded.steps == list(range(1, len(results) + 1))


def test_steps_that_are_worth_less_than_a_base_step_share_a_batch_of_the_trainer():
    module = Validated()
    strategy = ElasticStrategy(seed=SEED, batch=LocalBatch(8), rule=Linear())

    trainer, recorded = fit(
        module, train=loader(batch_size=32), strategy=strategy, max_steps=20, validate=True
    )
    model, results = plain(base=32, num_steps=20, batch=LocalBatch(8), rule=Linear())

    assert torch.equal(weights_of(module), weights_of(model))
    assert strategy.result == recorded.results[-1]
    assert numbers([strategy.result]) == numbers(results[-1:])
    assert [int(one.progress) for one in recorded.results] == list(range(1, 21))
    assert trainer.global_step == 20 < len(results)


def test_epochs_are_base_steps_and_each_ends_with_one_validation():
    module = Validated()

    trainer, recorded = fit(module, validate=True, max_steps=-1, max_epochs=4)

    per_epoch = len(loader())
    crossings = [one.step for one in recorded.results if one.crossed(per_epoch)]
    assert module.epochs == list(range(4))
    assert trainer.current_epoch == 4
    assert module.validated == [0, *crossings]  # the first is Lightning's sanity check
    assert trainer.strategy.session.progress >= 4 * per_epoch
    assert "loss" in trainer.callback_metrics


def test_the_mean_gradient_is_there_before_the_step_and_can_be_logged():
    module = Module()

    _, recorded = fit(module, max_steps=20)

    norms = [one.grad_norm for one in recorded.results]
    assert module.before_steps == pytest.approx(norms, rel=1e-5)


def test_the_learning_rate_that_callbacks_see_is_the_schedules(tmp_path):
    module = Module()
    monitor = LearningRateMonitor(logging_interval="step")

    fit(module, callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)

    assert monitor.lrs["lr-SGD"][0] == 0.1
    assert monitor.lrs["lr-SGD"][-1] < 0.01


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_training_goes_on_from_a_checkpoint_of_lightnings_to_the_bit(tmp_path):
    whole = Module()
    every = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fit(whole, callbacks=[every], enable_checkpointing=True, max_steps=-1, max_epochs=4)

    resumed = Module()
    trainer, recorded = fit(
        resumed, max_steps=-1, max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt"
    )

    assert resumed.epochs == [2, 3]
    assert trainer.global_step == recorded.results[-1].step > len(recorded.results)
    assert torch.equal(weights_of(resumed), weights_of(whole))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_from_there(tmp_path):
    whole = Module()
    every = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=5, filename="{step}")
    fit(whole, callbacks=[every], enable_checkpointing=True)

    resumed = Module()
    fit(resumed, ckpt_path=tmp_path / "step=15.ckpt")

    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_a_checkpoint_saved_without_the_strategy_is_refused(tmp_path):
    other = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    other.fit(Module(), loader())
    other.save_checkpoint(tmp_path / "other.ckpt")

    with pytest.raises(StateError, match=r'has no "elastane".*load_from_checkpoint'):
        fit(Module(), ckpt_path=tmp_path / "other.ckpt")


class StopsAt(L.Callback):
    """Asks the Trainer to stop at the end of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == self.epoch


def test_a_trainer_alone_that_stops_early_makes_no_step_more():
    module = Module()

    trainer, recorded = fit(module, callbacks=[StopsAt(1)])

    assert trainer.strategy.session.progress == recorded.results[-1].progress < 100
    assert trainer.strategy.result is recorded.results[-1]


def test_a_worker_that_stops_early_makes_one_more_step_that_tells_the_others(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    module = Module()

    trainer, recorded = fit(module, callbacks=[StopsAt(1)])

    assert trainer.global_step == trainer.strategy.result.step == recorded.results[-1].step + 1
    assert trainer.strategy.session._parts.loop.stopped


def test_early_stopping_stops():
    module = Validated()
    stopping = EarlyStopping("loss", patience=1, min_delta=10.0)

    trainer, _ = fit(module, validate=True, callbacks=[stopping], max_steps=-1, max_epochs=50)

    assert trainer.current_epoch == 2


def test_a_fast_dev_run_makes_one_step():
    module = Validated(schedule=False)

    trainer, recorded = fit(module, validate=True, fast_dev_run=True)

    assert (trainer.global_step, len(recorded.results)) == (1, 1)


def test_the_model_and_the_trainer_are_left_as_they_were():
    module = Validated()
    strategy = ElasticStrategy(seed=SEED, batch=MICRO)
    with pytest.raises(UsageError, match="no session before"):
        _ = strategy.session

    trainer, _ = fit(module, validate=True, strategy=strategy, max_steps=8)

    assert strategy.model is module
    assert module.forward.__func__ is Module.forward
    assert trainer.validate(module, loader(shuffle=False, batch_size=100), verbose=False)
    evaluation = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    assert evaluation.validate(module, loader(shuffle=False, batch_size=100), verbose=False)
    with pytest.raises(UsageError, match="a strategy trains once"):
        trainer.fit(module, loader(), loader(shuffle=False, batch_size=100))


class Failing(Module):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.trainer.global_step == 3:
            raise RuntimeError("the user's own error")
        return super().training_step(batch)


def test_an_error_in_the_training_step_comes_out_and_closes_the_session():
    module = Failing()
    strategy = ElasticStrategy(seed=SEED, batch=MICRO)

    with pytest.raises(RuntimeError, match="the user's own error"):
        fit(module, strategy=strategy)

    assert strategy.session.progress > 0
    assert module.forward.__func__ is Module.forward
    with pytest.raises(UsageError, match="not open"):
        iter(strategy.session)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"accumulate_grad_batches": 4},
            r"Trainer\(accumulate_grad_batches\)=4: .* batch=LocalBatch\(64, micro_batches=4\)\.",
        ),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            r"Trainer\(gradient_clip_algorithm\)='value': .*Take \"norm\"",
        ),
        ({"val_check_interval": 0.5}, r"Trainer\(val_check_interval\)=0.5: .*every_n_epoch"),
        ({"val_check_interval": "00:01:00:00"}, r"Trainer\(val_check_interval\)='a time'"),
        ({"limit_train_batches": 10}, r"Trainer\(limit_train_batches\)=10: .*Subset"),
        ({"overfit_batches": 2}, r"Trainer\(overfit_batches\)=2"),
        ({"reload_dataloaders_every_n_epochs": 1}, r"Trainer\(reload_.*\)=1: .*Leave it at 0"),
        ({"min_steps": 5}, r"Trainer\(min_steps\)=5: .*Use min_epochs"),
        ({"precision": "bf16-true"}, r"Trainer\(precision\)='bf16-true': .*bf16-mixed"),
        ({"max_steps": -1, "max_epochs": -1}, r"Trainer\(max_epochs\)=-1: .*no end"),
        ({"devices": 2}, r"Trainer\(devices\)=2: .*elastane run --workers 2"),
        ({"num_nodes": 2}, r"Trainer\(num_nodes\)=2: .*elastane run --join"),
        ({"sync_batchnorm": True}, r"Trainer\(sync_batchnorm\)=True: .*convert_sync_batchnorm"),
    ],
    ids=str,
)
def test_what_the_trainer_can_not_have_is_refused_with_the_way_out(options, message):
    with pytest.raises(ArgumentError, match=message):
        fit(Module(schedule=False), **options)


@pytest.mark.parametrize("name", ["model", "optimizer", "dataset", "num_steps", "max_norm"])
def test_what_the_trainer_says_is_no_argument_of_the_strategy(name):
    with pytest.raises(ArgumentError, match=rf"^{name}=1: is not an argument of this strategy"):
        ElasticStrategy(**{name: 1})


def test_an_unknown_argument_of_the_strategy_is_refused_at_once():
    with pytest.raises(ArgumentError, match=r"^rules=1: no such argument. There are batch, .*rule"):
        ElasticStrategy(rules=1)


def test_the_options_of_the_dataloader_are_the_sessions():
    def collate(samples: list[Any]) -> list[Any]:
        return samples

    given = loader(num_workers=2, prefetch_factor=3, timeout=4, collate_fn=collate)

    assert loader_options(given, seed=7) == LoaderOptions(
        seed=7, num_workers=2, prefetch_factor=3, timeout_s=4, collate_fn=collate
    )
    assert loader_options(loader(shuffle=False), seed=0) == LoaderOptions(shuffle=False)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__(schedule=False)
        self.automatic_optimization = False


class Clips(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class TakesIterator(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        raise AssertionError(dataloader_iter)


class NoLoss(Module):
    def training_step(self, *_: Any) -> None:
        return None


class EpochSchedule(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=10)]


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ByHand, "ByHand.automatic_optimization=False: .*elastane.Session"),
        (Clips, "Clips.configure_gradient_clipping is overridden: .*gradient_clip_val"),
        (OwnBackward, "OwnBackward.backward is overridden"),
        (EpochSchedule, r"lr_scheduler\['interval'\]='epoch': .*\"interval\": \"step\""),
        (Plateau, "ReduceLROnPlateau has no schedule in steps"),
        (NoLoss, "training_step returned None: .*multiplied by 0"),
    ],
)
def test_a_module_that_does_the_sessions_part_is_refused(kind, message):
    with pytest.raises((ArgumentError, UnsupportedError, UsageError), match=message):
        fit(kind())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_a_training_step_that_draws_its_own_batches_is_refused():
    with pytest.raises(UnsupportedError, match=r"takes dataloader_iter: .*\(batch, batch_idx\)"):
        fit(TakesIterator())


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda: [1, 2], "train_dataloaders is a list: .*one torch.utils.data.DataLoader"),
        (lambda: {"a": loader()}, "train_dataloaders is a collection: .*StackDataset"),
        (lambda: DataLoader(Endless()), "iterable dataset: .*map-style"),
        (lambda: loader(drop_last=True), r"DataLoader\(drop_last\)=True: .*Leave drop_last out"),
        (
            lambda: loader(sampler=WeightedRandomSampler([1.0] * 301, 301)),
            "has a WeightedRandomSampler: .*pass batch_size and shuffle",
        ),
        (
            lambda: DataLoader(Digits(), batch_size=None),
            r"DataLoader\(batch_size\)=None: .*base batch",
        ),
    ],
    ids=["a list", "a dict", "iterable", "drop_last", "weighted", "no batch"],
)
def test_a_dataloader_that_can_not_be_dealt_is_refused(train, message):
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        fit(Module(schedule=False), train=train())


class LogsMean(Module):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        self.log("mean", loss, sync_dist=True)
        return loss


class Counts(Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)


def test_what_would_wait_for_other_workers_is_refused_where_there_may_be_some(monkeypatch):
    fit(LogsMean(), max_steps=8)
    fit(Counts(), max_steps=8)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(UsageError, match=r"sync_dist=True in training: .*strategy.result.loss"):
        fit(LogsMean())
    with pytest.raises(ArgumentError, match=r"accuracy.sync_on_compute=True: .*=False"):
        fit(Counts())


class BringsSchedule(L.Callback):
    """Steps a scheduler of its own, as stochastic weight averaging does."""

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        scheduler = CosineAnnealingLR(trainer.optimizers[0], T_max=10)
        trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]


def test_a_callback_that_brings_a_schedule_of_its_own_is_refused():
    with pytest.raises(UsageError, match="a callback or hook changed how the Trainer optimizes"):
        fit(Module(), callbacks=[BringsSchedule()])


class Job:
    """The example under `elastane run`, with at most two workers."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.result = folder / "run", folder / "result.json"
        self.output = folder / "output.txt"
        script = ["-m", "examples.lightning_digits", "--result", str(self.result)]
        options = ["--workers", "1:2", "--run-dir", str(self.run_dir)]
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*ELASTANE, "run", *options, *script, "--epochs", "20"],
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )
        self.pids: set[int] = set()

    def wait_for(self, *, progress: float, workers: int) -> list[dict[str, Any]]:
        """Wait for base steps; return the workers that take part then."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.launcher.poll() is None:
            time.sleep(0.05)
            job = find_job(str(self.run_dir)) if (self.run_dir / "launcher.json").exists() else None
            status = ask(job.path, "status").result if job else {"workers": [], "progress": None}
            self.pids |= {one["pid"] for one in status["workers"] if one["pid"]}
            members = [one for one in status["workers"] if one["rank"] is not None]
            if (status["progress"] or 0.0) >= progress and len(members) == workers:
                return members
        return pytest.fail(f"waited in vain:\n{self.output.read_text()}")

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        for pid in self.pids:
            if is_alive(pid):
                os.killpg(pid, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_example_goes_on_in_place_when_the_worker_of_rank_0_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = Job(tmp_path)
    try:
        members = job.wait_for(progress=100, workers=2)
        first, second = sorted(members, key=lambda one: one["rank"])
        os.kill(first["pid"], signal.SIGKILL)
        code = job.launcher.wait(LIMIT_S)
    finally:
        job.close()

    assert code == 0, job.output.read_text()
    assert not [pid for pid in job.pids if is_alive(pid)]
    row = json.loads(job.result.read_text())
    told = [one for one in read_events(job.run_dir) if one["event"] == "step"]
    steps = list({one["step"]: one for one in told}.values())  # the dead one may have told the last
    assert [one["step"] for one in steps] == list(range(1, row["steps"] + 1))
    ends = [one["position"] for one in steps]
    starts = [one["position"] - one["batch_samples"] for one in steps]
    assert starts == [0, *ends[:-1]]
    assert {one["world_size"] for one in steps} == {1, 2}
    assert steps[-1]["progress"] == row["progress"] >= 20 * 90
    assert (row["epochs"], row["accuracy"] > 0.9) == (20, True)
    text = job.output.read_text()
    assert f"worker {first['worker']} was killed by SIGKILL" in text
    assert f"[worker {second['worker']}] `Trainer.fit` stopped: `max_epochs=20` reached." in text
