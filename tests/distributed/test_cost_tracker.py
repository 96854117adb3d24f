"""A cost model learned on the job: compute is replaced by burning CPU time of a known amount."""

import contextlib
import json
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost, TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.solver.solve import assign
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

TRUTH = PolynomialCost(2e-9, 1e-6, 1e-5, overhead=2e-4)
UNKNOWING = PolynomialCost(0.0, 1.0, 0.0)  # as if tokens were all that counts
WARMUP, DISCARD, WINDOW = 10, 2, 12


def samples(rank: int, count: int) -> Any:
    generator = np.random.default_rng(rank)
    for _ in range(count):
        length = int(np.clip(generator.lognormal(np.log(300), 1.0), 16, 3000))
        yield {"input_ids": torch.zeros(length, dtype=torch.int64)}


def make_loader(
    count: int, *, accumulate: int = 1, sync: Any = "microbatch", cost: Any = UNKNOWING, **more: Any
) -> BalancedLoader:
    return BalancedLoader(
        samples(dist.get_rank(), count),
        cost=cost,
        accumulate=accumulate,
        sync=sync,
        options=LoaderOptions(
            batch_size=6, ends="finish", collate_fn=list, timeout_s=100, tries=False, **more
        ),
    )


def steps_of(tracker: CostTracker, *, num_batches: int = 1, slower_from: int = 10**9) -> Any:
    """The batches of a tracker, each computed on a clock of its own: on a busy machine real times
    are no measure. From one of them on, samples take three times as long, as in another phase."""
    now = [0.0]
    with mock.patch.object(time, "thread_time", lambda: now[0]):
        for number, batch in enumerate(tracker):
            yield batch
            lens = [len(sample["input_ids"]) for sample in batch.data]
            factor = 3.0 if number >= slower_from else 1.0
            now[0] += factor * float(TRUTH(lens).sum()) + TRUTH.overhead / num_batches


def learn(sync: str, accumulate: int) -> dict[str, Any]:
    loader = make_loader(6 * 30 * accumulate, accumulate=accumulate, sync=sync)
    tracker = CostTracker(loader, warmup=WARMUP, discard=DISCARD, window=WINDOW, device="cpu")
    balance: list[float] = []
    for batch in steps_of(tracker, num_batches=accumulate if sync == "step" else 1):
        plan, costs = batch.plan, TRUTH(batch.plan.seq_lens)
        loads = np.bincount(plan.bag_of, costs, plan.num_ranks)
        balance.append(float(loads.max() / assign(costs, plan.num_ranks).makespan))
    return tracker.metrics() | {"balance": balance, "state": json.dumps(tracker.state_dict())}


@pytest.mark.parametrize(("sync", "accumulate"), [("microbatch", 1), ("step", 2)])
def test_costs_are_learned_on_the_job_and_used(sync: str, accumulate: int) -> None:
    first, second = run_ranks(learn, 2, sync, accumulate)
    assert first["num_fits"] >= 1
    names = ("quadratic", "linear", "constant", "overhead")
    assert [first[n] for n in names] == [second[n] for n in names]  # to the last bit
    learned = PolynomialCost(*(first[n] for n in names))
    batch = np.repeat([100, 300, 1000, 3000], 2)
    true = TRUTH(batch).sum() + TRUTH.overhead
    assert learned(batch).sum() + learned.overhead == pytest.approx(true, rel=0.1)
    if accumulate == 1:
        # Tokens alone are a bad measure of these samples; the learned model balances them.
        assert np.mean(first["balance"][:WARMUP]) > 1.03
        assert np.mean(first["balance"][-12:]) < 1.02


