"""Hugging Face's Trainer over a session: a plain loop's numbers, and a real elastic job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from elastane import (
    AdamScale,
    Checkpointing,
    GlobalBatch,
    Identity,
    LoaderOptions,
    LocalBatch,
    Session,
)
from elastane.errors import ArgumentError, StateError, UnsupportedError, UsageError
from elastane.telemetry import read_events
from elastane.trainers import hugging_face_arguments
from elastane.trainers.hugging_face import ElasticTrainer, ElasticTrainingArguments
from elastane.trainers.hugging_face_parts import Memory

ROOT = Path(__file__).parents[1]
CONTEXT, VOCABULARY = 12, 32
LIMIT_S = 600  # most of it is the import of transformers in three processes


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows of tokens; the labels of a few random places count, in some rows very few."""

    def __init__(self, num_samples: int = 50) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = num_samples, CONTEXT
        self._tokens = torch.randint(VOCABULARY, shape, generator=generator)
        share = torch.rand((num_samples, 1), generator=generator)
        counts = torch.rand(shape, generator=generator) < share
        self._labels = torch.where(counts, self._tokens, -100)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def arguments(folder: Path, kind: type = ElasticTrainingArguments, **changed: object):
    defaults = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 20,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    return kind(**(defaults | changed))


def build_trainer(folder: Path, *, base: int = 4, changed: dict | None = None, **options: object):
    options = {"model": build_model(), "train_dataset": Tokens()} | options
    return ElasticTrainer(
        args=arguments(folder, **(changed or {})), base_batch_size=base, **options
    )


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def logged(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def plain_session(trainer: ElasticTrainer, **options: object) -> tuple[list, nn.Module]:
    """Return the results of a loop over a session as a user would write it, and its model."""
    model = build_model()
    names = set(trainer.get_decay_parameter_names(model))
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in names], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if n not in names]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0, fused=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=20)
    results = []
    with Session(
        model,
        optimizer=optimizer,
        schedule=schedule,
        dataset=Tokens(),
        base_batch_size=4,
        num_steps=20,
        rule=AdamScale(),
        max_norm=0.5,
        loader=LoaderOptions(seed=7),
        progress_bar=False,
        **options,
    ) as session:
        for batch in session:
            session.model.train()
            labels = batch["labels"][:, 1:]
            logits = session.model(input_ids=batch["input_ids"]).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            session.backward(loss, weight=float(labels.ne(-100).sum()))
            if (result := session.step()) is not None:
                results.append(result)
    return results, model


@pytest.mark.parametrize("batch", [None, GlobalBatch(16, max_micro_batch=8)])
def test_a_trainer_makes_the_steps_of_a_plain_loop_over_a_session(tmp_path, batch):
    accumulated = 1 if batch else 4
    trainer = build_trainer(
        tmp_path, changed={"gradient_accumulation_steps": accumulated}, batch=batch
    )
    output = trainer.train()
    results, model = plain_session(trainer, batch=batch or LocalBatch(16, micro_batches=4))

    assert logged(trainer, "gain") == [one.gain for one in results]
    assert logged(trainer, "learning_rate") == [one.lr for one in results]
    assert logged(trainer, "progress") == [one.progress for one in results]
    torch.testing.assert_close(weights_of(trainer.model), weights_of(model), rtol=1e-4, atol=1e-6)
    for name in ("loss", "grad_norm"):
        expected = [getattr(one, name) for one in results]
        torch.testing.assert_close(logged(trainer, name), expected, rtol=1e-5, atol=1e-6)
    assert output.global_step == trainer.state.global_step == len(results) < 20
    assert trainer.session.progress == results[-1].progress >= 20
    assert trainer.args.gradient_accumulation_steps == accumulated


