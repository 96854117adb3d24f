"""The baselines that live now, on the same lengths and with the same cost.

Run: `python benchmarks/bench_baselines.py` (about ten minutes; `--quick`: one or two, writes
nothing); writes results/baselines.json.

Decided, on 8 to 1,024 ranks, for photos, data codes, and a mix of texts, images and videos:

- whole samples: one step a global batch, ranks may have unlike numbers of samples;
- equal counts: all ranks have as many samples;
- padded: a batch costs its number of samples times its longest;
- padded, accumulated: the same in steps of 8 microbatches;
- bags: ranks may share a sequence; seconds on nodes of 8 ranks, wires and launches included;
- one sequence: pairs of a query and a key on each rank, of causal and of document masks.

Makespan is over what no division of the same samples can beat (whole samples without padding, or
shared ones without wires), the median of twenty global batches. "Useful" is the work of the samples
over what all ranks could have done meanwhile: policies that choose which samples make a step can
win there. Ours must be first or equal in makespan in every kind and case, or else the exit status
is 1; another line says it of those that keep the samples of each step. One bucket a step does not:
its own steps have little to even out, so where batches are padded it is often ahead, also of what
no division of the steps as they are could beat. Megatron's schedulers get the token limit and the
group size, of a few, that suit them best.

Run, on two ranks: forward and backward of one small transformer, in turns, for each policy.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from _baseline_cases import DATA, Case, Row, score
from _baseline_masks import mask_rows
from _baseline_policies import accumulated, bags, equal_counts, padded, whole
from _baseline_ranks import measure
from _common import write_results
from rich.console import Console
from rich.table import Table

WORLDS = (8, 64, 256, 1024)
NUM_STEPS = 20
EQUAL = 1.001
"""Makespans within this ratio are equal."""

BUSY = 1.5
"""Load average above which measured times are not kept."""


def main() -> None:
    """Decide, run, print, write; exits with 1 where ours is not first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks, few steps; writes nothing")
    parser.add_argument("--no-run", action="store_true", help="do not run the two ranks")
    parser.add_argument("--jobs", type=int, default=1, help="processes that decide")
    options = parser.parse_args()
    console = Console(width=170)
    load = os.getloadavg()
    is_busy = load[0] > BUSY
    measured = {} if options.no_run else measure(2 if options.quick else 8)  # on idle cores
    worlds, num_steps = (WORLDS[:1], 5) if options.quick else (WORLDS, NUM_STEPS)
    rows = decide_all(list(product(DATA, worlds)), num_steps, options.jobs)
    masks = mask_rows(8 if options.quick else 20)
    for data in DATA:
        console.print(decided_table(data, [row for row in rows if row.data == data]))
    console.print(mask_table(masks))
    print_measured(console, measured, is_busy=is_busy)
    if not options.quick:
        found: dict[str, Any] = {
            "load_average_before": load,
            "rows": [asdict(row) for row in rows],
            "masks": masks,
            "steps": num_steps,
            "jobs": options.jobs,
            "measured": {} if is_busy else measured,
            "measured_note": "not run" if options.no_run else f"busy: {is_busy}",
            "command": " ".join(["python", *sys.argv]),
        }
        print("written:", write_results("baselines", found))
    sys.exit(verdict(rows, masks))


# --- decided ------------------------------------------------------------------------------------


def decide_all(cases: list[tuple[str, int]], num_steps: int, jobs: int) -> list[Row]:
    """All cases, those of most ranks first; planning times mean more with one job."""
    order = sorted(cases, key=lambda case: -case[1])
    found: dict[tuple[str, int], list[Row]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(decide, *case, num_steps): case for case in order}
        for task in as_completed(tasks):
            found[tasks[task]] = task.result()
            print("decided: {}, {} ranks".format(*tasks[task]), flush=True)
    return mark_first([row for case in cases for row in found[case]])


