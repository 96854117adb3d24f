"""Samples, schedules and runs of balanced loaders that the tests of the loader share.

A sample is made of its id and its length alone, so whoever gets it can check it bit for bit.
"""

import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import Batch, Ends
from bascule.machine.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.plan import Sync
from tests.helpers.ranks import raised_by, run_ranks

COST = TransformerCost(64)
TIMEOUT_S = 100.0
FAST = 1e12
"""Bytes per second with which no exchange is too dear; also spares the measurement."""

PER_RANK = 100_000
"""Ids of a rank's samples begin at its multiple of this."""

Groups = list[list[tuple[int, int]]]
"""Microbatches of one rank, as (id, length) of each sample."""


def sample_of(sample_id: int, length: int) -> dict[str, Any]:
    """Every kind of value; zero to three images, or no image fields at all."""
    generator = torch.Generator().manual_seed(sample_id)
    sample: dict[str, Any] = {
        "id": torch.tensor(sample_id),
        "input_ids": torch.randint(0, 50, (length,), generator=generator),
        "text": f"sample {sample_id} \N{HEAVY BLACK HEART} \0",
        "meta": {"weights": [0.5, float(sample_id)], "none": None, "pair": (sample_id, True)},
        "array": np.arange(sample_id % 4, dtype=np.float32)[:, None],
    }
    num_images = sample_id % 5 - 1
    if num_images >= 0:
        sizes = [1 + (sample_id + k) % 3 for k in range(num_images)]
        grids = [[1, size, 2] for size in sizes]
        sample["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
        patches = torch.rand(2 * sum(sizes), 3, generator=generator)
        sample["pixel_values"] = patches.to(torch.bfloat16)
    return sample


def same(first: Any, second: Any) -> bool:
    """Equal in type, dtype, shape and every bit, at every depth."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return (first.dtype, first.shape, first.requires_grad) == (
            second.dtype,
            second.shape,
            second.requires_grad,
        ) and bits_of(first).equal(bits_of(second))
    if isinstance(first, np.ndarray | np.generic):
        return (
            (first.dtype, first.dtype.char, first.shape)
            == (second.dtype, second.dtype.char, second.shape)
            and first.tobytes() == second.tobytes()
            and str(first) == str(second)  # zeros at the end of a string are in no byte of it
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second)


def bits_of(tensor: Tensor) -> Tensor:
    """Its values as bytes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank loads, and how.

    Attributes:
        lens: Of each rank, the token counts in each of its lists; None on a rank that only
            computes.
        batch_size: Samples are streamed and grouped by this number; None keeps the lists.
    """

    lens: tuple[tuple[tuple[int, ...], ...] | None, ...]
    ends: Ends = "finish"
    sync: Sync = "microbatch"
    accumulate: int = 1
    prefetch: int = 2
    batch_size: int | None = None
    limits: Limits | None = None

    @classmethod
    def draw(cls, seed: int, num_ranks: int) -> "Schedule":
        """Unlike numbers of microbatches and samples, sometimes none, sometimes one giant."""
        draw = random.Random(f"{seed} {num_ranks}")
        giant = draw.random() < 0.2

        def microbatch() -> tuple[int, ...]:
            lens = [int(draw.lognormvariate(3.0, 1.2)) for _ in range(draw.choice((0, 1, 2, 2, 4)))]
            return tuple([*lens, 2000] if giant and draw.random() < 0.1 else lens)

        ranks = [
            None
            if draw.random() < 0.15
            else tuple(microbatch() for _ in range(draw.choice(COUNTS)))
            for _ in range(num_ranks)
        ]
        if all(lens is None for lens in ranks):
            ranks[0] = ((3, 1), (2,))
        schedule = cls(
            tuple(ranks),
            ends=draw.choice(("drop_last", "pad_empty", "finish")),
            sync=draw.choice(("microbatch", "step")),
            accumulate=draw.choice((1, 1, 2, 3)),
            prefetch=draw.choice((1, 2, 8)),
            batch_size=draw.choice((None, None, 1, 2, 3)),
        )
        # Limits that the batch as loaded keeps, so that no schedule is refused.
        groups = [group for rank in range(num_ranks) for group in schedule.microbatches(rank)]
        items = max([1, *map(len, groups)])
        tokens = max([1, *(sum(length for _, length in group) for group in groups)])
        return replace(
            schedule, limits=draw.choice((None, None, Limits(items=items), Limits(tokens, items)))
        )

    def lists(self, rank: int) -> Groups | None:
        """What the loader of a rank gives."""
        lens = self.lens[rank]
        if lens is None:
            return None
        ids = iter(range(PER_RANK * rank, PER_RANK * (rank + 1)))
        return [[(next(ids), length) for length in group] for group in lens]

    def lengths(self) -> dict[int, int]:
        """Of each sample that any rank has."""
        ranks = range(len(self.lens))
        return {i: n for rank in ranks for group in self.lists(rank) or () for i, n in group}

    def microbatches(self, rank: int) -> Groups:
        """The same, grouped as the balanced loader does."""
        lists = self.lists(rank) or []
        if self.batch_size is None:
            return lists
        flat = iter([one for group in lists for one in group])
        return list(iter(lambda: list(islice(flat, self.batch_size)), []))

    def steps(self) -> list[list[list[list[tuple[int, int]]]]]:
        """By step, microbatch and rank: what was loaded for it, so what is delivered in it."""
        of_rank = [self.microbatches(rank) for rank in range(len(self.lens))]
        counts = [len(m) for m, lens in zip(of_rank, self.lens, strict=True) if lens is not None]
        full, every = min(counts) // self.accumulate, -(-max(counts) // self.accumulate)
        steps = []
        for step in range(full if self.ends == "drop_last" else every):
            micros = range(step * self.accumulate, (step + 1) * self.accumulate)
            steps.append([[m[k] if k < len(m) else [] for m in of_rank] for k in micros])
        return steps


COUNTS = (0, 1, 3, 5, 6)


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank noted about one microbatch."""

    key: tuple[int, int, int]
    ids: list[int]
    loss_scale: float
    is_padding: bool
    reason: str


def loader_with(samples: Any, **settings: Any) -> BalancedLoader:
    """A loader of whose settings each goes where it belongs: to the arguments, or the options."""
    names = LoaderOptions.__dataclass_fields__.keys() & settings.keys()
    options = LoaderOptions(**{name: settings.pop(name) for name in names})
    return BalancedLoader(samples, **{"options": options, **settings})


def loader_of(samples: Any, **settings: Any) -> BalancedLoader:
    """A loader that moves whatever helps, and gives lists of samples."""
    given: dict[str, Any] = {"cost": COST, "min_gain": 0.0, "bytes_per_s": FAST}
    return loader_with(samples, **{**given, "collate_fn": list, **settings})


def run_schedule(schedule: Schedule, delays: int) -> list[Record]:
    """On every rank: iterate, check each sample's bits and `restore`; what was delivered."""
    rank = dist.get_rank()
    draw = random.Random(f"{delays} {rank}")
    slow = draw.choice((0.0, 0.0, 0.002, 0.004))
    lists, own = schedule.lists(rank), schedule.microbatches(rank)

    def load() -> Iterator[Any]:
        for group in lists or []:
            time.sleep(slow * draw.random())
            made = [sample_of(*one) for one in group]
            if schedule.batch_size is None:
                yield made
            else:
                yield from made

    lens = schedule.lengths()
    records = []
    loader = loader_of(
        None if lists is None else load(),
        accumulate=schedule.accumulate,
        sync=schedule.sync,
        batch_size=schedule.batch_size,
        limits=schedule.limits,
        ends=schedule.ends,
        prefetch=schedule.prefetch,
        timeout_s=TIMEOUT_S,
    )
    eager = random.Random(~delays * 7 + rank).choice((0.0, 0.003, 0.006))
    with loader:
        for batch in loader:
            time.sleep(eager * draw.random())
            records.append(note(batch))
            for sample in batch.data or []:
                sample_id = int(sample["id"])
                assert same(sample, sample_of(sample_id, lens[sample_id])), sample
            place = batch.step * schedule.accumulate + batch.microbatch
            check_restore(batch, own[place] if place < len(own) else [])
    assert not loader_threads()
    return records


def note(batch: Batch) -> Record:
    samples = batch.data or []
    assert batch.num_samples == len(samples) - batch.is_padding
    assert batch.plan.num_ranks >= 1
    return Record(
        key=(batch.epoch, batch.step, batch.microbatch),
        ids=[int(sample["id"]) for sample in samples],
        loss_scale=batch.loss_scale,
        is_padding=batch.is_padding,
        reason=batch.verdict.reason,
    )


def check_restore(batch: Batch, own: Sequence[tuple[int, int]]) -> None:
    """Values of several dims come back in the order in which this rank loaded the samples."""
    ids = torch.tensor([float(s["id"]) for s in batch.data or []], dtype=torch.float64)
    back = batch.restore(ids[:, None, None] * torch.tensor([[1.0, 2.0, 0.5]]).double())
    expected = torch.tensor([float(i) for i, _ in own], dtype=torch.float64)
    assert torch.equal(back[:, 0, 0], expected), (batch.step, batch.microbatch, back, expected)
    assert torch.equal(back[:, 0], expected[:, None] * torch.tensor([1.0, 2.0, 0.5]))


def run_many(schedules: Sequence[tuple[int, Schedule]]) -> list[list[Record]]:
    """Each schedule twice, with other delays: the same, in the same order."""
    of_schedule = []
    for seed, schedule in schedules:
        first = run_schedule(schedule, 2 * seed)
        again = run_schedule(schedule, 2 * seed + 1)
        assert first == again, (seed, schedule)
        of_schedule.append(first)
    return of_schedule


def check_schedules(schedules: Sequence[tuple[int, Schedule]], num_ranks: int) -> list[Record]:
    """Exactly once, the same in the same order with other delays, and with the mean of all."""
    of_rank = run_ranks(run_many, num_ranks, schedules)
    for k, (_, schedule) in enumerate(schedules):
        records = [runs[k] for runs in of_rank]
        check_exactly_once(schedule, records)
        check_mean(schedule, records)
    return [record for runs in of_rank for run in runs for record in run]


def check_exactly_once(schedule: Schedule, of_rank: Sequence[list[Record]]) -> None:
    """Every sample that a step loaded is delivered in its microbatch, on one rank."""
    num_ranks, steps = len(of_rank), schedule.steps()
    keys = [(0, s, m) for s in range(len(steps)) for m in range(schedule.accumulate)]
    for records in of_rank:
        assert [record.key for record in records] == keys, schedule
    for place, (_, step, micro) in enumerate(keys):
        here = [records[place] for records in of_rank]
        loaded = [i for group in steps[step][micro] for i, _ in group]
        in_step = {i for groups in steps[step] for group in groups for i, _ in group}
        real = [i for record in here if not record.is_padding for i in record.ids]
        assert Counter(real) == Counter(loaded), schedule
        for record in here:
            if record.is_padding:
                assert schedule.ends != "finish" and record.loss_scale == 0.0
                assert len(record.ids) == 1 and record.ids[0] in in_step
            else:
                weight = len(record.ids) * num_ranks * schedule.accumulate / max(len(in_step), 1)
                assert abs(record.loss_scale - weight) < 1e-12
                assert record.ids or schedule.ends == "finish" or not in_step
                check_limits(schedule, record.ids)


def check_limits(schedule: Schedule, ids: Sequence[int]) -> None:
    limits = schedule.limits
    if limits is not None:
        lens = schedule.lengths()
        items, tokens = limits.common("items"), limits.common("tokens")
        assert len(ids) <= (items or len(ids))
        assert tokens is None or sum(lens[i] for i in ids) <= tokens


def check_mean(schedule: Schedule, of_rank: Sequence[list[Record]]) -> None:
    """With loss_scale, means of means are the mean over all samples of the step."""
    num_ranks, accumulate = len(of_rank), schedule.accumulate
    for step, groups_of in enumerate(schedule.steps()):
        ids = [i for groups in groups_of for group in groups for i, _ in group]
        total, mean = 0.0, np.mean([loss_of(i) for i in ids]) if ids else 0.0
        for records in of_rank:
            for record in records[step * accumulate : (step + 1) * accumulate]:
                if record.ids:
                    own = float(np.mean([loss_of(i) for i in record.ids]))
                    total += record.loss_scale * own / (num_ranks * accumulate)
        assert abs(total - mean) < 1e-12


def loss_of(sample_id: int) -> float:
    return float(np.sin(sample_id))


def endless(rank: int) -> Iterator[list[dict[str, Any]]]:
    k = 0
    while True:
        yield [sample_of(PER_RANK * rank + k, 3 + 5 * rank + k % 7)]
        k += 1


def lists(num: int = 5) -> list[list[dict[str, Any]]]:
    """Microbatches of one sample of this rank."""
    first = PER_RANK * dist.get_rank()
    return [[sample_of(first + k, 3 + k + first % 7)] for k in range(num)]


def loader_threads() -> list[str]:
    """Threads that a loader left behind."""
    return [t.name for t in threading.enumerate() if t.name == "bascule loader"]


def allow_workers() -> None:
    """Let a rank of the harness start the workers of a DataLoader, as a rank of a user would.

    It is a daemon, which may not; and it would start a fork server of its own first, for seconds.
    """
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]


def heard_by(run: Any, *args: Any, **kwargs: Any) -> tuple[list[str], str]:
    """The names of the classes of an error that must come, and its text; no thread stays."""
    heard = raised_by(run, *args, **kwargs)
    assert not loader_threads()
    return heard