def test_at_the_base_batch_a_run_is_the_trainers_own(tmp_path):
    changed = {
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "max_steps": -1,
        "num_train_epochs": 3,
    }
    plain = Trainer(
        build_model(), arguments(tmp_path, TrainingArguments, **changed), train_dataset=Tokens()
    )
    plain.train()
    trainer = build_trainer(tmp_path, base=8, changed=changed, rule=Identity())
    trainer.train()

    assert plain.state.global_step == trainer.state.global_step == 3 * 7
    torch.testing.assert_close(logged(trainer, "learning_rate"), logged(plain, "learning_rate"))
    torch.testing.assert_close(logged(trainer, "loss"), logged(plain, "loss"), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logged(trainer, "grad_norm"), logged(plain, "grad_norm"), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        weights_of(trainer.model), weights_of(plain.model), rtol=1e-3, atol=1e-4
    )


def test_smoothed_labels_of_a_causal_model_are_shifted_as_the_trainer_shifts_them(tmp_path):
    changed = {
        "label_smoothing_factor": 0.1,
        "train_sampling_strategy": "sequential",
        "max_steps": 3,
        "warmup_steps": 0,
    }
    plain = Trainer(
        build_model(), arguments(tmp_path, TrainingArguments, **changed), train_dataset=Tokens()
    )
    plain.train()
    trainer = build_trainer(tmp_path, changed=changed, rule=Identity())
    trainer.train()

    torch.testing.assert_close(logged(trainer, "loss"), logged(plain, "loss"), rtol=1e-4, atol=1e-4)


class Recorder(TrainerCallback):
    """Notes what the loop tells, and may interfere."""

    def __init__(self, interfere=lambda **_: None) -> None:
        self.events = []
        self._interfere = interfere

    def on_epoch_end(self, _args, state, _control, **_):
        self.events.append(("epoch", state.epoch))

    def on_step_end(self, _args, state, control, **given):
        self.events.append(("step", state.global_step))
        self._interfere(state=state, control=control, **given)


def test_epochs_end_when_their_samples_are_committed_and_the_run_when_its_progress_is(tmp_path):
    recorder = Recorder()
    changed = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    trainer = build_trainer(tmp_path, changed=changed, callbacks=[recorder])
    trainer.train()

    epochs = [value for kind, value in recorder.events if kind == "epoch"]
    steps = [value for kind, value in recorder.events if kind == "step"]
    assert epochs[0] == 1.0
    assert steps == list(range(1, trainer.state.global_step + 1))
    assert trainer.session.progress >= 26  # two epochs of thirteen base steps
    assert trainer.state.max_steps == trainer.state.global_step
    assert trainer.state.epoch == trainer.session.position / 50
    seconds = logged(trainer, "train_runtime")[-1]
    samples = logged(trainer, "train_samples_per_second")[-1] * seconds
    assert samples == pytest.approx(trainer.session.position, rel=0.02)


def test_a_callback_that_stops_the_training_does_so_after_one_more_step(tmp_path):
    def stop_at_3(*, state, control, **_):
        control.should_training_stop = state.global_step >= 3

    recorder = Recorder(stop_at_3)
    trainer = build_trainer(tmp_path, callbacks=[recorder], changed={"save_strategy": "steps"})
    trainer.train()

    assert [value for kind, value in recorder.events if kind == "step"] == [1, 2, 3, 4]
    assert trainer.session.done
    assert (tmp_path / "out" / "checkpoint-4" / "elastane.pt").exists()


def test_patience_ends_a_run_whose_evaluations_do_not_improve(tmp_path):
    changed = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "learning_rate": 0.0,
    }
    trainer = build_trainer(
        tmp_path,
        changed=changed,
        eval_dataset=Tokens(20),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()

    assert trainer.state.global_step == 7  # evaluated at 2, 4 and 6
    assert len(set(logged(trainer, "eval_loss"))) == 1


def test_a_run_that_goes_on_from_a_checkpoint_ends_like_one_that_never_stopped(tmp_path):
    changed = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 5}
    whole = build_trainer(tmp_path, changed=changed)
    whole.train()
    resumed = build_trainer(tmp_path / "again", changed=changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))

    assert resumed.state.global_step == whole.state.global_step
    assert resumed.state.epoch == whole.state.epoch
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))


