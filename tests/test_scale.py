"""What many workers would cost: the simulated launcher, the formulas and the page, in small."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from benchmarks.scale import __main__ as scale
from benchmarks.scale import model
from benchmarks.scale.changes import CHANGES, changes, slope
from benchmarks.scale.members import SHORT_ADDRESSES, measure_groups
from benchmarks.scale.model import Group, Network, StoreCost
from benchmarks.scale.page import _PARTS, PAGE, RESULT, page
from benchmarks.scale.picture import draw_scale
from benchmarks.scale.rows import _LIMITS, checks, constants_of, limits
from benchmarks.scale.simulated import SLOTS, SimulatedJob
from benchmarks.scale.store_cost import measure_store
from elastane.batching import World
from elastane.elastic.opening import open_beside
from elastane.launch.link import connect, serve
from elastane.peers import Breaker

CAUSES = ("start", "join", "leave", "death", "hang", "lost", "scale")
SHARED = Network(name="here", latency_s=2e-4, bandwidth=1e9, processors=2)
APART = Network(name="there", latency_s=3e-4, bandwidth=2e9, round_trip_s=1e-4)
GROUP = Group(member_s=2e-3, pair_s=4e-4, message_s=5e-5)
STORE = StoreCost(query_s=1e-5, key_s=1e-6, byte_s=1e-9)


def test_each_kind_of_change_is_decided_as_what_it_is():
    rows = [row for row in changes(3 * SLOTS) if row["change"] != "none"]

    assert dict(zip(CHANGES, CAUSES, strict=True)) == {r["change"]: r["cause"] for r in rows}
    members = {row["cause"]: row["members"] for row in rows}
    assert members["start"] == members["leave"] == members["death"] == members["hang"] == 24
    assert members["join"] == 25
    assert members["lost"] == 24 - SLOTS
    assert members["scale"] == 12


def test_the_simulated_workers_have_ids_of_their_own_and_the_record_knows_the_last(tmp_path):
    with SimulatedJob(20, folder=tmp_path) as job:
        job.register()
        job.turn(job.obey())
        job.settle()
        assert sorted(job.members) == list(range(1, 21))
        assert job.decider.record.worker_ids == 20
        job.turn(job.die(job.members[-2:]))
        job.settle()
        assert sorted(job.members) == [*range(1, 19), 21, 22]
        assert json.loads((tmp_path / "launcher.json").read_text())["worker_ids"] == 22


def test_a_look_at_all_beats_takes_no_more_requests_with_more_workers(tmp_path):
    asked = {}
    for workers in (16, 200):
        folder = tmp_path / str(workers)
        folder.mkdir()
        with SimulatedJob(workers, folder=folder) as job:
            job.register()
            job.turn(job.obey())
            job.settle()
            job.turn()
            job.store.start_count()
            job.turn()
            asked[workers] = Counter(job.store.round_trips)
            assert job.store.keys >= workers
    assert asked[16] == asked[200] == Counter(multi_get=2)


def test_a_small_sum_is_cut_as_gloo_cuts_it():
    for workers in (2, 3, 4, 8, 100):
        for elements in (1, 5, 12, 400):
            segment = -(-8 * elements // (2 * workers))
            segment += -segment % 8
            nonempty = sum(8 * elements - at > 0 for at in range(0, 8 * 2 * elements, segment))
            expected = 2 * (workers - 1) * nonempty
            assert model.ring_messages(workers, elements=elements) == expected


def test_hops_make_a_small_sum_linear_and_a_tree_logarithmic():
    ring = [model.ring_s(n, elements=5, network=APART, group=GROUP) for n in (11, 101, 1001)]
    assert ring == pytest.approx([20 * 3e-4, 200 * 3e-4, 2000 * 3e-4])
    tree = [model.tree_s(n, network=APART) for n in (16, 256, 4096)]
    assert tree == pytest.approx([8 * 3e-4, 16 * 3e-4, 24 * 3e-4])


def test_shared_processors_make_messages_wait_for_each_other():
    here = model.ring_s(8, elements=5, network=SHARED, group=GROUP)
    assert here == pytest.approx(max(14 * 2e-4, 70 * 5e-5 / 2))
    many = model.connect_s(8, network=SHARED, group=GROUP)
    assert many == pytest.approx((8 * 2e-3 + 28 * 4e-4) / 2)
    own = model.connect_s(8, network=APART, group=GROUP)
    assert own == pytest.approx(2e-3 + 7 * (2e-4 + 1e-4))


def test_the_store_works_quadratically_for_a_mesh_and_cubically_for_its_bytes():
    free = StoreCost(query_s=0.0, key_s=0.0, byte_s=1e-9)
    bytes_only = [model.mesh_store_s(n, store=free, batched=False) for n in (10**5, 2 * 10**5)]
    assert bytes_only[1] / bytes_only[0] == pytest.approx(8, rel=0.01)
    batched = [model.mesh_store_s(n, store=STORE, batched=True) for n in (12_800, 25_600)]
    assert batched[1] / batched[0] == pytest.approx(4, rel=0.01)
    assert model.mesh_store_s(1000, store=STORE, batched=True) < 0.05 * model.mesh_store_s(
        1000, store=STORE, batched=False
    )


def test_a_state_is_dealt_over_its_sources_but_on_one_machine_all_copies_share_the_memory():
    known = {"joiners": 6, "sources": 3}
    assert model.transfer_s(2e9, network=APART, **known) == pytest.approx(2.0, rel=1e-3)
    assert model.transfer_s(2e9, network=SHARED, **known) == pytest.approx(12.0, rel=1e-3)


def test_constants_are_found_again_in_what_the_model_says_of_small_groups():
    def row(workers):
        known = {"network": SHARED, "group": GROUP}
        messages = model.ring_messages(workers, elements=5)
        cpu_s = workers * GROUP.member_s + workers * (workers - 1) / 2 * GROUP.pair_s
        store_s = model.mesh_store_s(workers, store=STORE, batched=True)
        return {
            "workers": workers,
            "opening_ms": 1e3 * (model.connect_s(workers, **known) + store_s),
            "opening_cpu_ms": 1e3 * cpu_s,
            "small_reduction_us": 1e6 * model.ring_s(workers, elements=5, **known),
            "small_reduction_cpu_us": 1e6 * messages * GROUP.message_s,
            "copy_gb_per_s": 1.0,
        }

    groups = [row(workers) for workers in (2, 4, 8)]
    found = constants_of(
        {"service_us": {"wait": 10.0, "multi_get key": 1.0}},
        groups,
        processors=2,
        ethernet_gbit=25.0,
        ethernet_round_trip_us=50.0,
        store_gb_per_s=1.0,
    )
    assert found.group.member_s == pytest.approx(GROUP.member_s)
    assert found.group.pair_s == pytest.approx(GROUP.pair_s)
    assert found.networks[1].latency_s == pytest.approx(2e-4 + 25e-6)
    ratios = [one["predicted / measured"] for one in checks(groups, found)]
    assert ratios == pytest.approx([1.0] * 6, abs=1e-3)


def test_a_part_breaks_where_it_crosses_what_is_borne():
    rows = [
        {
            **dict.fromkeys(("regroup_ms", "of_that_store_ms", "of_that_connect_ms"), 0.1),
            "store_ms_as_gloo_does_by_default": float(workers) ** 2 / 10,
            **{"launcher_load": 0.9, "store_load": 1e-4},
            "workers": workers,
            "small_reduction_us": 100.0 * workers,
        }
        for workers in (64, 256)
    ]
    found = {row["part"]: row["workers"] for row in limits(rows)}
    assert found["small_reduction"] == 100
    assert found["store_of_regroup_by_default"] == 100
    assert found["launcher"] == 64
    assert found["store"] is None


def test_powers_are_found_again():
    assert slope([8, 64, 512], [2.0 * n**1.5 for n in (8, 64, 512)]) == pytest.approx(1.5)


class CountingStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Counts what gloo asks of it."""

    def __init__(self, values):
        super().__init__()
        self.inner, self.asked, self.written = values, Counter(), 0

    def set(self, key, value):
        self.written += len(value)
        self.inner.set(key, value)

    def get(self, key):
        self.asked["get"] += 1
        return self.inner.get(key)

    def wait(self, keys, timeout=timedelta(seconds=30)):
        self.asked["wait"] += 1
        self.inner.wait(keys, timeout)

    def check(self, keys):
        return self.inner.check(keys)

    def multi_get(self, keys):
        self.asked["multi_get"] += 1
        return self.inner.multi_get(keys)

    def has_extended_api(self):
        return True


