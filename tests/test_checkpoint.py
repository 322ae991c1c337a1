"""Checkpoints: whole or not there, found when damaged, never unpickled on trust."""

import json
import os
import pickle
import random
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_flatten import bits
from test_transfer import make, odd_tree, train
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from workers import run_workers

from elastane.elastic import dcp as dcp_files
from elastane.elastic import manifest as manifests
from elastane.elastic.checkpoint import CheckpointStore
from elastane.elastic.manifest import FORMAT, MANIFEST_NAME, write_manifest
from elastane.elastic.saver import Saver, stage
from elastane.elastic.snapshot import load_state, state_of
from elastane.errors import ArgumentError, StateError, UnsupportedError

DATA_NAME = "__0_0.distcp"
processes = pytest.mark.processes


def tree_of(step):
    return {"weights": torch.full((3, 5), float(step)), "step": step}


def store_with(folder, *steps, keep=3):
    store = CheckpointStore(folder, keep=keep)
    for step in steps:
        store.save(tree_of(step), step=step)
    return store


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def newest_state(store):
    checkpoint = store.newest()
    return store.load(checkpoint)[0]


def test_a_state_comes_back_to_the_bit_with_what_was_said_of_it(tmp_path):
    tree = {**odd_tree(), "tiny floats": torch.ones(3).to(torch.float8_e4m3fn)}
    store = CheckpointStore(tmp_path / "new" / "folder")
    facts = {"progress": 12.5, "workers": [1, 2]}
    saved = store.save(tree, step=12, generation=3, facts=facts)
    found = store.newest()
    assert found == saved
    loaded, manifest = store.load(found)
    assert bits(loaded) == bits(tree)
    assert (manifest.step, manifest.generation, manifest.facts) == (12, 3, facts)


@pytest.mark.parametrize("kind", ["sgd", "adam", "plain"])
def test_training_goes_on_from_a_checkpoint_to_the_bit(kind, tmp_path):
    first, second = make(kind), make(kind, seed=1)
    train(*first, num_steps=3)
    store = CheckpointStore(tmp_path)
    store.save(stage(state_of(*first)), step=3)
    load_state(*second, newest_state(store))
    train(*first, num_steps=2)
    train(*second, num_steps=2)
    assert repr(bits(state_of(*first))) == repr(bits(state_of(*second)))


def load_beside_others(folder):
    store = CheckpointStore(folder)
    tree = newest_state(store) if dist.get_rank() != 1 else None
    dist.barrier()
    return tree


@processes
def test_each_of_any_number_of_workers_can_load_alone(tmp_path):
    store_with(tmp_path, 5)
    first, second, third = run_workers(
        load_beside_others, tmp_path, world_size=3, folder=tmp_path / "x"
    )
    assert second is None
    assert bits(first) == bits(third) == bits(tree_of(5))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_the_models_part(tmp_path):
    source, (model, _) = make("adam"), make(seed=1)
    train(*source, num_steps=2)
    path = CheckpointStore(tmp_path).save(state_of(*source), step=2).path
    state = {name: value for name, value in model.state_dict().items() if "extra" not in name}
    dcp.load({"model": state}, checkpoint_id=path)
    model.load_state_dict(state, strict=False)
    for name, parameter in source[0].named_parameters():
        assert parameter.equal(model.get_parameter(name))
    assert model.get_buffer("1.num_batches_tracked") == 2


def test_the_last_few_are_kept(tmp_path):
    store_with(tmp_path, 1, 2, 3, 4, keep=2)
    assert names_in(tmp_path) == ["step-000000003", "step-000000004"]


def test_whole_ones_are_kept_however_many_damaged_ones_are_newer(tmp_path):
    store = store_with(tmp_path, 1, 2, 3, 4, 5, keep=5)
    for step in (3, 4):
        (tmp_path / f"step-{step:09d}" / DATA_NAME).unlink()
    store_with(tmp_path, 6, keep=3)
    assert [int(name[-1]) for name in names_in(tmp_path)] == [2, 3, 4, 5, 6]
    assert store.newest().manifest.step == 6


