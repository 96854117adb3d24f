"""The slow rank of simulated jobs, and its cause: `Pace`, as it runs in the loader."""

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from bascule.arrays import Floats
from bascule.data.slow_rank import (
    COMPUTE_S,
    EXCHANGE_S,
    INPUT_S,
    NO_TIMES,
    STEP,
    STEP_S,
    WAITED_S,
    WORK,
    Pace,
)
from bascule.data.step_timer import StepTimer

NUM_STEPS = 160


class Job(NamedTuple):
    """A simulated job: `fault` is the factor of its slow rank's work, compute, input or link."""

    num_ranks: int
    cause: str = "none"
    fault: float = 1.0
    noise: float = 0.05  # of compute, log-normal
    input_s: float = 0.1  # in steps of compute
    exchange_s: float = 0.1
    drift: float = 0.0  # growth of lengths over the run
    imbalance: float = 0.02  # of planned work, after balancing
    overhead: float = 0.1  # seconds without work


JOBS = [
    Job(4, "length", 1.25),
    Job(8, "length", 1.5, drift=1.0),
    Job(16, "length", 2.0, imbalance=0.2),
    Job(64, "length", 1.15, drift=-0.5),
    Job(4, "slow rank", 1.15),
    Job(8, "slow rank", 1.3, noise=0.1, drift=2.0),
    Job(16, "slow rank", 1.8, imbalance=0.3),
    Job(32, "slow rank", 3.0),
    Job(64, "slow rank", 1.2, noise=0.1),
    Job(4, "loader", 3.0, input_s=0.6),
    Job(8, "loader", 1.5, input_s=1.0, drift=-0.3),
    Job(32, "loader", 2.0, input_s=0.8),
    Job(64, "loader", 1.3, input_s=1.0),
    Job(16, "link", 3.0, input_s=0.7, exchange_s=0.3),
    Job(32, "link", 2.0, input_s=0.8, exchange_s=0.3, drift=0.5),
    Job(64, "link", 2.5, input_s=0.7, exchange_s=0.3),
    Job(4),
    Job(8, noise=0.2, imbalance=0.3, drift=1.0),
    Job(32, input_s=1.2, exchange_s=0.3, noise=0.1),
    Job(64, noise=0.15),
]
ONSET = 40  # first step of the fault


def simulate(job: Job, seed: int) -> tuple[Floats, int]:
    """Return numbers (steps, G, 7) of a job, and its slow rank.

    The loader's thread waits for the slowest input, then moves samples; the training computes on a
    batch meanwhile, and waits for the slowest rank. In each twentieth step,
    a rank is delayed by 1 to 4 times.
    """
    draw, shape = np.random.default_rng([seed, job.num_ranks]), (NUM_STEPS, job.num_ranks)
    slow, begins = int(draw.integers(job.num_ranks)), np.arange(NUM_STEPS) >= ONSET

    def noisy(seconds: Floats, noise: float) -> Floats:
        hit = np.where(
            draw.random(shape) < 0.05 / job.num_ranks, draw.uniform(1.0, 4.0, shape), 0.0
        )
        return seconds * (draw.lognormal(0.0, noise, shape) + hit)

    def faulty(values: Floats, cause: str) -> Floats:
        values[begins, slow] *= job.fault if job.cause == cause else 1.0
        return values

    usual = 1.0 + job.drift * np.linspace(0.0, 1.0, NUM_STEPS)[:, None]
    usual = usual * draw.lognormal(0.0, 0.2, (NUM_STEPS, 1))  # a step's own samples
    work = faulty(usual * draw.lognormal(0.0, job.imbalance, shape), "length")
    unlike = draw.lognormal(0.0, 0.01, job.num_ranks)  # devices
    compute = faulty(noisy(job.overhead + work, job.noise), "slow rank") * unlike
    input_s = faulty(noisy(np.full(shape, job.input_s), 0.2), "loader")
    exchange = faulty(noisy(np.full(shape, job.exchange_s), 0.2), "link")
    loader = input_s.max(axis=1, keepdims=True) + exchange.max(axis=1, keepdims=True)
    trained = compute.max(axis=1, keepdims=True) + 0.05  # and gradients
    waited = np.maximum(loader - trained, 0.0)
    numbers = np.zeros((*shape, len(NO_TIMES)))
    steps = np.arange(NUM_STEPS)[:, None]
    for place, values in enumerate(
        (steps, trained + waited, waited, compute, 1e9 * work, input_s, exchange)
    ):
        numbers[..., place] = values
    numbers[:3, :, :5] = np.nan  # the loader is ahead
    return numbers, slow


