"""Compare with the policies of other libraries."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from measuring import met

from baselines.cases import DATA, LONG, Case, Row, score
from baselines.masks import mask_rows
from baselines.policies import accumulated, bags, equal_counts, grouped, padded, whole
from baselines.ranks import measure

WORLDS = (8, 64, 256, 1024)
GROUPED_WORLDS = (8, 64)
NUM_STEPS = 20
EQUAL = 1.001
"""Makespans within this ratio are equal."""

BUSY = 1.5
"""Load average above which measured times are not kept."""


def baselines(*, jobs: int = 1, run: bool = True, quick: bool = False) -> dict[str, Any]:
    """Compare with the policies of other libraries on the same lengths and with the same cost.

    Twelve minutes. Decided, on 8 to 1,024 ranks, for photos, data codes, texts, images and videos:

    - whole samples: one step a global batch, ranks may have unlike numbers of samples;
    - equal counts: all ranks have as many samples;
    - padded: a batch costs its number of samples times its longest;
    - padded, accumulated: the same in steps of 8 microbatches;
    - bags: ranks may share a sequence; seconds on nodes of 8 ranks, wires and launches included;
    - groups: microbatches of Megatron's dynamic context parallelism, on 8 and 64 ranks, data codes,
      the mixture and long texts; a rank holds a half or an eighth of the longest sequence;
    - one sequence: pairs of a query and a key on each rank, of causal and of document masks.

    Makespan is over what no division of the same samples can beat, the median of twenty global
    batches. "useful" is the work of the samples over what all ranks could have done meanwhile:
    policies that choose which samples make a step can win there. Megatron's schedulers get the
    token limit and the group size, of a few, that suit them best. Run, on two ranks: forward and
    backward of one small transformer, in turns, for each policy.

    Args:
        jobs: Processes that decide; planning times mean more with one.
        run: Run the two ranks, too.
        quick: 8 ranks and few steps.
    """
    load = os.getloadavg()
    is_busy = load[0] > BUSY
    measured = measure(2 if quick else 8) if run else {}
    worlds, num_steps = (WORLDS[:1], 5) if quick else (WORLDS, NUM_STEPS)
    of_groups = [world for world in GROUPED_WORLDS if world in worlds]
    cases = [*product(DATA, worlds), *product([LONG], of_groups)]
    rows = decide_all(cases, num_steps, jobs)
    masks = mask_rows(8 if quick else 20)
    for row in rows:
        shares = ("padding", "dropped", "repeated", "reordered", "moved")
        print(
            f"{'first' if row.first else '     '}  {row.data}, {row.ranks} ranks, {row.kind}, "
            f"{row.policy}: {row.over_bound:.4f} ({row.over_bound_worst:.4f} at most), useful "
            f"{row.useful:.1%}, {row.plan_ms:.2f} ms"
            + "".join(f", {one} {getattr(row, one):.1%}" for one in shares if getattr(row, one))
            + (
                f", {row.microbatches:.0f} microbatches, without limit {row.over_free:.4f}"
                if row.over_free
                else ""
            )
        )
    for row in masks:
        print(
            f"{'first' if row['first'] else '     '}  {row['mask']}, {row['ranks']} ranks, "
            f"{row['policy']}: most over mean {row['over_mean']:.4f}, padding {row['padding']:.2%}"
        )
    for data, of_data in measured.items():
        for name, row in of_data.items():
            print(
                f"{data}, {name}: {row['ratio']:.3f} of nothing (predicted {row['predicted']:.3f})"
            )
    ours, theirs = (
        [row for row in rows if row.over_free and row.is_ours is own] for own in (True, False)
    )
    most = max(row.over_bound for row in ours)
    slower = max(own.plan_ms / their.plan_ms for own, their in zip(ours, theirs, strict=True))
    print(f"{met(most <= 1.03)}  groups: at most {most:.3f} of the bound under their rules")
    print(f"{met(slower <= 2.0)}  groups: plan time at most {slower:.2f} of DynamicCP's")
    kept = mark_first([replace(row) for row in rows if not row.reordered])
    for who, lost in (
        ("those that keep the samples of each step", beaten(kept, masks)),
        ("all", beaten(rows, masks)),
    ):
        print(f"{met(not lost)}  first or equal in makespan among {who}; not in: {lost}")
    return {
        "load_average_before": load,
        "rows": [asdict(row) for row in rows],
        "masks": masks,
        "steps": num_steps,
        "jobs": jobs,
        "measured": {} if is_busy else measured,
        "measured_note": f"busy: {is_busy}" if run else "not run",
    }


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
    makes = [] if data == LONG else [whole, equal_counts, padded, accumulated, bags]
    if data != DATA[0] and num_ranks in GROUPED_WORLDS:
        makes.append(grouped)
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