def test_one_that_was_just_saved_stays_also_where_later_ones_lie(tmp_path):
    store = store_with(tmp_path, 7, 8, 9, keep=2)
    store.save(tree_of(1), step=1)
    assert names_in(tmp_path) == ["step-000000001", "step-000000008", "step-000000009"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    store = store_with(tmp_path, 4)
    for number in (1, 2):
        store.save({"other": number}, step=4)
        assert newest_state(store) == {"other": number}
    assert names_in(tmp_path) == ["step-000000004-3"]


def test_a_damaged_step_that_is_saved_again_is_whole_again(tmp_path):
    store = store_with(tmp_path, 3, 4)
    delete(tmp_path / "step-000000004" / DATA_NAME)
    CheckpointStore(tmp_path).save(tree_of(4), step=4)
    assert bits(newest_state(store)) == bits(tree_of(4))
    assert names_in(tmp_path) == ["step-000000003", "step-000000004-2"]


def test_other_files_and_folders_are_left_alone(tmp_path):
    for name in ("notes", "step-1", "step-000000001.old", ".part"):
        (tmp_path / name).mkdir()
    store_with(tmp_path, 5, 6, keep=1)
    assert names_in(tmp_path) == [
        ".part",
        "notes",
        "step-000000001.old",
        "step-000000006",
        "step-1",
    ]


def test_a_run_without_checkpoints_has_no_newest(tmp_path):
    assert CheckpointStore(tmp_path / "none").newest() is None
    assert CheckpointStore(tmp_path).newest() is None


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 1.5}, {"step": None}])
def test_a_step_that_is_no_number_of_steps_is_refused(arguments, tmp_path):
    with pytest.raises(ArgumentError, match="step="):
        CheckpointStore(tmp_path).save({}, **arguments)
    with pytest.raises(ArgumentError, match="keep="):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("tree", "facts"),
    [
        ({"a": {1}}, {}),
        ({"elastane.state": torch.ones(1)}, {}),
        ({}, {"tensor": torch.ones(1)}),
        ({}, {"loss": float("nan")}),
    ],
)
def test_what_cant_be_saved_leaves_nothing_behind(tree, facts, tmp_path):
    with pytest.raises(UnsupportedError):
        CheckpointStore(tmp_path).save(tree, step=1, facts=facts)
    assert names_in(tmp_path) == []


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"\0")


def empty(path):
    path.write_bytes(b"")


def flip_first(path):
    flip(path, 0)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << position % 8
    path.write_bytes(content)


def delete(path):
    path.unlink()


def make_a_folder_of_it(path):
    path.unlink()
    path.mkdir()


DAMAGE = [truncate, lengthen, empty, flip_first, delete, make_a_folder_of_it]


@pytest.mark.parametrize("name", [MANIFEST_NAME, ".metadata", DATA_NAME])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(damage, name, tmp_path):
    store = store_with(tmp_path, 1, 2)
    damage(tmp_path / "step-000000002" / name)
    with pytest.warns(RuntimeWarning, match=f"000000002 .*{name}.*: the one before is used"):
        checkpoint = store.newest()
    assert bits(store.load(checkpoint)[0]) == bits(tree_of(1))