def differ() -> tuple[Any, ...]:
    """As on a processor that rounds another way: rank 1 would refuse the fit."""
    cost, limits = TransformerCost(8, bytes_per_token=100.0), Limits(num_bytes=10**7)
    loader = make_loader(6 * 30, cost=cost, limits=limits)
    tracker = CostTracker(loader, warmup=6, discard=0, window=6, device="cpu")
    refusing = mock.Mock(side_effect=ConfigError("the lengths do not explain the seconds"))
    where = "bascule.data.cost_tracker."
    patches = {"fit_iterations": refusing, "_drift": mock.Mock(return_value=0.05)}
    with contextlib.ExitStack() as stack:
        for name, other in patches.items() if dist.get_rank() else ():
            stack.enter_context(mock.patch(where + name, other))
        list(steps_of(tracker))
    assert tracker.cost is not None and tracker.cost.bytes_per_token == 100.0  # as it was given
    return tracker.cost, tracker.metrics()


def test_one_rank_fits_and_its_coefficients_are_everybodys() -> None:
    first, second = run_ranks(differ, 2)
    assert first == second and first[1]["num_fits"] > 0


def drift() -> tuple[list[int], Any, int]:
    tracker = CostTracker(make_loader(6 * 80), warmup=WARMUP, discard=0, window=30, device="cpu")
    known, fits = list[bool](), list[int]()
    for _ in steps_of(tracker, slower_from=40):
        known.append(tracker.drift is not None)
        fits.append(tracker.num_fits)
    return fits, tracker.cost, known.index(True)


def test_a_drift_is_looked_for_a_window_after_the_warm_up_and_fitted() -> None:
    (fits, cost, first_look), (others, _, _) = run_ranks(drift, 2)
    assert fits == others and first_look == WARMUP + 30
    assert fits[40] == 1 and fits[-1] >= 2
    slow = cost(np.array([1000, 2000])) / TRUTH(np.array([1000, 2000]))
    assert slow == pytest.approx(3.0, rel=0.15)


@on_ranks(2)
def test_the_model_travels_with_the_checkpoint() -> None:
    loader = make_loader(12)
    tracker = CostTracker(loader, device="cpu")
    assert tracker.state_dict()["cost"] is None
    tracker.load_state_dict({"version": 1, "cost": [1e-9, 2e-6, 0.0, 0.5]})
    used = [batch.plan.loads.max() for batch in tracker]
    assert max(used) < 0.1  # seconds of the new model, not tokens of the old one
    assert loader.cost == PolynomialCost(1e-9, 2e-6, 0.0, 0.5)
    assert tracker.state_dict()["cost"] == [1e-9, 2e-6, 0.0, 0.5]
    classes, text = raised_by(tracker.load_state_dict, {"version": 7})
    assert classes[0] == "ConfigError" and "version 7" in text


def refuse() -> list[tuple[list[str], str]]:
    rank, loader = dist.get_rank(), make_loader(6)
    wrong: list[dict[str, Any]] = [{"warmup": 2}, {"window": 1}, {"discard": -1}, {"max_drift": 0}]
    heard = [raised_by(CostTracker, loader, **(one if rank else {})) for one in wrong]
    heard.append(raised_by(CostTracker, loader, warmup=10 + rank))
    tracker = CostTracker(loader)
    states: list[Any] = [None, {}, [1], {"version": 1}, {"version": 1, "cost": 5}]
    states += [{"version": 1, "cost": ["a"]}, {"version": 1, "cost": [-1.0, 0.0, 0.0, 0.0]}]
    return heard + [raised_by(tracker.load_state_dict, state) for state in states]


def test_wrong_or_unlike_numbers_are_refused_on_all_ranks() -> None:
    one, other = run_ranks(refuse, 2)
    assert one == other
    wrong, (unlike,), states = one[:4], one[4:5], one[5:]
    for names, text in wrong:
        assert ConfigError.__name__ in names and "rank 1 of group 'loader': CostTracker(" in text
    assert "warmup=2" in wrong[0][1]
    assert "disagree on the tracker" in unlike[1] and "warmup=11" in unlike[1]
    for names, text in states:
        assert names[0] == "ConfigError" and "not a tracker's state" in text, text
