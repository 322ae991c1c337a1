"""Examples in docstrings and Markdown are executed as tests."""

import signal

import pytest
import torch
from sybil import Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.myst import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and the commands under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_markdown = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"])
_docstrings = Sybil(parsers=[DocTestParser()], patterns=["src/**/*.py", "src/elastane/*.py"])

pytest_collect_file = (_markdown + _docstrings).pytest()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the examples of a document back in order: pytest-randomly shuffles them."""
    examples = iter(sorted((item for item in items if isinstance(item, SybilItem)), key=_place))
    items[:] = [next(examples) if isinstance(item, SybilItem) else item for item in items]


def _place(item: SybilItem) -> tuple[str, int]:
    return str(item.path), item.example.line
