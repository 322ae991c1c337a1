"""Every optimizer in a session: it trains through a change of batch, and resumes to the bit."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.optimizers import __main__ as optimizers
from benchmarks.optimizers.catalogue import CATALOGUE, missing
from benchmarks.optimizers.contract import RULES

pytestmark = pytest.mark.filterwarnings("ignore:.*AdamScale:UserWarning")
OWN_RULE = {"SGD": "adascale", "SGD, momentum": "adascale", "ASGD": "adascale", "LARS": "adascale"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_optimizer_trains_through_a_change_of_batch_and_resumes_to_the_bit(name):
    assert missing(name) is None
    row = optimizers.row_of(name, OWN_RULE.get(name, "adamscale"))
    assert row["resumes"]
    assert row["converges"], row


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_goes_with_an_optimizer_of_another_library(rule):
    row = optimizers.row_of("NovoGrad", rule)
    assert row["resumes"]
    assert 0 < row["steps"] <= 400


def test_an_optimizer_that_is_not_installed_is_a_named_gap(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert missing("LAMB") == (
        "pytorch_optimizer is not installed: pip install 'elastane[optimizers]'"
    )


def test_the_command_prints_a_table_and_writes_rows():
    options = ["--json", "-", "--optimizer", "SGD", "--rule", "identity"]
    written = CliRunner().invoke(optimizers.main, options, catch_exceptions=False)
    (row,) = json.loads(written.stdout)["rows"]
    assert (row["optimizer"], row["rule"], row["steps"]) == ("SGD", "identity", 400)
    assert written.exit_code == 0
