"""Copies a state tree from one rank to others: point-to-point messages, flat buffers, no pickle.

Knows the messages and the group's device; nothing of models, generations or who is behind.

    tag     message      content
    0       length       one int64: bytes of the description
    1       description  JSON: the skeleton; dtype, shape and kind of device of each tensor
    2, ...  payloads     each large tensor as it lies; then the small ones, joined by dtype
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastane.elastic.flatten import flatten_state, unflatten_state
from elastane.elastic.memory import make_writable
from elastane.errors import CommunicationError, StateError
from elastane.peers import Breaker

__all__ = ["receive_state", "send_state"]

_LARGE_BYTES = 1 << 20
_LENGTH, _DESCRIPTION, _FIRST_PAYLOAD = range(3)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a receiver must know of a tensor before it arrives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def send_state(
    tree: object,
    *,
    to: int | Sequence[int],
    group: dist.ProcessGroup,
    breaker: Breaker | None = None,
) -> None:
    """Send a state tree to ranks that call `receive_state` at the same time.

    Large tensors are sent from where they lie, so the tree must not change meanwhile. Everything
    is started before the first wait, and several receivers are served side by side.

    Args:
        tree: the state; `flatten_state` says what it may hold.
        to: the receiver's rank in the group, or several.
        group: gloo or nccl; no other messages between these ranks may be under way.
        breaker: ends the wait for receivers that are gone, if the group does not.

    Raises:
        UnsupportedError: something in the tree can't be sent. The receivers hear nothing.
        CommunicationError: a receiver is gone, or did not receive within the group's time-out.
    """
    flat = flatten_state(tree)
    device = _wire_device(group)
    forms = [_form(tensor) for tensor in flat.tensors]
    description = _description(flat.skeleton, forms)
    flats = [tensor.to(device).reshape(-1) for tensor in flat.tensors]
    messages = [torch.tensor([len(description)]), torch.frombuffer(description, dtype=torch.uint8)]
    messages = [message.to(device) for message in messages]
    messages += [_joined([flats[index] for index in some]) for some in _payloads(forms)]
    ranks = [to] if isinstance(to, int) else to
    works = (
        _guarded(lambda message=message, rank=rank, tag=tag: group.send([message], rank, tag))
        for tag, message in enumerate(messages)
        for rank in ranks
    )
    _wait(works, breaker=breaker)


def receive_state(
    *,
    source: int,
    group: dist.ProcessGroup,
    into: Sequence[torch.Tensor] = (),
    breaker: Breaker | None = None,
) -> Any:
    """Receive the state tree that rank `source` sends.

    Without `into` nothing that existed before is touched: a transfer that breaks leaves a
    survivor's own state whole. With it a broken transfer leaves these tensors torn, so it is for
    workers whose state is worth nothing yet.

    Args:
        source: the sender's rank in the group.
        group: the sender's group.
        into: tensors to receive into, in place: the first ones of the tree, in its order. They
            are part of the tree that is returned.
        breaker: ends the wait for a sender that is gone, if the group does not.

    Returns:
        The tree. Other tensors than `into` lie on the CPU where the sender's did, else on this
        process's current device.

    Raises:
        StateError: `into` differs from what is sent in number, shape or dtype. Nothing has
            changed then; the sender waits in vain.
        CommunicationError: the sender is gone, or did not send within the group's time-out.
    """
    device = _wire_device(group)
    skeleton, forms = _receive_description(source, group=group, device=device, breaker=breaker)
    targets = [tensor.detach() for tensor in into]
    _check_fit(targets, forms)
    targets += [_empty(form) for form in forms[len(targets) :]]
    payloads = _payloads(forms)
    landings = [_landing([targets[index] for index in some], device=device) for some in payloads]
    works = [
        _guarded(lambda landing=landing, tag=tag: group.recv([landing], source, tag))
        for tag, landing in enumerate(landings, start=_FIRST_PAYLOAD)
    ]
    make_writable(landings)  # while the first of them arrive
    _wait(works, breaker=breaker)
    for some, landing in zip(payloads, landings, strict=True):
        _hand_out(landing, targets=[targets[index] for index in some])
    return unflatten_state(skeleton, targets)


def _wire_device(group: dist.ProcessGroup) -> torch.device:
    """Return where the group wants its messages."""
    return torch.device("cuda" if group.name() == "nccl" else "cpu")


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(dtype=tensor.dtype, shape=tuple(tensor.shape), device_type=tensor.device.type)


def _empty(form: _Form) -> torch.Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device=form.device_type)


def _payloads(forms: Sequence[_Form]) -> list[list[int]]:
    """Return which tensors make up each payload; both sides come to the same answer."""
    large: list[list[int]] = []
    small: dict[torch.dtype, list[int]] = {}
    for index, form in enumerate(forms):
        if form.num_elements * form.dtype.itemsize >= _LARGE_BYTES:
            large.append([index])
        elif form.num_elements > 0:
            small.setdefault(form.dtype, []).append(index)
    return large + list(small.values())


def _joined(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    return flats[0] if len(flats) == 1 else torch.cat(list(flats))


def _landing(targets: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Return where a payload lands: in its only target itself if that can be, or a buffer."""
    first = targets[0]
    if len(targets) == 1 and first.device.type == device.type and first.is_contiguous():
        return first.view(-1)
    num_elements = sum(target.numel() for target in targets)
    return torch.empty(num_elements, dtype=first.dtype, device=device)