def decide(data: str, num_ranks: int, num_steps: int) -> list[Row]:
    """All policies on one epoch."""
    torch.set_num_threads(1)
    case = Case.draw(data, num_ranks)
    makes = (whole, equal_counts, padded, accumulated, bags)
    return [score(case, policy, num_steps) for make in makes for policy in make(case, num_steps)]


# --- who is first -------------------------------------------------------------------------------


def mark_first(rows: list[Row]) -> list[Row]:
    """Mark the least makespan of each case and kind, and all that equal it."""
    least: dict[tuple[str, int, str], float] = {}
    for row in rows:
        least[row.group] = min(row.over_bound, least.get(row.group, row.over_bound))
    for row in rows:
        row.first = row.over_bound <= least[row.group] * EQUAL
    return rows


def beaten(rows: Sequence[Row], masks: Sequence[dict[str, Any]]) -> list[str]:
    """Where none of ours is first."""
    ours = {row.group: False for row in rows}
    for row in rows:
        ours[row.group] |= row.first and row.is_ours
    lost = [
        f"{data}, {ranks} ranks, {kind}" for (data, ranks, kind), won in ours.items() if not won
    ]
    of_masks = {(row["mask"], row["ranks"]): False for row in masks}
    for row in masks:
        of_masks[row["mask"], row["ranks"]] |= row["first"] and row["is_ours"]
    return lost + [f"{mask}, {ranks} ranks" for (mask, ranks), won in of_masks.items() if not won]


def verdict(rows: Sequence[Row], masks: Sequence[dict[str, Any]]) -> int:
    """Print where ours is not first, among all and among who keeps the samples of each step."""
    kept = mark_first([replace(row) for row in rows if not row.reordered])
    for who, lost in (
        ("those that keep the samples of each step", beaten(kept, masks)),
        ("all", found := beaten(rows, masks)),
    ):
        print("MISSED" if lost else "met   ", f"first or equal in makespan among {who}", end="")
        print(f", but not in {len(lost)}: {'; '.join(lost)}" if lost else "")
    return 1 if found else 0


# --- tables -------------------------------------------------------------------------------------

HEADS = (
    *("ranks", "kind", "policy", "over bound", "worst", "useful", "plan ms"),
    *("padding", "dropped", "repeated", "reordered", "moved", ""),
)


def decided_table(data: str, rows: Sequence[Row]) -> Table:
    table = Table(*HEADS, title=f"{data}: makespan over the bound, shares of an epoch or of tokens")
    kind = ""
    for row in rows:
        if row.kind != kind:
            table.add_section()
        kind = row.kind
        shares = (row.padding, row.dropped, row.repeated, row.reordered, row.moved)
        table.add_row(
            str(row.ranks),
            row.kind,
            ("* " if row.is_ours else "") + row.policy,
            f"{row.over_bound:.4f}",
            f"{row.over_bound_worst:.4f}",
            f"{row.useful:.1%}",
            f"{row.plan_ms:.2f}",
            *("-" if share == 0 else f"{share:.1%}" for share in shares),
            "first" if row.first else "",
        )
    return table


def mask_table(rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("mask", "ranks", "policy", "most over mean", "worst", "padding", "")
    table = Table(*heads, title="One sequence of 65,536 tokens: pairs of the rank with most")
    for row in rows:
        table.add_row(
            row["mask"],
            str(row["ranks"]),
            ("* " if row["is_ours"] else "") + row["policy"],
            f"{row['over_mean']:.4f}",
            f"{row['over_mean_worst']:.4f}",
            f"{row['padding']:.2%}",
            "first" if row["first"] else "",
        )
    return table


def print_measured(console: Console, measured: dict[str, Any], *, is_busy: bool) -> None:
    """What two ranks took, and whether it counts."""
    for data, found in measured.items():
        table = Table("policy", "time of the same work, over nothing", "predicted", title=data)
        for name, row in found.items():
            table.add_row(name, f"{row['ratio']:.3f}", f"{row['predicted']:.3f}")
        console.print(table)
    if measured and is_busy:
        print(f"the machine was busy (load average above {BUSY}): measured times are not kept")


if __name__ == "__main__":
    main()