def test_every_flipped_bit_is_found(tmp_path):
    store = store_with(tmp_path, 1)
    for name in (MANIFEST_NAME, ".metadata", DATA_NAME):
        path = tmp_path / "step-000000001" / name
        size = path.stat().st_size
        for position in [*random.Random(0).sample(range(size), 100), size - 1]:
            flip(path, position)
            with pytest.raises(StateError, match=f"none .* is whole .*{name} is damaged"):
                store.newest()
            flip(path, position)
    assert store.newest() is not None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'{"body": 3}',
        b'{"body": {}}',
        b"\xff",
        b"[" * 100_000,
        b'{"format": 9}',
    ],
)
def test_a_manifest_of_anything_else_is_named(text, tmp_path):
    store = store_with(tmp_path, 1)
    (tmp_path / "step-000000001" / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(StateError, match=f"{MANIFEST_NAME} is damaged"):
        store.newest()


def test_a_later_generation_s_checkpoint_is_newer_whatever_its_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save({"x": 1}, step=90, generation=3)
    store.save({"x": 2}, step=80, generation=12)
    store.save({"x": 3}, step=85, generation=12)
    newest = store.newest()
    assert newest is not None
    assert newest.place == (12, 85)
    assert store.last_generation == 12
    assert names_in(tmp_path) == ["step-000000080-g12", "step-000000085-g12"]


def test_an_empty_folder_and_one_with_another_name_are_named(tmp_path):
    store = store_with(tmp_path, 1)
    (tmp_path / "step-000000003").mkdir()
    (tmp_path / "step-000000001").rename(tmp_path / "step-000000002")
    said = f"step-000000003 has no {MANIFEST_NAME}"
    with (
        pytest.warns(RuntimeWarning, match=f"{said}: the one before is used"),
        pytest.raises(
            StateError,
            match=f"{said}; step-000000002 holds the checkpoint step-000000001",
        ),
    ):
        store.newest()


def sign_again(path, **fields):
    """Give a folder a manifest that is right for what lies in it now."""
    (path / MANIFEST_NAME).unlink()
    write_manifest(path, **{"step": int(path.name[-9:]), "generation": 0, "facts": {}, **fields})


def test_a_newer_format_is_refused_with_the_way_out(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", FORMAT + 1)
        patch.setattr(manifests, "__version__", "9.9")
        store_with(tmp_path, 2)
    for other in (store, CheckpointStore(tmp_path)):
        with pytest.raises(
            StateError, match=r"format 2, written by elastane 9\.9.*move the folder"
        ):
            other.newest()


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def hostile_pickles(marker):
    harmful = pickle.dumps(Hostile(marker))
    inside = Metadata({}, planner_data=Hostile(marker))
    reached = b"\x80\x04\x8c\x13torch.serialization\x8c\x17_get_layout.__globals__\x93."
    evaluated = b"c__builtin__\neval\n(S'1'\ntR."
    called = b"\x80\x04ctorch.hub\nload\n."
    return [harmful, pickle.dumps(inside), reached, evaluated, called, b"", b"\x80\x04."]


@pytest.mark.parametrize("number", range(7))
def test_a_hostile_pickle_with_a_right_manifest_is_not_executed(number, tmp_path):
    store = store_with(tmp_path / "run", 1)
    path = tmp_path / "run" / "step-000000001"
    marker = tmp_path / "marker"
    (path / ".metadata").write_bytes(hostile_pickles(marker)[number])
    sign_again(path)
    checkpoint = store.newest()
    with pytest.raises(StateError, match="is not what elastane writes"):
        store.load(checkpoint)
    assert not marker.exists()


def rewritten(path, change):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sign_again(path)


def name_a_file_elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = f"../step-000000002/{DATA_NAME}"


def add_bytes(metadata):
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()


def drop_the_state(metadata):
    del metadata.state_dict_metadata["elastane.state"]


@pytest.mark.parametrize("change", [name_a_file_elsewhere, add_bytes, drop_the_state])
def test_metadata_of_another_writer_is_refused(change, tmp_path):
    store = store_with(tmp_path, 1)
    rewritten(tmp_path / "step-000000001", change)
    checkpoint = store.newest()
    with pytest.raises(StateError, match="elastane"):
        store.load(checkpoint)


def test_only_a_plain_tensors_names_may_be_unpickled():
    known = {name for _, name in dcp_files._ALLOWED}
    assert len(known) == 10
    for module, name in dcp_files._ALLOWED:
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_tensor_files_that_are_no_tensors_are_not_unpickled(tmp_path):
    store = store_with(tmp_path / "run", 1)
    path = tmp_path / "run" / "step-000000001"
    size = (path / DATA_NAME).stat().st_size
    harmful = pickle.dumps(Hostile(tmp_path / "marker"), protocol=2)
    (path / DATA_NAME).write_bytes(harmful * (size // len(harmful) + 1))
    sign_again(path)
    checkpoint = store.newest()
    with pytest.raises(StateError, match="can't be read"):
        store.load(checkpoint)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [".metadata", DATA_NAME])
def test_one_that_changes_after_it_was_looked_at_is_not_loaded(name, tmp_path):
    store = store_with(tmp_path, 1)
    checkpoint = store.newest()
    truncate(checkpoint.path / name)
    with pytest.raises(StateError, match=r"has changed|can't be read"):
        store.load(checkpoint)
    store.save(tree_of(1), step=1)
    CheckpointStore(tmp_path, keep=1).save(tree_of(2), step=2)
    with pytest.raises(StateError, match="can't be read"):
        store.load(checkpoint)


def test_a_draft_is_seen_by_nobody_and_safe_from_its_own_store(tmp_path):
    store = store_with(tmp_path, 1)
    draft = store.write(tree_of(2), step=2)
    assert store.newest().manifest.step == 1
    store.save(tree_of(3), step=3)
    store.publish(draft)
    assert [int(name[-1]) for name in names_in(tmp_path)] == [1, 2, 3]


def test_a_draft_that_was_left_behind_is_removed_by_the_next_save(tmp_path):
    abandoned = CheckpointStore(tmp_path).write(tree_of(1), step=1)
    store_with(tmp_path, 2)
    assert names_in(tmp_path) == ["step-000000002"]
    with pytest.raises(FileNotFoundError):
        CheckpointStore(tmp_path).publish(abandoned)
    assert names_in(tmp_path) == ["step-000000002"]


def test_a_discarded_draft_is_gone(tmp_path):
    store = CheckpointStore(tmp_path)
    store.discard(store.write(tree_of(1), step=1))
    assert names_in(tmp_path) == []


def test_what_is_staged_does_not_change_with_training():
    model, optimizer = make()
    train(model, optimizer, num_steps=1)
    tree = state_of(model, optimizer)
    before = repr(bits(tree))
    staged = stage(tree)
    train(model, optimizer, num_steps=1)
    assert repr(bits(staged)) == before != repr(bits(state_of(model, optimizer)))


class GatedStore(CheckpointStore):
    """Holds a write until told to go on."""

    def __init__(self, folder):
        super().__init__(folder)
        self.entered, self.gate = threading.Event(), threading.Event()

    def write(self, *arguments, **options):
        self.entered.set()
        assert self.gate.wait(30)
        return super().write(*arguments, **options)


def test_a_save_is_published_only_once_its_step_is_final(tmp_path):
    store = CheckpointStore(tmp_path)
    with Saver(store) as saver:
        assert saver.begin(stage(tree_of(4)), step=4, generation=2, facts={"loss": 1.0})
        assert saver.wait(30)
        assert store.newest() is None
        saver.confirm(3)
        saver.wait(30)
        assert store.newest() is None
        saver.confirm(4)
        assert saver.wait(30)
        (outcome,) = saver.outcomes()
        assert saver.outcomes() == []
    manifest = store.newest().manifest
    assert (manifest.step, manifest.generation, manifest.facts) == (4, 2, {"loss": 1.0})
    assert (outcome.step, outcome.error) == (4, "")
    assert outcome.path == str(store.newest().path)
    assert outcome.seconds > 0


def test_a_step_may_become_final_while_it_is_being_written(tmp_path):
    store = GatedStore(tmp_path)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(4)), step=4)
        assert store.entered.wait(30)
        saver.confirm(7)
        saver.discard(4)
        assert not saver.wait(0.001)
        store.gate.set()
        assert saver.wait(30)
    assert store.newest().manifest.step == 4


@pytest.mark.parametrize("early", [True, False])
def test_a_void_step_is_never_published(early, tmp_path):
    store = GatedStore(tmp_path)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(4)), step=4)
        assert store.entered.wait(30)
        if not early:
            store.gate.set()
            saver.wait(30)
        saver.discard(5)
        saver.discard(4)
        saver.confirm(4)
        store.gate.set()
        assert saver.wait(30)
        (outcome,) = saver.outcomes()
        assert (outcome.step, outcome.path, outcome.error) == (4, "", "")
        assert names_in(tmp_path) == []
        assert saver.begin(stage(tree_of(5)), step=5)
        saver.confirm(5)
    assert names_in(tmp_path) == ["step-000000005"]


