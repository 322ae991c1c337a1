"""The names of torch that the supervisor uses and torch does not promise: all of them, here.

A torch release that lacks one, or changed how it is called, fails here first and by name.
"""

import inspect
import logging
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

import elastane.launch
from elastane.launch.agent import SlotAgent
from elastane.launch.link import serve
from elastane.launch.slots import _TORCH_LOG

LAUNCH = Path(elastane.launch.__path__[0])

OVERRIDDEN = {
    "_initialize_workers": ["self", "worker_group"],
    "_monitor_workers": ["self", "worker_group"],
    "_restart_workers": ["self", "worker_group"],
    "_stop_workers": ["self", "worker_group"],
    "_shutdown": ["self", "death_sig", "timeout"],
    "_exit_barrier": ["self"],
}
STORE = {"add", "check", "get", "queue_pop", "queue_push", "set", "set_timeout"}
WORKER_GROUP = {"state", "store", "workers"}
SPEC = {
    *("role", "local_world_size", "rdzv_handler", "entrypoint", "max_restarts"),
    "monitor_interval",
}
HANDLER = {
    *("next_rendezvous", "num_nodes_waiting", "get_backend", "use_agent_store", "get_run_id"),
    *("is_closed", "set_closed", "shutdown"),
}


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_agent_has_the_methods_that_are_overridden(name):
    assert parameters(getattr(LocalElasticAgent, name)) == OVERRIDDEN[name]
    assert len(parameters(getattr(SlotAgent, name))) == len(OVERRIDDEN[name])


def test_nothing_else_of_the_agent_is_overridden():
    own = {name for name in vars(SlotAgent) if hasattr(LocalElasticAgent, name)}
    made_by_python = {name for name in own if name.startswith(("__", "_abc"))}

    assert own - made_by_python == set(OVERRIDDEN)


def test_the_agents_loop_calls_what_is_overridden():
    loop = inspect.getsource(inspect.unwrap(api.SimpleElasticAgent._invoke_run))
    run = inspect.getsource(inspect.unwrap(api.SimpleElasticAgent.run))

    called = set(re.findall(r"self\.(_\w+)\(", loop + run))
    assert set(OVERRIDDEN) <= called
    assert "num_nodes_waiting() > 0" in loop or "num_nodes_waiting > 0" in loop


def test_a_worker_group_and_its_specification_have_the_fields_that_are_set():
    assert set(api.WorkerGroup.__slots__) >= WORKER_GROUP
    assert set(parameters(api.WorkerSpec)) >= SPEC
    assert {"HEALTHY", "SUCCEEDED"} <= set(api.WorkerState.__members__)
    assert {"state", "return_values", "failures"} <= set(parameters(api.RunResult))


def test_a_process_is_started_watched_and_killed_by_these_names():
    wanted = {"name", "entrypoint", "args", "envs", "logs_specs"}
    assert wanted <= set(parameters(start_processes))
    assert {"stdouts", "stderrs", "error_files"} <= set(parameters(LogsDest))
    assert LogsSpecs.__abstractmethods__ == {"reify", "root_log_dir"}
    assert {"pids", "close"} <= set(dir(SubprocessContext))
    assert "subprocess_handlers" in inspect.getsource(SubprocessContext.__init__)
    assert "self.proc" in inspect.getsource(SubprocessHandler.__init__)
    assert parameters(SubprocessHandler.close) == ["self", "death_sig"]
    assert "start_new_session" in inspect.getsource(SubprocessHandler)
    assert "log_dir" in parameters(DefaultLogsSpecs)


def test_the_logger_that_is_quietened_is_the_one_that_would_warn():
    module = inspect.getmodule(SubprocessContext)

    assert module is not None
    assert vars(module)["logger"] is _TORCH_LOG is logging.getLogger(module.__name__)


def test_the_rendezvous_interface_is_the_one_that_is_implemented():
    assert HANDLER - {"use_agent_store"} == set(RendezvousHandler.__abstractmethods__)
    assert hasattr(RendezvousHandler, "use_agent_store")
    assert {"store", "rank", "world_size"} <= set(parameters(RendezvousInfo))
    assert {"master_addr", "master_port"} <= set(parameters(RendezvousStoreInfo))


def test_the_store_has_queues():
    store = serve(0)

    assert set(dir(store)) >= STORE
    store.queue_push("queue", "value")
    assert store.queue_pop("queue") == b"value"
    assert store.libuvBackend
    assert issubclass(dist.DistNetworkError, dist.DistError)


def test_no_other_module_of_torch_is_used():
    found = set()
    for path in LAUNCH.glob("*.py"):
        found |= set(re.findall(r"^\s*(?:from|import) (torch[\w.]*)", path.read_text(), re.M))

    assert found == {
        "torch.distributed",
        "torch.distributed.elastic.agent.server.api",
        "torch.distributed.elastic.agent.server.local_elastic_agent",
        "torch.distributed.elastic.multiprocessing",
        "torch.distributed.elastic.rendezvous",
        "torch.distributed.elastic.rendezvous.api",
    }
