"""Writes the page on scale, out of the committed result of the benchmark.

    python -m benchmarks.scale.page

Knows the result's JSON and Markdown; measures nothing, and has no number of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.elastic_page import RESULTS, ROOT, table
from benchmarks.scale.picture import draw_scale

__all__ = ["PAGE", "PICTURE", "RESULT", "main", "page"]

RESULT = RESULTS / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
PICTURE = ROOT / "docs" / "_static" / "scale.png"

Row = Mapping[str, Any]
_HEAD = (
    "# Scale, on paper and by simulation\n\n"
    "This page is written by `python -m benchmarks.scale.page` out of `benchmarks/results`. "
    "Nothing here was run on more machines than one. The launcher's decisions are those of its own "
    "code, which ran with every number of workers over a store in memory, without processes. The "
    "rest are formulas (`benchmarks/scale/model.py`) of constants that were measured on one "
    "machine, so read them to one digit, and as an order of magnitude for networks."
)
_COMMAND = "`python -m benchmarks.scale --json benchmarks/results/scale.json`"
_MOST_SHOWN = 1000
_PARTS = {
    "small_reduction": (
        "a step's small sum, ms",
        "gloo sums in a ring whatever the size, so DDP's buckets wait for as many hops. Groups of "
        "GPUs are nccl's, which sums small vectors in trees. On CPUs a sum inside each machine "
        "first, and then of one worker a machine, would divide the hops by the slots of a machine.",
    ),
    "store_of_regroup_by_default": (
        "the store's part of a regroup as gloo does it by itself, ms",
        "`GLOO_ENABLE_STORE_V2_API=1` and `GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER=1` in the "
        "environment of `elastane run`, on all machines alike, have gloo read the others' "
        "addresses many at a time, and short ones: the row below. elastane does not set them.",
    ),
    "store_of_regroup": (
        "the store's part of a regroup with short addresses, ms",
        "Still each of N members reads N addresses. A member needs only its neighbours in the "
        "ring: `TORCH_GLOO_LAZY_INIT=1` connects when it first sends, but breaking a group that "
        "blocks relies on knowing its sockets, so elastane does not use it yet.",
    ),
    "connect": (
        "connecting the full mesh, ms",
        "As above: connections to neighbours only, or a group of one worker a machine.",
    ),
    "regroup": (
        "a whole regroup without copying state, with short addresses, ms",
        "Its largest part decides: see there.",
    ),
    "launcher": (
        "the launcher's share of one processor",
        "Beats through the agents, one message a machine and look; or rarer beats, since hangs are "
        "told in seconds.",
    ),
    "store": (
        "the load of the store's one thread",
        "As for the launcher: beats through the agents leave one in eight of the messages.",
    ),
}


def page(result: Path) -> str:
    """Return the page made of a result, or of what is to be done to have one."""
    if not result.exists():
        return f"{_HEAD}\n\nNot measured yet: {_COMMAND}\n"
    found = json.loads(result.read_text())
    sections = (_measured, _predicted, _breaking, _decided, _checked)
    return "\n\n".join([_HEAD, *(section(found) for section in sections)]) + "\n"


def _measured(found: Row) -> str:
    measured, assumed = found["measured"], found["assumed"]
    store = measured["store"]
    rows = [
        [f"store: {kind}, one client's round trip, us", value]
        for kind, value in store["round_trip_us"].items()
    ]
    rows += [
        [f"store: {kind}, its thread's time with {store['clients']} clients, us", value]
        for kind, value in store["service_us"].items()
    ]
    names = {
        "opening_ms": "opening a group of {}, ms",
        "opening_by_default_ms": "the same as gloo does it by itself, ms",
        "small_reduction_us": "a small sum of {}, us",
    }
    rows += [
        [text.format(one["workers"]), one[name]]
        for one in measured["groups"]
        for name, text in names.items()
    ]
    rows.append(["copying a state, GB/s", measured["groups"][0]["copy_gb_per_s"]])
    return "\n\n".join(
        [
            "## What was measured",
            f"{_COMMAND}, on {measured['processors']} processors with a load of "
            f"{measured['load_before']} from other programs before it began: above 0.5 or so, wall "
            f"times are too long. The network is assumed: {assumed['ethernet_gbit']:g} Gbit/s, "
            f"round trips of {assumed['ethernet_round_trip_us']:g} us, as is the store's "
            f"{assumed['store_gb_per_s']:g} GB/s for long values.",
            table(["", "median"], rows),
        ]
    )


def _predicted(found: Row) -> str:
    head = ["workers", "small sum, us", "by a tree, us", "regroup, ms", "of that decision"]
    head += ["store", "connecting", "standings", "10M state, ms", "1B state, ms", "store, 1/s"]
    names = ("small_reduction_us", "of_a_tree_us", "regroup_ms", "of_that_decision_ms")
    names += ("of_that_store_ms", "of_that_connect_ms", "of_that_standings_ms")
    parts = [
        "## What a job of so many workers would cost",
        "A regroup is from the word of a death to the new group, without copying state: a state "
        "is copied to newcomers only, here to one. On one machine all workers share its "
        "processors and its memory; on the network each has its own. A state has momentum.",
    ]
    for network in _networks(found):
        rows = [
            [
                row["workers"],
                *(_short(row[name]) for name in names),
                *(_short(ms) for ms in row["transfer_ms"].values()),
                row["store_ops_per_s"],
            ]
            for row in found["rows"]
            if row["network"] == network
        ]
        parts += [f"**{network}**", table(head, rows)]
    parts.append("![Small sums, parts of a regroup and loads over workers](_static/scale.png)")
    return "\n\n".join(parts)


def _breaking(found: Row) -> str:
    networks = _networks(found)
    rows = []
    for part, (what, remedy) in _PARTS.items():
        at = [_limit(found["limits"][network], part) for network in networks]
        borne = at[0]["borne"]
        shown = ["none of these" if one["workers"] is None else one["workers"] for one in at]
        rows.append([what, f"{borne:g}", *shown, remedy])
    return "\n\n".join(
        [
            "## Where it breaks first, and what then",
            "The number of workers at which a part costs more than what is borne here.",
            table(["part", "borne", *networks, "what then"], rows),
        ]
    )


def _decided(found: Row) -> str:
    shown = max(n for row in found["decisions"] if (n := row["workers"]) <= _MOST_SHOWN)
    growth = {row["change"]: row for row in found["growth"]}
    rows = [
        [
            row["change"],
            _short(row["decide_ms"]),
            growth.get(row["change"], {}).get("decide_ms", "-"),
            _short(row["settle_ms"]),
            growth.get(row["change"], {}).get("settle_ms", "-"),
            row["generation_bytes"],
            row["store_round_trips"],
            row["store_bytes"],
        ]
        for row in found["decisions"]
        if row["workers"] == shown and row["change"] != "none"
    ]
    idle = next(
        row for row in found["decisions"] if row["workers"] == shown and row["change"] == "none"
    )
    head = ["change", "decided, ms", "grows as N^", "all in, ms", "grows as N^"]
    head += ["generation, bytes", "store requests", "store bytes"]
    return "\n\n".join(
        [
            f"## The launcher's decisions with {shown} workers",
            "Processor time of the launcher until the new generation is published, and from then "
            "until it knows that all members have entered; the requests are the launcher's.",
            table(head, rows),
            f"While nothing changes a look at all beats takes {idle['look_ms']} ms and "
            f"{idle['store_round_trips']} requests for {idle['store_keys']} keys, and deciding "
            f"that nothing is to be done {idle['act_ms']} ms: {100 * idle['load']:.1f} % of a "
            "processor.",
        ]
    )


def _checked(found: Row) -> str:
    names = ("workers", "what", "predicted", "measured", "predicted / measured")
    rows = [[row[name] for name in names] for row in found["checks"]]
    return "\n\n".join(
        [
            "## How far the model can be believed",
            "The groups that were measured, by the model of one machine. The two smallest gave it "
            "its constants, so only the others test it.",
            table(names, rows),
        ]
    )


def _limit(rows: Sequence[Row], part: str) -> Row:
    return next(row for row in rows if row["part"] == part)


def _networks(found: Row) -> list[str]:
    return list(dict.fromkeys(row["network"] for row in found["rows"]))


def _short(value: float) -> str:
    """Return a number to three digits."""
    return f"{float(f'{value:.3g}'):g}"


@click.command()
def main() -> None:
    """Write the page and its picture."""
    PAGE.write_text(page(RESULT))
    if RESULT.exists():
        draw_scale(json.loads(RESULT.read_text())["rows"], path=PICTURE)


if __name__ == "__main__":
    main()