def test_a_run_whose_processes_all_died_goes_on_from_its_own_folder_with_its_log(tmp_path):
    def options(steps):
        return {"run_dir": tmp_path / "run", "checkpoint": Checkpointing(every_steps=steps)}

    def die_at_6(*, state, **_):
        if state.global_step == 6:
            raise KeyboardInterrupt

    whole = build_trainer(tmp_path)
    whole.train()
    died = build_trainer(tmp_path, session_options=options(4), callbacks=[Recorder(die_at_6)])
    with pytest.raises(KeyboardInterrupt):
        died.train()
    recorder = Recorder()
    resumed = build_trainer(tmp_path, session_options=options(1000), callbacks=[recorder])
    resumed.train()

    assert recorder.events[0] == ("step", 5)
    assert [line["step"] for line in resumed.state.log_history][:3] == [1, 2, 3]
    assert resumed.state.global_step == whole.state.global_step == 20
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))


def test_a_checkpoint_without_a_sessions_state_is_refused(tmp_path):
    changed = {"save_strategy": "steps", "max_steps": 2, "warmup_steps": 0}
    plain = Trainer(
        build_model(), arguments(tmp_path, TrainingArguments, **changed), train_dataset=Tokens()
    )
    plain.train()
    trainer = build_trainer(tmp_path, changed=changed)
    with pytest.raises(StateError, match=r"resume_from_checkpoint=.*has no elastane\.pt"):
        trainer.train(resume_from_checkpoint=True)


REFUSED = {
    "auto_find_batch_size": True,
    "average_tokens_across_devices": False,
    "dataloader_drop_last": True,
    "ddp_backend": "gloo",
    "ddp_broadcast_buffers": True,
    "enable_jit_checkpoint": True,
    "include_num_input_tokens_seen": "all",
    "optim": "lomo",
    "save_on_each_node": True,
    "torch_compile": True,
    "torch_empty_cache_steps": 1,
    "train_sampling_strategy": "group_by_length",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_can_not_be_followed_is_refused_by_name(tmp_path, name):
    with pytest.raises(ArgumentError, match=rf"{name}='?{REFUSED[name]}'?: .*\. [A-Z]"):
        build_trainer(tmp_path, changed={name: REFUSED[name]})


def test_a_schedule_that_follows_a_metric_is_refused(tmp_path):
    changed = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    with pytest.raises(ArgumentError, match="lr_scheduler_type='reduce_lr_on_plateau'"):
        build_trainer(tmp_path, changed=changed, eval_dataset=Tokens(4))


def test_loading_the_best_model_is_refused(tmp_path):
    changed = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    with pytest.raises(ArgumentError, match="load_best_model_at_end=True"):
        build_trainer(tmp_path, changed=changed, eval_dataset=Tokens(4))


def test_every_refused_argument_is_one_that_training_arguments_have(tmp_path):
    args = arguments(tmp_path)
    for name, refusal in hugging_face_arguments._REFUSALS.items():
        assert refusal.fine(getattr(args, name)), name


def test_plain_training_arguments_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"args='TrainingArguments'.*ElasticTrainingArguments"):
        ElasticTrainer(build_model(), arguments(tmp_path, TrainingArguments), base_batch_size=4)


def test_accumulation_beside_a_batch_policy_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=2"):
        build_trainer(tmp_path, batch=LocalBatch(8), changed={"gradient_accumulation_steps": 2})


def test_an_option_that_the_trainer_sets_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"session_options\['max_norm'\]=1\.0"):
        build_trainer(tmp_path, session_options={"max_norm": 1.0})


def test_an_iterable_dataset_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="iterable dataset"):
        build_trainer(tmp_path, train_dataset=Endless()).train()


