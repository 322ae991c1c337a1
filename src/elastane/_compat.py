"""What differs between torch releases, and the semi-private names of torch that we use.

Differences are found by looking for the feature, never by version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

__all__ = [
    "FileStore",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "collates_by_stacking",
    "flatten_together",
    "foreach_add_",
    "foreach_addcmul_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_zero_",
    "forget_unscaling",
    "held_by_modules",
    "is_unscaled",
    "loss_scale",
    "no_buffer_sync",
    "note_overflow",
    "note_step",
    "overlaps_with_ddp",
    "rebuild_buckets",
    "remove_hooks",
    "rendezvous",
    "shut_down_loader",
]

foreach_addcmul_: Callable[..., None] = torch._foreach_addcmul_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul: Callable[..., list[torch.Tensor]] = torch._foreach_mul  # pyright: ignore
foreach_add_: Callable[..., None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul_: Callable[..., None] = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
flatten_together: Callable[..., torch.Tensor] = _flatten_dense_tensors
FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
rendezvous = dist.rendezvous  # pyright: ignore[reportPrivateImportUsage]
foreach_zero_: Callable[..., None] = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]


def no_buffer_sync() -> dict[str, Any]:
    """Return the DDP arguments that switch off the broadcast of buffers in forward.

    torch 2.13 calls it `forward_sync_buffers` and warns about the older `broadcast_buffers`.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    known = "forward_sync_buffers" in parameters
    return {"forward_sync_buffers" if known else "broadcast_buffers": False}


def held_by_modules(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each module's own parameters and children, by name, as it keeps them.

    To see whether they are still the same costs a tenth of `model.parameters()`.
    """
    return [(module._parameters, module._modules) for module in model.modules()]


def rebuild_buckets(wrapper: DistributedDataParallel) -> bool:
    """Have DDP put its buckets into the order in which gradients came, as its second forward does.

    The workers agree on the order by blocking operations. Returns whether it was done: before the
    first averaged backward, with unused parameters, and a second time it is not.
    """
    was_done = wrapper.reducer._rebuild_buckets()
    wrapper._has_rebuilt_buckets = wrapper._has_rebuilt_buckets or was_done
    return was_done


def remove_hooks(wrapper: DistributedDataParallel) -> None:
    """Take a wrapper's hooks off the model's gradients, as its end does.

    While a thread is caught in `rebuild_buckets` the hooks wait for it, and with them any backward.
    """
    wrapper._remove_autograd_hooks()


def loss_scale(scaler: GradScaler) -> float | torch.Tensor | None:
    """Return the present loss scale where it lies; `None` if no loss was scaled yet."""
    return scaler._scale if scaler.is_enabled() else 1.0


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether `unscale_` was called for the optimizer since the last update."""
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    state = states.get(id(optimizer))
    return state is not None and state["stage"].name == "UNSCALED"


def note_overflow(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Have `update` back off, after `unscale_` has been called for the optimizer."""
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    for found_inf in states.get(id(optimizer), {}).get("found_inf_per_device", {}).values():
        found_inf.fill_(1.0)


def note_step(optimizer: Optimizer) -> None:
    """Have torch's schedulers know of a step that was not made through `optimizer.step`.

    They warn at their first move otherwise; a compiled step made before them passes them by.
    """
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def forget_unscaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Have the scaler take the optimizer's next gradients for scaled ones."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.pop(id(optimizer), None)


def overlaps_with_ddp(optimizer: Optimizer) -> bool:
    """Return whether a ZeroRedundancyOptimizer steps inside DDP's backward."""
    return optimizer._overlap_with_ddp  # pyright: ignore[reportAttributeAccessIssue]


def collates_by_stacking() -> bool:
    """Return whether `default_collate` stacks tensors: users may have put in something else."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn


def shut_down_loader(iterator: Any) -> None:
    """End the processes of a multi-process `DataLoader` iterator, whoever still holds it."""
    iterator._shutdown_workers()
