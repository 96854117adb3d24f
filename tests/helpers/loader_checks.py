"""What loaders must do when ranks die, leave or resume."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.data import DataLoader

from bascule.data.loader import BalancedLoader
from bascule.data.samplers import ResumableSampler
from bascule.data.steps import Batch
from tests.helpers.loader_cases import TIMEOUT_S, endless, heard_by, loader_of
from tests.helpers.ranks import run_ranks, run_to_the_end

Heard = tuple[list[str], str]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(place: str, seed: int) -> Heard:
    rank, world = dist.get_rank(), dist.get_world_size()
    victim = seed % world
    draw = random.Random(seed)
    when = draw.randrange(1, 6)
    moment = draw.uniform(0.0, 0.2)

    def load() -> Iterator[list[dict[str, Any]]]:
        for k, group in enumerate(endless(rank)):
            if rank == victim and place == "loading" and k == when:
                die()
            time.sleep(0.002)
            yield [{**sample, "big": torch.zeros(20_000)} for sample in group * 3]

    def run() -> None:
        for batch in loader_of(load(), timeout_s=3.0):
            if rank == victim and place == "any moment" and batch.step == 0:
                threading.Timer(moment, die).start()
            if rank == victim and place == "between steps" and batch.step == when:
                die()

    return heard_by(run)


PLACES = ("loading", "between steps", "any moment")


def check_deaths(place: str, seed: int, num_ranks: int) -> None:
    outcomes = run_to_the_end(dying, num_ranks, place, seed)
    victim = seed % num_ranks
    assert outcomes[victim].exit_code == -signal.SIGKILL, outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error is None, outcome.error
        classes, text = outcome.value
        assert "CommError" in classes, text
        assert "group 'loader'" in text and text.startswith("step "), text
        # A rank that only times out later than the others may be missing for them, too.
        missing = re.search(r"no report from ranks \[([\d, ]+)\]", text)
        assert missing and str(victim) in missing[1].split(", "), text


def tell(key: str) -> None:
    _get_default_store().set(f"test/{key}", "")


def await_word(key: str) -> None:
    """What stands for a collective of the model, in which ranks wait for each other."""
    _get_default_store().wait([f"test/{key}"], timedelta(seconds=500))


State = dict[str, Any]

Delivered = list[tuple[tuple[int, int, int], list[int]]]


def numbers(size: int) -> Any:
    """A dataset of samples of unlike lengths."""
    return [{"id": k, "input_ids": torch.zeros(1 + k * 7919 % 50).long()} for k in range(size)]


def balanced(inner: Any, group: Any, **settings: Any) -> BalancedLoader:
    given: dict[str, Any] = {"mesh_or_group": group, "ends": "finish", "timeout_s": TIMEOUT_S}
    return loader_of(inner, **given | settings)


def over(
    size: int, group: Any, *, batch_size: int, num_workers: int = 0, **settings: Any
) -> BalancedLoader:
    """The dataset, dealt over the ranks of a group."""
    sampler = ResumableSampler(
        size, rank=dist.get_rank(group), num_ranks=dist.get_world_size(group)
    )
    inner: DataLoader[Any] = DataLoader(
        numbers(size), batch_size, sampler=sampler, num_workers=num_workers, collate_fn=list
    )
    return balanced(inner, group, **settings)


def ids_of(batch: Batch) -> list[int]:
    return [] if batch.is_padding else [int(sample["id"]) for sample in batch.data or []]


def run(loader: BalancedLoader, stop: int | None = None) -> tuple[Delivered, list[State]]:
    """What is delivered up to a microbatch, and the state before and after each."""
    delivered: Delivered = []
    states = [loader.state_dict()]
    if stop == 0:
        return delivered, states
    for batch in loader:
        delivered.append(((batch.epoch, batch.step, batch.microbatch), ids_of(batch)))
        states.append(loader.state_dict())
        if len(delivered) == stop:
            break
    return delivered, states


def flat(delivered: Delivered) -> list[int]:
    return [i for _, ids in delivered for i in ids]


def one_round(runs: list[tuple[int, State | None, int]], turn: int) -> list[Any]:
    """Of each run that is not over: this rank's ids, the state, and whether it is over."""
    told = []
    for size, state, seed in runs:
        draw = random.Random(100 * seed + turn)
        settings = {"batch_size": draw.randint(1, 4), "accumulate": draw.randint(1, 3)}
        loader = over(size, None, **settings)
        if state is not None:
            loader.load_state_dict(state)
        delivered, states = run(loader, draw.randint(0, 3) if turn < 4 else None)
        told.append((flat(delivered), states[-1], loader.state_dict()["epoch"] == 1))
    return told


def check_chains(seeds: range) -> int:
    """Epochs stopped at random again and again, on another number of ranks each time."""
    seen: dict[int, list[int]] = {seed: [] for seed in seeds}
    runs = [(5 + 9 * (seed % 6), None, seed) for seed in seeds]
    num_stops = 0
    for turn, num_ranks in enumerate((2, 3, 1, 4, 2)):
        results = run_ranks(one_round, num_ranks, runs, turn)
        left = []
        for (size, _, seed), of_rank in zip(runs, zip(*results, strict=True), strict=True):
            seen[seed] += [i for ids, _, _ in of_rank for i in ids]
            assert len({str(state) for _, state, _ in of_rank}) == 1
            if not of_rank[0][2]:
                left.append((size, of_rank[0][1], seed))
        runs = left
        num_stops += len(left)
    assert not runs
    for seed in seeds:
        assert sorted(seen[seed]) == list(range(5 + 9 * (seed % 6))), seed
    return num_stops