def opened_by(num):
    """Open a gloo group of threads; return what its first member asked, and its value's bytes."""
    values = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    stores, groups = [CountingStore(values) for _ in range(num)], {}

    def open_it(rank):
        limit = timedelta(seconds=30)
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, num, limit)

    threads = [Thread(target=open_it, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == num
    return stores[0].asked, stores[0].written


def test_gloo_reads_all_addresses_one_by_one_unless_it_is_told(monkeypatch):
    for name in SHORT_ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    asked, long = opened_by(3)
    assert asked == Counter(wait=3, get=3)

    for name, value in SHORT_ADDRESSES.items():
        monkeypatch.setenv(name, value)
    asked, short = opened_by(3)
    assert asked == Counter(multi_get=1)
    assert long - short == 3 * 8


def test_a_member_that_comes_late_is_waited_for_beyond_the_time_limit_of_a_stores_client(
    monkeypatch,
):
    for name, value in SHORT_ADDRESSES.items():
        monkeypatch.setenv(name, value)
    server, groups = serve(0), {}
    clients = [connect(f"127.0.0.1:{server.port}") for _ in range(2)]
    late = Event()

    def open_it(rank):
        world = World(rank=rank, world_size=2)
        groups[rank] = open_beside(
            lambda: clients[rank], world=world, device=torch.device("cpu"), breaker=Breaker()
        )

    def open_late():
        late.wait(1.5)
        open_it(1)

    for client in clients:
        client.set_timeout(timedelta(seconds=0.5))
    threads = [Thread(target=open_it, args=(0,)), Thread(target=open_late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(groups) == {0, 1}


@pytest.mark.processes
def test_small_groups_and_the_store_are_measured():
    (row,) = measure_groups([2], rounds=1, sums=3, state_bytes=4_000_000)
    assert row["workers"] == 2
    assert all(row[name] > 0 for name in row if name.endswith(("_ms", "_us", "_s")))
    store = measure_store(rounds=1, operations=2)
    assert set(store["round_trip_us"]) == {"set", "get", "add", "wait"}
    assert set(store["service_us"]) == {*store["round_trip_us"], "multi_get key", "wake"}


def test_the_command_makes_a_row_for_each_network_and_number_of_workers(monkeypatch, tmp_path):
    found = {
        "processors": 2,
        "load_before": 0.0,
        "vector_length": 5,
        "store": {
            "clients": 50,
            "round_trip_us": {"set": 100.0},
            "service_us": {"wait": 10.0, "multi_get key": 1.0},
        },
        "groups": [
            {
                "workers": workers,
                "opening_ms": 10.0 * workers,
                "opening_by_default_ms": 11.0 * workers,
                "opening_cpu_ms": 4.0 * workers,
                "small_reduction_us": 200.0 * workers,
                "small_reduction_cpu_us": 200.0 * workers,
                "copy_gb_per_s": 1.0,
            }
            for workers in (2, 4)
        ],
    }
    monkeypatch.setattr(scale, "measured", lambda *, quick: found | {"quick": quick})
    path = tmp_path / "scale.json"

    outcome = CliRunner().invoke(scale.main, ["--quick", "--json", str(path)])

    assert outcome.exit_code == 0, outcome.output
    result = json.loads(path.read_text())
    places = [(row["network"], row["workers"]) for row in result["rows"]]
    assert places == [
        *(("loopback", n) for n in (8, 64)),
        *(("25 Gbit/s Ethernet", n) for n in (8, 64)),
    ]
    keys = "workers network small_reduction_us regroup_ms transfer_ms decision_ms store_ops_per_s"
    assert set(keys.split()) <= set(result["rows"][0])
    text = page(path)
    assert text.count("\n## ") == 5
    assert "decisions with 64 workers" in text
    draw_scale(result["rows"], path=tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_every_part_that_may_break_has_its_words():
    assert set(_PARTS) == set(_LIMITS)


def test_the_page_is_what_the_committed_result_says():
    assert PAGE.read_text() == page(RESULT)


def test_without_a_result_the_page_says_how_to_get_it(tmp_path):
    assert "Not measured yet: `python -m benchmarks.scale " in page(tmp_path / "none.json")