def _hand_out(landing: torch.Tensor, *, targets: Sequence[torch.Tensor]) -> None:
    """Copy a payload to its targets, unless it landed in its only one."""
    pieces = landing.split([target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        if target.data_ptr() != piece.data_ptr():
            target.copy_(piece.view(target.shape))


def _description(skeleton: str, forms: Iterable[_Form]) -> bytearray:
    """Return the skeleton and the forms as JSON."""
    rows = [[str(form.dtype), form.shape, form.device_type] for form in forms]
    return bytearray(json.dumps({"skeleton": skeleton, "tensors": rows}).encode())


def _receive_description(
    source: int, *, group: dist.ProcessGroup, device: torch.device, breaker: Breaker | None
) -> tuple[str, list[_Form]]:
    """Return the skeleton and the forms of what `source` sends."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    _wait([_guarded(lambda: group.recv([length], source, _LENGTH))], breaker=breaker)
    text = torch.empty(int(length), dtype=torch.uint8, device=device)
    _wait([_guarded(lambda: group.recv([text], source, _DESCRIPTION))], breaker=breaker)
    values = json.loads(text.cpu().numpy().tobytes())
    forms = [
        _Form(dtype=_dtype(name), shape=tuple(shape), device_type=device_type)
        for name, shape, device_type in values["tensors"]
    ]
    return values["skeleton"], forms


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_fit(into: Sequence[torch.Tensor], forms: Sequence[_Form]) -> None:
    """Refuse tensors that what is sent does not fit into."""
    if len(into) > len(forms):
        raise StateError(f"into has {len(into)} tensors and the state only {len(forms)}")
    for index, (own, sent) in enumerate(zip(into, forms, strict=False)):
        if own.dtype != sent.dtype or tuple(own.shape) != sent.shape:
            raise StateError(
                f"into[{index}] is {own.dtype} {tuple(own.shape)} and {sent.dtype} {sent.shape} is "
                "sent: build the same model on all workers"
            )


def _wait(works: Iterable[dist.Work], *, breaker: Breaker | None) -> None:
    """Start all, then wait for all."""
    started = list(works)

    def wait() -> None:
        for work in started:
            work.wait()

    if breaker is None:
        _guarded(wait)
    else:
        breaker.call(wait)


def _guarded(action: Callable[[], _T]) -> _T:
    """Run an operation of the group; the error that it ends in keeps no frame of it alive."""
    try:
        return action()
    except RuntimeError as error:
        message = str(error)
    raise CommunicationError(
        f"the process group broke while state was copied, {message}: another worker failed"
    )