def test_a_method_that_would_not_be_called_may_not_be_overridden(tmp_path):
    class Own(ElasticTrainer):
        def training_step(self, *_, **__):
            return torch.zeros(())

    with pytest.raises(UnsupportedError, match=r"Own\.training_step is overridden"):
        Own(build_model(), arguments(tmp_path), base_batch_size=4)


def test_a_callback_that_wants_gradients_before_the_step_is_refused(tmp_path):
    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            raise AssertionError

    with pytest.raises(UnsupportedError, match="Looks has on_pre_optimizer_step"):
        build_trainer(tmp_path, callbacks=[Looks()]).train()


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_a_callback_that_steps_optimizer_or_schedule_is_told_not_to(tmp_path, name):
    recorder = Recorder(lambda **given: given[name].step())
    with pytest.raises(UsageError, match=rf"{name}\.step\(\) was called besides"):
        build_trainer(tmp_path, callbacks=[recorder]).train()


def test_a_callback_that_cuts_an_epoch_short_is_told_not_to(tmp_path):
    recorder = Recorder(lambda *, control, **_: setattr(control, "should_epoch_stop", True))
    with pytest.raises(UsageError, match=r"should_epoch_stop"):
        build_trainer(tmp_path, callbacks=[recorder]).train()


def test_a_trainer_trains_once_and_has_its_optimizer_back_afterwards(tmp_path):
    trainer = build_trainer(tmp_path, changed={"max_steps": 2, "warmup_steps": 0})
    trainer.train()

    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    with pytest.raises(UsageError, match="this trainer has trained"):
        trainer.train()


def test_a_loss_of_ones_own_that_is_a_mean_over_samples_counts_samples(tmp_path):
    class Own(ElasticTrainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model, inputs, **_):
            logits = model(input_ids=inputs["input_ids"]).logits
            return logits.square().mean()

    trainer = Own(
        build_model(), arguments(tmp_path, max_steps=1), base_batch_size=4, train_dataset=Tokens()
    )
    trainer.train()

    assert trainer.result.weight == 4


def test_samples_without_a_counted_label_weigh_nothing(tmp_path):
    data = Tokens(16)
    data._labels[::2] = -100
    trainer = build_trainer(
        tmp_path,
        train_dataset=data,
        changed={
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "max_steps": 3,
            "train_sampling_strategy": "sequential",
        },
    )
    trainer.train()

    assert trainer.result.weight == data._labels[8:12, 1:].ne(-100).sum()
    assert all(0 < loss < 10 for loss in logged(trainer, "loss"))


def test_accelerate_finds_no_launcher_and_opens_no_process_group(tmp_path, monkeypatch):
    launch = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    args = arguments(tmp_path)

    assert {name: os.environ[name] for name in launch} == launch
    assert not dist.is_initialized()
    assert (args.world_size, args.process_index, args.should_save) == (1, 1, False)
    args.take_place(0)
    assert args.should_save
    assert args.should_log