def test_a_save_while_one_is_under_way_is_skipped_and_said(tmp_path):
    store = GatedStore(tmp_path)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(1)), step=1)
        with pytest.warns(
            RuntimeWarning, match="no checkpoint of step 2: .*1 is still being written"
        ):
            assert not saver.begin(stage(tree_of(2)), step=2)
        store.gate.set()
        saver.wait(30)
        with pytest.warns(RuntimeWarning, match="step 3: that of step 1 is still waiting to be"):
            assert not saver.begin(stage(tree_of(3)), step=3)
        saver.confirm(3)
    assert store.newest().manifest.step == 1


def test_an_unconfirmed_save_is_dropped_at_the_end_and_a_confirmed_one_is_finished(tmp_path):
    store = CheckpointStore(tmp_path)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(1)), step=1)
        saver.wait(30)
    assert names_in(tmp_path) == []
    with pytest.raises(ZeroDivisionError), Saver(store) as saver:
        saver.begin(stage(tree_of(2)), step=2)
        saver.confirm(2)
        _ = 1 / 0
    assert names_in(tmp_path) == ["step-000000002"]
    assert not any(thread.name == "elastane saver" for thread in threading.enumerate())


def test_a_save_that_fails_is_a_warning_and_the_next_one_tries_again(tmp_path):
    folder = tmp_path / "run"
    folder.write_text("a file where the folder should be")
    store = CheckpointStore(folder)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(1)), step=1)
        with pytest.warns(RuntimeWarning, match="step 1 was not written, FileExistsError"):
            saver.wait(30)
        (outcome,) = saver.outcomes()
        assert outcome.error
        folder.unlink()
        assert saver.begin(stage(tree_of(2)), step=2)
        saver.confirm(2)
        saver.wait(30)
    assert store.newest().manifest.step == 2


