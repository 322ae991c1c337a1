"""Memory that is laid out before it is written to: no page is made or copied later."""

import mmap
import os
import resource
import signal
import sys

import pytest
import torch

from elastane.elastic import memory
from elastane.elastic.memory import make_writable

_NUM_ELEMENTS = 4 << 20
_NUM_PAGES = 4 * _NUM_ELEMENTS // mmap.PAGESIZE

needs_populate = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="needs Linux 5.14",
)


def _faults_of_filling(tensor: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@needs_populate
def test_fresh_memory_has_its_pages_before_the_first_write():
    tensor = torch.empty(_NUM_ELEMENTS)

    make_writable([tensor])

    assert _faults_of_filling(tensor) < _NUM_PAGES // 50


@needs_populate
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_pages_that_a_forked_process_shares_are_copied_beforehand():
    tensor = torch.arange(_NUM_ELEMENTS, dtype=torch.float32)
    kept = tensor.clone()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        make_writable([tensor])

        assert torch.equal(tensor, kept)
        assert _faults_of_filling(tensor) < _NUM_PAGES // 50
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_values_stay_whatever_the_tensors_are():
    tensors = [
        torch.randn(_NUM_ELEMENTS)[3:],
        torch.randn(1024, 1024).t(),
        torch.randn(5),
        torch.empty(0),
        torch.randn(_NUM_ELEMENTS).to(torch.bfloat16),
        torch.zeros((), dtype=torch.int64),
    ]
    before = [tensor.clone() for tensor in tensors]

    make_writable(tensors)

    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_elsewhere_than_on_linux_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", None)

    make_writable([torch.randn(_NUM_ELEMENTS)])


def test_tensors_on_other_devices_are_left_alone():
    make_writable([torch.empty(_NUM_ELEMENTS, device="meta")])