def test_a_newcomer_takes_up_logs_and_patience_and_who_was_there_keeps_its_own(tmp_path):
    def build(global_step):
        trainer = build_trainer(tmp_path, callbacks=[EarlyStoppingCallback()])
        trainer.state.global_step = global_step
        trainer.state.log_history = [{"step": global_step}]
        return trainer

    old, newcomer, behind = build(9), build(0), build(8)
    patience = [
        next(c for c in one.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
        for one in (old, newcomer, behind)
    ]
    patience[0].early_stopping_patience_counter = 3
    state = Memory(old).state_dict()
    for one in (newcomer, behind):
        Memory(one).load_state_dict(state)

    assert newcomer.state.log_history == [{"step": 9}]
    assert behind.state.log_history == [{"step": 8}]
    assert [one.early_stopping_patience_counter for one in patience] == [3, 3, 0]


def test_every_method_of_the_trainer_that_is_replaced_still_exists():
    added = {"session", "_check_methods", "_put_back", "_build_session", "_loader_options"}
    added |= {
        "_check_callbacks",
        "_epoch",
        "_make_step",
        "_next",
        "_take",
        "_follow",
        "_take_place",
        "_pause",
    }
    own = {name for name, one in vars(ElasticTrainer).items() if callable(one)}

    assert {name for name in own - added if not hasattr(Trainer, name)} == set()
    for name in ("_get_num_items_in_batch", "_get_collator_with_removed_columns"):
        assert hasattr(Trainer, name)


class Job:
    """The example under `elastane run`, with a record of every step of each worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / f"run-{uuid.uuid4().hex[:8]}"
        self.output = folder / "output.txt"
        given = ["--workers", "1:2", "--initial", "2", "--run-dir", str(self.run_dir)]
        script = [str(ROOT / "tests" / "hugging_face_job.py"), "--max-steps", "100000"]
        folders = ["--output-dir", str(folder / "out"), "--result", str(folder / "result")]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "WITNESS_FOLDER": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
        }
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "elastane", "run", *given, *script, *folders],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def workers(self) -> dict[int, int]:
        """Return pids by worker id."""
        found = {}
        for path in (self.run_dir / "agents").glob("*.json"):
            found |= {one["worker"]: one["pid"] for one in json.loads(path.read_text()).values()}
        return found

    def steps(self) -> dict[int, list[dict]]:
        """Return what each process wrote of its steps."""
        paths = self.folder.glob("steps-*.jsonl")
        return {
            int(path.stem.removeprefix("steps-")): [
                json.loads(line)
                for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            for path in paths
        }

    def until(self, fact) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                pytest.fail(f"launcher {self.launcher.poll()}:\n{self.output.read_text()}")
            time.sleep(0.02)

    def let_train(self, num_steps: int = 10) -> None:
        """Wait until every worker that lives has made some more steps."""
        pids = self.workers().values()
        before = {pid: len(self.steps().get(pid, ())) for pid in pids}
        self.until(
            lambda: all(
                len(self.steps().get(pid, ())) >= made + num_steps for pid, made in before.items()
            )
        )

    def close(self) -> None:
        pids = self.workers().values()
        self.launcher.kill()
        self.launcher.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path):
    one = Job(tmp_path)
    yield one
    one.close()


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S)
def test_the_example_survives_a_killed_worker_and_its_successor_trains_with_the_others(job):
    job.until(lambda: len(job.workers()) == 2)
    job.let_train()
    killed = job.workers()[1]  # the first, who writes and reports
    os.kill(killed, signal.SIGKILL)
    job.until(lambda: killed not in job.workers().values() and len(job.workers()) == 2)
    job.let_train()
    survivor, successor = (job.workers()[worker] for worker in (2, 3))
    (job.folder / "enough").touch()

    assert job.launcher.wait(LIMIT_S) == 0, job.output.read_text()
    events = read_events(job.run_dir)
    changes = [(e["cause"], e["world_size"]) for e in events if e["event"] == "membership"]
    assert changes[-2:] == [("death", 1), ("join", 2)]  # before, one may have been there first
    told = list({e["step"]: e for e in events if e["event"] == "step"}.values())
    starts = [e["position"] - e["batch_samples"] for e in told]
    assert starts == [0, *(e["position"] for e in told)][:-1]  # each sample once, in order
    assert {e["world_size"] for e in told} == {1, 2}

    steps = job.steps()
    assert len(steps[successor]) >= 10
    # The killed one's last step may have been void: the others made it again.
    kept = [*steps[killed][:-1], *steps[survivor], *steps[successor]]
    states = {(one["step"], one["epoch"], one["digest"]) for one in kept}
    assert sorted(step for step, _, _ in states) == [e["step"] for e in told]
    assert [e["step"] for e in told] == list(range(1, len(told) + 1))
    rows = [json.loads(path.read_text()) for path in (job.folder / "result").glob("*.json")]
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert rows[0]["workers"] == 2
