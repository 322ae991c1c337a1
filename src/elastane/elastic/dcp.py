"""Tensors in a folder, in the format of torch.distributed.checkpoint, written by one process.

Drives DCP's planner and storage itself: `dcp.save` and `dcp.load` warn on every call without a
group, and unpickle `.metadata` without limits. Knows nothing of checksums, trees or steps.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from elastane.errors import StateError

__all__ = ["METADATA_NAME", "read_tensors", "write_tensors"]

METADATA_NAME = ".metadata"

# All that a `.metadata` of plain tensors names, private names of torch among them; and dtypes.
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to an empty folder, and make its files durable.

    Args:
        folder: is created.
        tensors: by the keys under which any DCP reader will find them.

    Raises:
        OSError: the folder can't be written to, or the disk is full.
    """
    try:
        _write(folder, tensors)
    except RuntimeError as error:  # torch's, raised while it cleaned up after the system's
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    planner, writer = DefaultSavePlanner(), _Writer(folder, per_thread_copy_ahead=0)
    planner.set_up_planner(dict(tensors), storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def read_tensors(
    folder: Path, *, metadata: bytes, file_names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder to the CPU.

    Args:
        folder: written by `write_tensors`.
        metadata: content of its `.metadata`, whose checksum has been compared.
        file_names: the files that may be read.

    Raises:
        StateError: `metadata` names what no metadata of tensors has, or does not fit the files.
    """
    known = _parse(metadata)
    forms = _forms(known, file_names)
    tensors = {name: torch.empty(f.size, dtype=f.properties.dtype) for name, f in forms.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(folder)
    planner.set_up_planner(dict[str, Any](tensors), known, is_coordinator=True)
    reader.set_up_storage_reader(known, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"the tensors in {folder} can't be read, {error}") from error
    return tensors


class _Writer(FileSystemWriter):
    """Leaves the path, which is a temporary one, out of the metadata."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows no other names than those of `_ALLOWED`, and dtypes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _parse(metadata: bytes) -> Metadata:
    """Return what a `.metadata` holds. Whatever its bytes do wrong, no more than this fails."""
    try:
        known = _MetadataUnpickler(io.BytesIO(metadata)).load()
    except Exception as error:
        raise StateError(
            f"{METADATA_NAME} is not what elastane writes, {error}: it was not loaded; find out "
            "who wrote it, and move the folder away to go on from the checkpoint before it"
        ) from None
    if not isinstance(known, Metadata):
        raise StateError(f"{METADATA_NAME} is not what elastane writes, it holds {type(known)}")
    return known


def _forms(known: Metadata, file_names: Collection[str]) -> dict[str, TensorStorageMetadata]:
    """Return what is known of each tensor; refuse other things, and files elsewhere."""
    forms = {
        name: form
        for name, form in known.state_dict_metadata.items()
        if isinstance(form, TensorStorageMetadata)
    }
    if len(forms) != len(known.state_dict_metadata):
        raise StateError(f"{METADATA_NAME} is not what elastane writes, not all in it is a tensor")
    elsewhere = {info.relative_path for info in known.storage_data.values()} - set(file_names)
    if elsewhere:
        raise StateError(f"{METADATA_NAME} is not what elastane writes, it names {elsewhere}")
    return forms
