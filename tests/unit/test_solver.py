"""The solver on cases small enough to check by hand, and its errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.errors import PlanError
from bascule.plan.limits import Limits
from bascule.plan.solver.bounds import (
    counting_bound,
    crowding_bound,
    lower_bound,
    mean_bound,
    on_grid,
    pigeonhole_bound,
    spill_bound,
    surplus_bound,
    threshold_bound,
)
from bascule.plan.solver.portfolio import by_speed, longest_first, solve
from bascule.plan.solver.problem import Problem, build_problem
from bascule.plan.solver.solve import assign


def problem_of(
    costs: Sequence[float], speeds: Sequence[float], carried: Sequence[float] | None = None
):
    before = None if carried is None else np.array(carried)
    return build_problem(np.array(costs), np.array(speeds), carried=before)


@pytest.mark.parametrize(
    ("costs", "options", "loads", "method"),
    [
        ([], {"num_bins": 3}, [0, 0, 0], "nothing to do"),
        ([1, 2, 3], {"num_bins": 1}, [6], "longest first"),
        ([5, 2], {"num_bins": 5}, [0, 0, 0, 2, 5], "longest first"),
        ([7, 5, 4, 3, 1], {"num_bins": 2}, [10, 10], "longest first"),
        # Graham's worst case for two bins: longest first gives 7.
        ([3, 3, 2, 2, 2], {"num_bins": 2}, [6, 6], "longest first, improved"),
        ([1000] + [1] * 300, {"num_bins": 4}, [100, 100, 100, 1000], "longest first"),
        ([1] * 10, {"num_bins": 4}, [2, 2, 3, 3], "longest first"),
        ([5, 5], {"num_bins": 2, "initial_loads": [100, 0]}, [10, 100], "longest first"),
        ([8, 1], {"speeds": [1, 8], "initial_loads": [0.5, 0.25]}, [0.5, 1.375], "longest first"),
        ([4, 4], {"num_bins": 2, "location": [1, 0]}, [4, 4], "relabelled"),
    ],
)
def test_the_best_is_found_and_certified(
    costs: list[float], options: dict[str, Any], loads: list[float], method: str
):
    plan = assign(costs, **options)
    assert sorted(plan.loads.tolist()) == loads and plan.method == method
    assert plan.makespan == plan.lower_bound == max(loads) and plan.gap == 0.0
    assert not plan.bin_of.flags.writeable and not plan.loads.flags.writeable


TWO_SIZES = {"tokens": [9, 1, 9, 1], "bytes": [1, 9, 1, 9]}
BOTH, BYTES = Limits(tokens=9, num_bytes=9), Limits(num_bytes=10)
NEAR = {"locality_tolerance": 9.0}


@pytest.mark.parametrize(
    ("costs", "options", "makespan"),
    [
        ([1], {"speeds": [1.0, 4.0], "sizes": [40], "limits": Limits(tokens=10)}, 0.25),
        ([1], {"speeds": [0.5, 0.6], "ranks_per_bin": [2, 1], "sizes": [20], "limits": BYTES}, 2.0),
        (
            [6, 5, 1, 1],
            {"num_bins": 2, "sizes": TWO_SIZES, "limits": Limits(tokens=10, num_bytes=10, items=2)},
            7.0,
        ),
        ([1] * 3, {"num_bins": 3, "location": [0] * 3, "limits": Limits(items=2), **NEAR}, 2.0),
    ],
)
def test_limits_hold(costs: list[float], options: dict[str, Any], makespan: float):
    """Of what the drawn cases do not have: bytes, two sizes, bins of several ranks, homes."""
    plan, limits, sizes = assign(costs, **options), options["limits"], options.get("sizes")
    ranks = np.array(options.get("ranks_per_bin", options.get("speeds", np.ones(plan.loads.size))))
    assert plan.makespan == makespan
    for name, most in (("tokens", limits.tokens), ("bytes", limits.num_bytes)):
        if most is not None:
            own = sizes[name] if isinstance(sizes, dict) else sizes
            assert (np.bincount(plan.bin_of, own, ranks.size) <= most * ranks).all()
    assert limits.items is None or np.bincount(plan.bin_of).max() <= limits.items


@pytest.mark.parametrize(
    ("costs", "home", "options", "expected"),
    [
        ([4, 4, 4, 4], [3, 1, 0, 2], {}, [3, 1, 0, 2]),
        ([10, 1, 10], [0, 0, 1], {}, [0, 0, 1]),
        ([10, 1, 10], [0, 0, 0], {"locality_tolerance": 1.2}, [0, 0, 0]),
        ([0, 0, 7], [1, 1, 1], {}, [1, 1, 1]),  # what costs nothing goes home
        ([0, 0], [1, 1], {}, [1, 1]),
        ([5, 4], [-1, 0], {}, [1, 0]),
    ],
)
def test_items_go_home(
    costs: list[float], home: list[int], options: dict[str, Any], expected: list[int]
):
    plan = assign(costs, max(*home, 1) + 1, location=home, **options)
    assert plan.bin_of.tolist() == expected


@pytest.mark.parametrize("num_bins", [2, 4, 64])
def test_items_without_cost_spread_evenly(num_bins: int):
    plan = assign([0.0] * (2 * num_bins), num_bins)
    assert plan.makespan == plan.gap == 0.0
    assert np.bincount(plan.bin_of).tolist() == [2] * num_bins


def test_many_bins_with_few_empty_ones_finish_on_the_heap():
    carried = np.where(np.arange(100) == 7, 0.0, 50.0)
    assert (assign(np.ones(30), 100, initial_loads=carried).bin_of == 7).all()


@pytest.mark.parametrize("fill_first", [False, True])
def test_many_different_speeds_follow_the_same_rule_as_few(fill_first: bool):
    speeds = [1.0 + (bin_ % 20) / 7.0 for bin_ in range(40)]
    costs = np.random.default_rng(0).uniform(1.0, 9.0, size=300)
    bin_of = by_speed(problem_of(costs.tolist(), speeds), fill_first=fill_first)
    loads, capacity = np.zeros(40), costs.sum() / np.sum(speeds)
    for item in np.argsort(-costs, kind="stable"):
        ends = (loads + costs[item]) / speeds
        fits = (ends <= capacity) & fill_first
        rank = np.where(fits, loads / speeds, np.inf) if fits.any() else ends
        assert bin_of[item] == np.argmin(rank)
        loads[bin_of[item]] += costs[item]


def test_the_default_tolerance_is_kept_on_mixed_bins():
    costs = np.random.default_rng(0).lognormal(size=100)
    assert assign(costs, speeds=[1.0] * 8 + [8.0] * 3).gap <= 5e-4


def test_does_not_depend_on_the_unit():
    costs = np.random.default_rng(1).lognormal(size=300)
    bin_of = assign(costs, 16).bin_of.tolist()
    for exponent in (-900, -40, 40, 900):
        assert assign(np.ldexp(costs, exponent), 16).bin_of.tolist() == bin_of


@pytest.mark.parametrize(
    ("bound", "costs", "speeds", "expected"),
    [
        (counting_bound, [12.0, 1.0], [1.0, 4.0], 3.0),  # the longest on the fastest
        # Until 3/4 the fast bin completes three items; at 1 both complete one more.
        (counting_bound, [1.0] * 3, [1.0, 4.0], 0.75),
        (counting_bound, [1.0] * 5, [1.0, 4.0], 1.0),
        (counting_bound, [1.0] * 6, [1.0, 4.0], 1.25),
        (pigeonhole_bound, [6.0, 5.0, 4.0], [1.0, 1.0], 9.0),
        # Three bins, seven items: one bin has at most two, so two bins hold the rest.
        (surplus_bound, [4.0] * 7, [1.0] * 3, 10.0),
        (mean_bound, [4.0] * 7, [1.0] * 3, 28.0 / 3.0),
        # One of four bins holds three items, of which the shortest three cost 6.3.
        (crowding_bound, [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8], [1.0] * 4, 6.3),
        # Both items need 20 on a slow bin, or 5 together on the fast one.
        (threshold_bound, [20.0, 20.0], [1.0] * 32 + [8.0], 5.0),
        (lower_bound, [20.0, 20.0], [1.0] * 32 + [8.0], 5.0),
    ],
)
def test_bounds_by_hand(
    bound: Callable[[Problem], float], costs: list[float], speeds: list[float], expected: float
):
    assert bound(problem_of(costs, speeds)) == pytest.approx(expected, rel=1e-9)


def test_whole_costs_have_whole_sums():
    problem = problem_of([6.0, 9.0, 9.0], [1.0, 1.0])
    assert on_grid(problem, 12.0) == 12.0
    assert on_grid(problem, 12.1) == 15.0
    assert on_grid(problem_of([6.1, 9.0], [1.0, 1.0]), 12.1) == 12.1


def test_spill_counts_the_part_of_an_item_that_does_not_fit():
    """12 tokens, 10 of which the fast bin holds: half of an item at least is on the slow one."""
    held: Any = {"limits": Limits(tokens=10), "sizes": {"": np.full(3, 4.0)}, "ranks": np.ones(2)}
    problem = build_problem(np.array([4.0, 4.0, 6.0]), np.array([1.0, 8.0]), **held)
    assert spill_bound(problem) == 2.0


def test_a_limit_on_items_is_kept_from_the_start_and_bounded_by_company() -> None:
    """A giant in a bin that must hold three items: the two shortest keep it company."""
    costs = [90, 9, 8, 7, 6, 5, 4, 3, 2]
    plan = assign(costs, 3, limits=Limits(items=3))
    assert plan.makespan == 95.0 == plan.lower_bound and plan.gap == 0.0
    assert plan.method == "longest first, counted"
    assert np.bincount(plan.bin_of).tolist() == [3, 3, 3]
    loose = assign([*costs, 2], 3, limits=Limits(items=4))  # two bins hold eight of the ten
    assert loose.makespan == 92.0 == loose.lower_bound
    rng = np.random.default_rng(0)
    for _ in range(5):
        lens = rng.lognormal(0.0, 1.0, 512)
        plan = assign(lens, 64, limits=Limits(items=8), tolerance=0.01)
        assert plan.gap <= 0.015 and np.bincount(plan.bin_of).max() == 8


def test_the_bound_holds_where_costs_are_below_a_unit_of_work() -> None:
    """Both costs round to no work, but the second one takes time."""
    plan = assign([0.0, 4.0e-307], speeds=[1.0, 2.0])
    assert plan.lower_bound <= 2.0e-307


def test_limits_know_what_ranks_hold_without_a_plan() -> None:
    tokens, items = np.array([[10.0, 7.0], [3.0, 10.0]]), np.array([[2, 1], [1, 2]])
    assert Limits(tokens=10, items=2).keeps(tokens=tokens, items=items)
    assert Limits().keeps(tokens=tokens, items=items, num_bytes=tokens)
    for limits in (Limits(tokens=9), Limits(items=1), Limits(num_bytes=9)):
        assert not limits.keeps(tokens=tokens, items=items, num_bytes=tokens), limits


# Against brute force, on small cases


@dataclass(frozen=True)
class Case:
    """Arguments of ``assign`` that a test draws."""

    costs: list[float]
    speeds: list[float]
    carried: list[float]
    sizes: list[int]
    limits: Limits

    def problem(self):
        costs, speeds, carried, sizes = (
            np.array(x, np.float64) for x in (self.costs, self.speeds, self.carried, self.sizes)
        )
        return build_problem(costs, speeds, carried=carried, limits=self.limits, sizes={"": sizes})

    def assign(self, **more: Any):
        more |= {"sizes": self.sizes, "limits": self.limits, "tolerance": 0.0}
        return assign(self.costs, speeds=self.speeds, initial_loads=self.carried, **more)

    def loads(self, bin_of: np.ndarray) -> np.ndarray:
        work = np.bincount(bin_of, weights=self.costs, minlength=len(self.speeds))
        return np.array(self.carried) + work / np.array(self.speeds)

    def legal(self, bin_of: np.ndarray) -> bool:
        num_bins = len(self.speeds)
        held = np.bincount(bin_of, weights=self.sizes, minlength=num_bins)
        counts = np.bincount(bin_of, minlength=num_bins)
        tokens, items = (np.array(x or np.inf) for x in (self.limits.tokens, self.limits.items))
        return bool((held <= tokens * np.array(self.speeds)).all() and (counts <= items).all())

    def best(self) -> float:
        """The best makespan, by trying everything; inf if nothing is legal."""
        options = product(range(len(self.speeds)), repeat=len(self.costs))
        bins = (np.array(option, dtype=np.int64) for option in options)
        return min((float(self.loads(b).max()) for b in bins if self.legal(b)), default=np.inf)


COST = st.one_of(
    st.integers(0, 20).map(float),
    st.floats(0.0, 100.0, allow_subnormal=False),
    st.sampled_from([1.0, 1e6]),
)
SPEED = st.sampled_from([1.0, 1.0, 2.0, 4.0, 8.0, 0.7])


@st.composite
def cases(draw: st.DrawFn, *, limited: bool = False, max_items: int = 6) -> Case:
    num_items, num_bins = draw(st.integers(int(limited), max_items)), draw(st.integers(1, 3))
    speeds = [1.0] * num_bins if draw(st.booleans()) else draw(_lists(SPEED, num_bins))
    carried = draw(st.one_of(st.just([0.0] * num_bins), _lists(st.floats(0.0, 30.0), num_bins)))

    def limit(most: int) -> Any:
        number = st.integers(1, most)
        return draw(st.one_of(st.none(), number, _lists(number, num_bins)))

    limits = Limits(tokens=limit(30), items=limit(4)) if limited else Limits()
    costs, sizes = draw(_lists(COST, num_items)), draw(_lists(st.integers(0, 20), num_items))
    return Case(costs, speeds, carried, sizes, limits)


def _lists(elements: st.SearchStrategy, size: int):
    return st.lists(elements, min_size=size, max_size=size)


@settings(deadline=None, max_examples=75)
@given(cases())
def test_bound_holds_and_answers_are_close_to_the_best(case: Case):
    plan, best = case.assign(), case.best()
    np.testing.assert_allclose(plan.loads, case.loads(plan.bin_of))
    assert plan.makespan == plan.loads.max()
    assert lower_bound(case.problem()) <= best * (1 + 1e-9)
    assert plan.lower_bound <= plan.makespan
    assert best * (1 - 1e-9) <= plan.makespan <= best * 1.34 + 1e-9


@settings(deadline=None, max_examples=75)
@given(cases(limited=True))
def test_limits_hold_exactly_where_they_can(case: Case):
    best = case.best()
    if best == np.inf:
        with pytest.raises(PlanError):
            case.assign()
        return
    plan = case.assign()
    assert case.legal(plan.bin_of)
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert lower_bound(case.problem()) <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.0, 1e6, allow_subnormal=False), max_size=120),
    st.integers(1, 70),
    st.booleans(),
)
def test_never_worse_than_its_starts(costs: list[float], num_bins: int, mixed: bool):
    speeds = [8.0 if mixed and not bin_ % 3 else 1.0 for bin_ in range(num_bins)]
    case = Case(costs, speeds, [0.0] * num_bins, [0] * len(costs), Limits())
    problem, plan = case.problem(), case.assign()
    for start in (longest_first(problem), by_speed(problem, fill_first=True)):
        assert plan.makespan <= case.loads(start).max() * (1 + 1e-9)
    assert case.assign().bin_of.tobytes() == plan.bin_of.tobytes()


@settings(deadline=None, max_examples=60)
@given(cases(max_items=12), st.sampled_from([0.0, 0.05, 0.5]), st.data())
def test_home_never_costs_more_than_its_tolerance(
    case: Case, tolerance: float, data: st.DataObject
):
    bins = st.integers(-1, len(case.speeds) - 1)
    home = np.array(data.draw(_lists(bins, len(case.costs))), dtype=np.int64)
    plan, near = case.assign(), case.assign(location=home, locality_tolerance=tolerance)
    assert near.makespan <= plan.makespan * (1 + tolerance) * (1 + 1e-9)

    def away(bin_of: np.ndarray) -> float:
        return float(np.array(case.sizes)[(home >= 0) & (home != bin_of)].sum())

    assert away(near.bin_of) <= away(plan.bin_of)


def test_small_tables_of_prices_are_placed_exactly_where_equally_late_bins_would_change() -> None:
    """Bins 1 and 2 end together at 1: only an exchange between these two ends before."""
    prices = np.array([[2.0, 3.0, 1.0, 0.5], [0.5, 1.0, 3.0, 1.0]])
    problem = build_problem(prices, np.array([1.0, 4.0, 2.0]), kind_of=np.array([0, 1, 0]))
    solution = solve(problem)
    assert (solution.makespan, solution.gap, solution.method) == (0.5, 0.0, "exact")
    random = np.random.default_rng(1)
    for _ in range(40):
        num_bins, num_items = int(random.integers(2, 4)), int(random.integers(2, 8))
        prices = random.choice([0.5, 1.0, 2.0, 3.0], (2, num_items))
        speeds = random.choice([1.0, 2.0, 4.0], num_bins)
        problem = build_problem(prices, speeds, kind_of=np.arange(num_bins) % 2)
        every = product(range(num_bins), repeat=num_items)
        best = min(problem.loads(np.array(one)).max() for one in every)
        assert solve(problem).makespan <= 1.05 * best
