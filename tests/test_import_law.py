"""Importing elastane does nothing, and what it exports is what it says."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types

import pytest

import elastane

MAX_TOP_LEVEL_NAMES = 20

SUBMODULES = sorted(
    module.name for module in pkgutil.walk_packages(elastane.__path__, prefix="elastane.")
)

PROBE = """
import os, signal, sys, threading

def handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}

import torch  # what torch does on import is not ours to answer for
import torch.distributed.checkpoint, torch.distributed.elastic.agent.server
import torch.nn.parallel, torch.utils.data

import logging
before = (
    dict(os.environ), handlers(), threading.active_count(), os.getcwd(), sys.excepthook,
    list(logging.root.handlers), logging.root.level, torch.get_rng_state().tolist(),
)
import elastane
after = (
    dict(os.environ), handlers(), threading.active_count(), os.getcwd(), sys.excepthook,
    list(logging.root.handlers), logging.root.level, torch.get_rng_state().tolist(),
)
names = ("environment", "signals", "threads", "folder", "excepthook", "log handlers", "log level",
         "random state")
for name, old, new in zip(names, before, after, strict=True):
    if old != new:
        print("changed:", name)
packages = ("matplotlib", "tensorboard", "mlxtend", "pandas", "sklearn", "scipy", "pytest",
            "lightning", "transformers", "accelerate")
for package in packages:
    if package in sys.modules:
        print("imported:", package)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    print("opened a process group")
"""


def in_order(names: list[str]) -> list[str]:
    """Sorted as ruff's RUF022 wants it: constants, classes, then the rest."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def exports_of(module: types.ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


def test_importing_elastane_changes_nothing_and_needs_no_optional_package():
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)

    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.splitlines() == []


def test_the_top_level_exports_are_sorted_true_and_few():
    assert elastane.__all__ == in_order(elastane.__all__)
    assert len(set(elastane.__all__)) == len(elastane.__all__) <= MAX_TOP_LEVEL_NAMES
    assert [name for name in elastane.__all__ if not hasattr(elastane, name)] == []


def test_every_top_level_export_has_a_docstring_of_its_own():
    undocumented = [
        name
        for name in elastane.__all__
        if callable(getattr(elastane, name)) and not inspect.getdoc(getattr(elastane, name))
    ]

    assert undocumented == []


@pytest.mark.parametrize("name", SUBMODULES)
def test_the_exports_of_a_submodule_are_sorted_and_true(name):
    module = importlib.import_module(name)
    exports = exports_of(module)

    assert exports == in_order(exports)
    assert len(set(exports)) == len(exports)
    assert [export for export in exports if not hasattr(module, export)] == []


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_submodule_says_what_it_is_for(name):
    assert inspect.getdoc(importlib.import_module(name))