@pytest.mark.parametrize("seed", range(3))
def test_the_slow_rank_of_twenty_jobs_and_its_cause(seed: int) -> None:
    wrong = list[str]()
    for job in JOBS:
        numbers, slow = simulate(job, seed)
        pace = Pace(range(100, 100 + job.num_ranks), says=False)
        for number, of_step in enumerate(numbers):
            pace.add(of_step, f"step {number}")
        found = pace.metrics()
        planted = (100 + slow if job.cause != "none" else None, job.cause)
        if (found["slow_rank"], found["slow_cause"]) != planted:
            wrong.append(f"{job}: {planted} is {found}")
    assert len(JOBS) == 20 and len(wrong) <= 2, wrong


def test_a_rank_is_said_to_be_slow_once_and_that_it_no_longer_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers, _ = simulate(Job(4), 0)
    begins, ends = 50, 110
    numbers[begins:ends, 2, COMPUTE_S] *= 2.0
    numbers[begins:ends, :, STEP_S] += 1.0
    said, silent = Pace((5, 7, 9, 11), says=True), Pace((5, 7, 9, 11), says=False)
    found = list[tuple[int | None, str]]()
    for step, of_step in enumerate(numbers):
        for pace in (said, silent):
            pace.add(of_step, f"step {step} of epoch 3")
        assert said.metrics() == silent.metrics()
        found.append((said.metrics()["slow_rank"], said.metrics()["slow_cause"]))
    changes = [x for x, before in zip(found[1:], found, strict=False) if x != before]
    assert changes == [(9, "slow rank"), (None, "none")]
    slow, over = [record.getMessage() for record in caplog.records]
    since = int(slow.split("since step ")[1].split()[0])
    assert begins < since < found.index(changes[0]) < ends
    assert slow.startswith(f"rank 9 is slow since step {since} of epoch 3: it computes ")
    ratio, share = (
        float(part.split()[0])
        for part in (slow.split("computes ")[1].replace("x", ""), slow.split("wait ")[1])
    )
    assert 1.8 < ratio < 2.2 and 35 < share < 60
    assert over.startswith("rank 9 is no longer slow, since step ")


def test_ranks_that_share_all_their_steps_are_not_told_apart() -> None:
    """As a server's ranks do in a block; and one rank alone is never slow."""
    numbers = np.ones((80, 6, len(NO_TIMES)))
    numbers[:, :, 2:] = 0.0
    numbers[..., WORK], numbers[..., COMPUTE_S] = 1.0, np.array([1.0, 1.0, 1.0, 1.0, 2.0, 2.0])
    for ranks, slow in ((slice(6), None), (slice(5), 4), (slice(4, 5), None)):
        of_ranks = numbers[:, ranks]
        pace = Pace(range(of_ranks.shape[1]), says=False)
        for of_step in of_ranks:
            pace.add(of_step, "")
        assert pace.metrics()["slow_rank"] == slow


def test_ranks_without_a_loader_do_not_make_the_others_slow() -> None:
    """Half of the ranks load, and take as long as each other; then one of them takes longer."""
    numbers, _ = simulate(Job(8, input_s=1.2), 0)
    numbers[:, 4:, INPUT_S] = 0.0
    for factor, wanted in ((1.0, (None, "none")), (2.0, (3, "loader"))):
        longer = numbers.copy()
        longer[:, 3, INPUT_S] *= factor
        longer[:, :, [STEP_S, WAITED_S]] += 1.2 * (factor - 1.0)
        pace = Pace(range(8), says=False)
        for of_step in longer:
            pace.add(of_step, "")
        assert (pace.metrics()["slow_rank"], pace.metrics()["slow_cause"]) == wanted


class Event:
    """A GPU's event, by a clock that the test sets; the GPU is behind the host."""

    now, passed = 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return self.time <= Event.passed

    def synchronize(self) -> None:
        assert self.query(), "the training would wait for the GPU"

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


def test_a_gpu_is_never_waited_for_and_each_step_is_told_once() -> None:
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
    ):
        timer, told = StepTimer(), list[Floats]()
        for step in range(6):
            for marks in (False, True):  # two microbatches; one is marked after the forward pass
                timer.begin()
                Event.now += 1.0 + step
                if marks:
                    timer.computed()
                    Event.now += 100.0
                timer.computed()
            Event.passed = Event.now - 150.0  # as the GPU is behind
            timer.finish(step, 0.5, 7.0)
            told.append(timer.take(0.25, 0.125))
    done = [numbers for numbers in told if np.isfinite(numbers).all()]
    assert [numbers[STEP] for numbers in done] == [0, 1, 2, 3]
    assert [numbers[COMPUTE_S] for numbers in done] == [2.0, 4.0, 6.0, 8.0]
    assert [numbers[STEP_S] for numbers in done] == [102.0, 104.0, 106.0, 108.0]
    for numbers in told:
        assert numbers[[INPUT_S, EXCHANGE_S]].tolist() == [0.25, 0.125]


def test_a_step_without_a_batch_computes_nothing() -> None:
    timer = StepTimer()
    timer.finish(4, 0.0, 0.0)
    assert timer.take(0.0, 0.0)[[STEP, COMPUTE_S]].tolist() == [4, 0]