def test_a_publication_that_fails_leaves_no_draft(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    with Saver(store) as saver, monkeypatch.context() as patch:
        patch.setattr(store, "publish", lambda _: 1 / 0)
        saver.begin(stage(tree_of(1)), step=1)
        saver.confirm(1)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            saver.wait(30)
    assert names_in(tmp_path) == []


def test_a_checkpoint_counts_as_written_also_if_older_ones_cant_be_removed(tmp_path, monkeypatch):
    def refuse(*, newest):
        raise PermissionError(f"not with {newest.path.name}")

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(store, "prune", refuse)
    with Saver(store) as saver:
        saver.begin(stage(tree_of(1)), step=1)
        saver.confirm(1)
        with pytest.warns(RuntimeWarning, match="step 1 was written, but older ones could not be"):
            saver.wait(30)
        (outcome,) = saver.outcomes()
    assert (outcome.error, outcome.path) == ("", str(store.newest().path))


def large_tree(step):
    return {"weights": torch.full((50_000,), float(step)), "step": step}


def check_after_a_kill(folder, *, told):
    """The newest checkpoint is whole, is what was saved, and no older than what was told."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = store.newest()
    if checkpoint is None:
        assert told is None
        return 0
    tree, manifest = store.load(checkpoint)
    assert manifest.step - (told or 0) in (0, 1)
    assert bits(tree) == bits(large_tree(manifest.step % 200))
    return manifest.step


def forked(save, folder, *arguments):
    """Start `save` in a child that tells the steps that it saved; return its pid and a pipe."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return pid, here
    try:
        save(folder, lambda step: os.write(there, bytes([step])), *arguments)
        os._exit(0)
    finally:
        os._exit(1)


def received(pipe):
    """All that a dead process has told."""
    with os.fdopen(pipe, "rb") as file:
        return list(file.read())


def save_for_ever(folder, tell):
    store = CheckpointStore(folder, keep=2)
    newest = store.newest()
    step = 0 if newest is None else newest.manifest.step
    while True:
        step += 1
        store.save(large_tree(step % 200), step=step)
        tell(step % 200)


def kill_often(folder):
    moments = random.Random(1)
    step = 0
    for _ in range(20):
        pid, pipe = forked(save_for_ever, folder)
        first = os.read(pipe, 1)
        threading.Event().wait(moments.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert first == bytes([(step + 1) % 200])
        told = step + 1 + len(received(pipe))
        step = check_after_a_kill(folder, told=told)
    return step


@processes
def test_a_writer_that_is_killed_at_any_time_leaves_the_newest_or_the_one_before(tmp_path):
    (step,) = run_workers(kill_often, tmp_path / "run", world_size=1, folder=tmp_path)
    assert step > 20
    assert len([name for name in names_in(tmp_path / "run") if name.startswith("step")]) <= 3
    store_with(tmp_path / "run", step + 1, keep=2)
    assert len(names_in(tmp_path / "run")) == 2


CRASHING = ["rename", "fsync", "unlink", "rmdir", "mkdir"]


def crash_at(number):
    """Have the process kill itself before its `number`-th change of a folder or a disk."""
    left = iter(range(number))

    def wrap(function):
        def call(*arguments, **options):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in CRASHING:
        setattr(os, name, wrap(getattr(os, name)))


def save_until(folder, tell, number):
    store = CheckpointStore(folder, keep=1)
    crash_at(number)
    for step in (1, 2, 3, 3):
        store.save(large_tree(step), step=step)
        tell(step)


def crash_everywhere(folder):
    """Return how many places there are, and whether the last run went through."""
    for number in range(200):
        run = folder / str(number)
        pid, pipe = forked(save_until, run, number)
        _, status = os.waitpid(pid, 0)
        told = received(pipe)
        check_after_a_kill(run, told=told[-1] if told else None)
        store_with(run, 9, keep=1)
        assert names_in(run) == ["step-000000009"]
        if status == 0:
            return number
        assert status == signal.SIGKILL
    raise AssertionError("no end")


@processes
def test_a_writer_may_die_between_any_two_changes_of_its_folder(tmp_path):
    (num_places,) = run_workers(crash_everywhere, tmp_path, world_size=1, folder=tmp_path)
    assert num_places > 30


def test_a_manifest_can_be_read_by_people(tmp_path):
    path = CheckpointStore(tmp_path).save(tree_of(1), step=1, facts={"progress": 1.0}).path
    text = (path / MANIFEST_NAME).read_text()
    assert '"progress": 1.0' in text
    assert json.loads(text)["body"]["step"] == 1
