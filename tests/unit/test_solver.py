"""The solver on cases small enough to check by hand, and its errors."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from bascule.errors import ConfigError, PlanError
from bascule.plan.limits import Limits
from bascule.plan.solver.bounds import (
    counting_bound,
    crowding_bound,
    mean_bound,
    on_grid,
    pigeonhole_bound,
    spill_bound,
    surplus_bound,
    threshold_bound,
)
from bascule.plan.solver.homes import Homes
from bascule.plan.solver.portfolio import by_speed, longest_first, solve
from bascule.plan.solver.problem import build_problem
from bascule.plan.solver.search import improve
from bascule.plan.solver.solve import Assignment, assign


def problem_of(
    costs: Sequence[float], speeds: Sequence[float], carried: Sequence[float] | None = None
):
    before = None if carried is None else np.array(carried)
    return build_problem(np.array(costs), np.array(speeds), carried=before)


def test_finds_the_best_and_certifies_it():
    plan = assign([7, 5, 4, 3, 1], 2)
    assert plan.makespan == plan.lower_bound == 10.0
    assert plan.gap == 0.0
    assert plan.loads.tolist() == [10.0, 10.0]


def test_beats_longest_first():
    # Graham's worst case for two bins: LPT gives 7.
    assert assign([3, 3, 2, 2, 2], 2).makespan == 6.0


def test_no_items():
    plan = assign([], 3)
    assert plan.bin_of.shape == (0,)
    assert plan.loads.tolist() == [0.0, 0.0, 0.0]
    assert (plan.makespan, plan.lower_bound, plan.gap) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("num_bins", [2, 4, 64])
def test_items_without_cost_spread_evenly(num_bins: int):
    plan = assign([0.0] * (2 * num_bins), num_bins)
    assert plan.makespan == plan.gap == 0.0
    assert np.bincount(plan.bin_of).tolist() == [2] * num_bins


def test_fewer_items_than_bins():
    plan = assign([5.0, 2.0], 5)
    assert plan.makespan == plan.lower_bound == 5.0
    assert plan.bin_of.tolist() == [0, 1]


def test_one_giant_does_not_stop_the_rest_from_spreading():
    plan = assign([1000.0] + [1.0] * 300, 4)
    assert plan.makespan == plan.lower_bound == 1000.0
    assert sorted(plan.loads.tolist()) == [100.0, 100.0, 100.0, 1000.0]


def test_all_equal_uses_the_pigeonhole():
    plan = assign([1.0] * 10, 4)
    assert plan.makespan == plan.lower_bound == 3.0


def test_one_bin():
    plan = assign([1.0, 2.0, 3.0], 1)
    assert plan.bin_of.tolist() == [0, 0, 0]
    assert plan.makespan == plan.lower_bound == 6.0


def test_loads_are_completion_times():
    plan = assign([8.0, 8.0, 1.0], speeds=[1.0, 8.0], carried_loads=[0.5, 0.25])
    items = np.bincount(plan.bin_of, weights=[8.0, 8.0, 1.0], minlength=2)
    np.testing.assert_allclose(plan.loads, [0.5 + items[0], 0.25 + items[1] / 8.0])
    assert plan.makespan == plan.loads.max()


def test_carried_load_above_everything_is_the_bound():
    plan = assign([5.0, 5.0], 2, carried_loads=[100.0, 0.0])
    assert plan.makespan == plan.lower_bound == 100.0
    assert plan.bin_of.tolist() == [1, 1]


def test_many_bins_with_few_empty_ones_finish_on_the_heap():
    carried = np.full(100, 50.0)
    carried[7] = 0.0
    plan = assign(np.ones(30), 100, carried_loads=carried)
    assert (plan.bin_of == 7).all()


@pytest.mark.parametrize("num_bins", [2, 31, 48, 200])
def test_longest_first_is_the_textbook_rule(num_bins: int):
    rng = np.random.default_rng(num_bins)
    costs = np.rint(rng.lognormal(3.0, 1.0, size=1000)) + 1.0
    problem = problem_of(costs.tolist(), [1.0] * num_bins)
    loads = np.zeros(num_bins)
    for item in np.argsort(-costs, kind="stable"):
        loads[np.argmin(loads)] += costs[item]
    ours = problem.bin_work(longest_first(problem)) * problem.unit
    assert sorted(ours.tolist()) == sorted(loads.tolist())


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


def test_the_result_is_frozen_and_repeats():
    costs = np.random.default_rng(0).lognormal(size=200)
    first, second = assign(costs, 8), assign(costs, 8)
    assert first.bin_of.tobytes() == second.bin_of.tobytes()
    assert not first.bin_of.flags.writeable
    assert not first.loads.flags.writeable
    with pytest.raises(AttributeError):
        first.makespan = 0.0  # type: ignore[misc]


def test_does_not_depend_on_the_unit():
    costs = np.random.default_rng(1).lognormal(size=300)
    bin_of = assign(costs, 16).bin_of.tolist()
    for exponent in (-900, -40, 40, 900):
        assert assign(np.ldexp(costs, exponent), 16).bin_of.tolist() == bin_of


def test_does_not_touch_its_arguments():
    costs, speeds = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0])
    assign(costs, speeds=speeds)
    assert costs.flags.writeable and costs.tolist() == [3.0, 1.0, 2.0]
    assert speeds.flags.writeable and speeds.tolist() == [1.0, 2.0]


class TestBounds:
    def test_mean_counts_carried_loads(self):
        assert mean_bound(problem_of([6.0], [1.0, 2.0], [3.0, 0.0])) == 3.0
        assert mean_bound(problem_of([6.0], [1.0, 2.0], [9.0, 0.0])) == 9.0

    def test_longest_item_on_the_fastest_bin(self):
        assert counting_bound(problem_of([12.0, 1.0], [1.0, 4.0])) == 3.0

    def test_counting_on_mixed_speeds(self):
        # Until 3/4 the fast bin completes three items; at 1 both complete one more.
        assert counting_bound(problem_of([1.0] * 3, [1.0, 4.0])) == 0.75
        assert counting_bound(problem_of([1.0] * 5, [1.0, 4.0])) == 1.0
        assert counting_bound(problem_of([1.0] * 6, [1.0, 4.0])) == 1.25

    def test_pigeonhole(self):
        bound = pigeonhole_bound(problem_of([6.0, 5.0, 4.0], [1.0, 1.0]))
        assert bound == pytest.approx(9.0)

    def test_surplus_beats_the_mean(self):
        # Three bins, seven items: one bin has at most two, so two bins hold the rest.
        problem = problem_of([4.0] * 7, [1.0, 1.0, 1.0])
        assert surplus_bound(problem) == pytest.approx(10.0)
        assert mean_bound(problem) == pytest.approx(28.0 / 3.0)

    def test_crowding(self):
        # One of four bins holds three items, of which the shortest three cost 6.3.
        costs = [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8]
        assert crowding_bound(problem_of(costs, [1.0] * 4)) == pytest.approx(6.3)

    def test_whole_costs_have_whole_sums(self):
        problem = problem_of([6.0, 9.0, 9.0], [1.0, 1.0])
        assert on_grid(problem, 12.0) == 12.0
        assert on_grid(problem, 12.1) == 15.0
        assert on_grid(problem_of([6.1, 9.0], [1.0, 1.0]), 12.1) == 12.1

    def test_threshold_keeps_long_items_on_the_fast_bins(self):
        # Both long items need 20 on a slow bin, or 5 together on the fast one.
        problem = problem_of([20.0, 20.0], [1.0] * 32 + [8.0])
        assert threshold_bound(problem) == 5.0
        assert assign([20.0, 20.0], speeds=[1.0] * 32 + [8.0]).gap == 0.0

    def test_spill(self):
        limits = Limits(items=2)
        problem = build_problem(np.full(3, 4.0), np.array([1.0, 8.0]), limits=limits)
        assert spill_bound(problem) == 4.0


class TestLimits:
    def test_items(self):
        plan = assign([9.0, 1.0, 1.0, 1.0], 2, limits=Limits(items=2))
        assert np.bincount(plan.bin_of).tolist() == [2, 2]
        assert plan.makespan == 10.0

    def test_tokens_change_the_answer(self):
        costs, sizes = [10.0, 5.0, 5.0], [1.0, 9.0, 9.0]
        assert assign(costs, 2).makespan == 10.0
        plan = assign(costs, 2, sizes=sizes, limits=Limits(tokens=10))
        assert np.bincount(plan.bin_of, weights=sizes).max() <= 10
        assert plan.makespan == 15.0

    def test_a_bag_holds_as_much_as_its_ranks(self):
        plan = assign([1.0], speeds=[1.0, 4.0], sizes=[40], limits=Limits(tokens=10))
        assert plan.bin_of.tolist() == [1]

    def test_ranks_per_bin_where_speeds_are_not_ranks(self):
        limits = Limits(num_bytes=10)
        plan = assign([1.0], speeds=[0.5, 0.6], sizes=[20], limits=limits, ranks_per_bin=[2, 1])
        assert plan.bin_of.tolist() == [0]

    def test_the_exact_solver_is_the_last_resort(self):
        sizes = [6, 5, 5, 4, 4, 3, 3]
        plan = assign(sizes, 3, sizes=sizes, limits=Limits(tokens=10))
        assert np.bincount(plan.bin_of, weights=sizes).max() <= 10

    def test_an_item_that_fits_nowhere_is_named(self):
        with pytest.raises(PlanError, match=r"item 1 has 11 tokens.*limit of 10 by 1"):
            assign([1, 2], 2, sizes=[5, 11], limits=Limits(tokens=10))

    def test_too_much_in_total(self):
        with pytest.raises(PlanError, match="24 bytes of 3 items exceed the 20 of the 2 bins by 4"):
            assign([1] * 3, 2, sizes=[8] * 3, limits=Limits(num_bytes=10))
        with pytest.raises(PlanError, match="5 items exceed the 4 of the 2 bins by 1"):
            assign([1] * 5, 2, limits=Limits(items=2))

    def test_too_much_for_the_large_bins(self):
        with pytest.raises(
            PlanError,
            match="50 tokens of 2 items exceed the 40 of the 1 bins with",
        ):
            assign([1] * 2, speeds=[1, 1, 4], sizes=[25, 25], limits=Limits(tokens=10))

    def test_no_combination_fits(self):
        with pytest.raises(PlanError, match=r"12 tokens on bin \d, above its limit of 10 by 2"):
            assign([1] * 3, 2, sizes=[6, 6, 6], limits=Limits(tokens=10))

    def test_limits_on_both_resources(self):
        costs, sizes = [3.0] * 6, [1, 1, 1, 9, 9, 9]
        plan = assign(costs, 3, sizes=sizes, limits=Limits(tokens=10, items=2))
        assert np.bincount(plan.bin_of).tolist() == [2, 2, 2]
        assert np.bincount(plan.bin_of, weights=sizes).tolist() == [10, 10, 10]

    def test_tokens_bytes_and_items_at_once(self):
        costs, tokens, num_bytes = [6.0, 5.0, 1.0, 1.0], [9, 1, 9, 1], [1, 9, 1, 9]
        limits = Limits(tokens=10, num_bytes=10, items=2)
        sizes = {"tokens": tokens, "bytes": num_bytes}
        plan = assign(costs, 2, sizes=sizes, limits=limits)
        for size in sizes.values():
            assert np.bincount(plan.bin_of, weights=size).tolist() == [10, 10]
        assert plan.makespan == 7.0
        with pytest.raises(ConfigError, match="sizes is missing; pass bytes"):
            assign(costs, 2, sizes={"tokens": tokens}, limits=limits)
        with pytest.raises(ConfigError, match=r"sizes\['bytes'\] has 1 entries; 4"):
            assign(costs, 2, sizes={"tokens": tokens, "bytes": [1]}, limits=limits)


class TestHome:
    def test_balanced_at_home_stays(self):
        plan = assign([4, 4, 4, 4], 4, home=[3, 1, 0, 2])
        assert plan.bin_of.tolist() == [3, 1, 0, 2]

    def test_equal_bins_are_relabelled(self):
        costs, home = [5.0, 4.0, 4.0, 5.0], [1, 0, 1, 0]
        plan = assign(costs, 2, home=home, sizes=costs)
        assert plan.makespan == 9.0
        assert plan.bin_of.tolist() in ([1, 0, 1, 0], [1, 1, 0, 0])

    def test_tolerance_buys_locality(self):
        costs, home = [10.0, 1.0, 10.0], [0, 0, 1]
        assert assign(costs, 2, home=[0, 0, 0], home_tolerance=1.2).makespan == 21.0
        assert assign(costs, 2, home=home).bin_of.tolist() == home

    def test_minus_one_is_no_home(self):
        assert assign([1, 2, 3], 2, home=[-1, -1, -1]).makespan == 3.0

    def test_limits_hold_at_home(self):
        plan = assign([1, 1, 1], 3, home=[0, 0, 0], home_tolerance=9.0, limits=Limits(items=2))
        assert np.bincount(plan.bin_of, minlength=3).max() == 2
        assert (plan.bin_of == 0).sum() == 2

    def test_no_cost_goes_home(self):
        assert assign([0, 0, 7], 2, home=[1, 1, 1]).bin_of.tolist() == [1, 1, 1]
        assert assign([0, 0], 2, home=[1, 1]).bin_of.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, -2.0], "num_bins": 1}, r"costs\[1\] is -2"),
        ({"costs": [math.nan], "num_bins": 1}, r"costs\[0\] is nan"),
        ({"costs": [math.inf], "num_bins": 1}, r"costs\[0\] is inf"),
        ({"costs": ["a"], "num_bins": 1}, "costs must be"),
        ({"costs": [[1.0]], "num_bins": 1}, r"costs must have one dimension, got shape \(1, 1\)"),
        ({"costs": [1e308, 1e308], "num_bins": 1}, "overflow"),
        ({"costs": [1.0]}, "num_bins and speeds are both missing"),
        ({"costs": [1.0], "num_bins": 0}, "num_bins is 0"),
        ({"costs": [1.0], "num_bins": 1.5}, "num_bins is 1.5"),
        ({"costs": [1.0], "num_bins": 2, "speeds": [1.0]}, "num_bins is 2, but speeds has 1"),
        ({"costs": [1.0], "speeds": []}, "speeds is empty"),
        ({"costs": [1.0], "speeds": [1.0, 0.0]}, "speeds from 0 to 1: leave out bins"),
        ({"costs": [1.0], "num_bins": 2, "carried_loads": [1.0]}, "carried_loads has 1 entries; 2"),
        ({"costs": [1.0], "num_bins": 1, "sizes": [1, 2]}, "sizes has 2 entries; 1"),
        ({"costs": [1.0], "num_bins": 1, "ranks_per_bin": [0]}, r"ranks_per_bin\[0\] is 0"),
        ({"costs": [1.0], "num_bins": 1, "limits": Limits(tokens=9)}, "sizes is missing"),
        (
            {"costs": [1.0], "num_bins": 1, "sizes": [1], "limits": Limits(tokens=9, num_bytes=9)},
            "only one of them",
        ),
        ({"costs": [1.0], "num_bins": 1, "home": [1]}, r"home\[0\] is 1"),
        ({"costs": [1.0], "num_bins": 1, "home": [0.0]}, "home must be 1 integers"),
        ({"costs": [1.0], "num_bins": 1, "home_tolerance": -0.1}, "home_tolerance is -0.1"),
        ({"costs": [1.0], "num_bins": 1, "tolerance": math.nan}, "tolerance is nan"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        assign(**arguments)  # type: ignore[arg-type]


def test_gap_of_an_empty_assignment_is_zero():
    empty = np.empty(0)
    assert Assignment(empty.astype(np.int64), empty, 0.0, 0.0).gap == 0.0


def test_groups_of_two_are_exchanged_where_single_items_do_not_help():
    """26 against 24: no item alone is 1 more than another, but 3 + 3 is 1 more than 5."""
    problem = problem_of([20.0, 3.0, 3.0, 5.0, 14.0, 5.0], [1.0, 1.0])
    start = np.array([0, 0, 0, 1, 1, 1])
    improved = improve(problem, start, problem.work.sum() / 2)
    assert np.bincount(improved, problem.costs).tolist() == [25.0, 25.0]


def test_an_item_that_comes_home_sends_back_what_gains_most():
    """Two items a bin: 0 wants to bin 1, where 2 and 3 want to bin 0."""
    problem = build_problem(np.ones(4), np.ones(2), limits=Limits(items=2))
    homes = Homes(np.array([1, 0, 0, 0]), np.array([9.0, 1.0, 1.0, 5.0]), np.inf)
    home = improve(problem, np.array([0, 0, 1, 1]), np.inf, homes)
    assert home.tolist() == [1, 0, 1, 0]
    assert homes.total_away(home) == 1.0


def test_spill_counts_the_part_of_an_item_that_does_not_fit():
    """12 tokens, 10 of which the fast bin holds: half of an item at least is on the slow one."""
    problem = build_problem(
        np.array([4.0, 4.0, 6.0]),
        np.array([1.0, 8.0]),
        limits=Limits(tokens=10),
        sizes={"": np.full(3, 4.0)},
        ranks=np.ones(2),
    )
    assert spill_bound(problem) == 2.0


def test_groups_of_two_repair_a_limit():
    """26 tokens of 25 on bin 0: 3 + 3 for 5 is the only exchange that keeps both limits."""
    sizes = np.array([20.0, 3.0, 3.0, 5.0, 14.0, 5.0])
    problem = build_problem(sizes, np.ones(2), limits=Limits(tokens=25), sizes={"": sizes})
    repaired = improve(problem, np.array([0, 0, 0, 1, 1, 1]), problem.work.sum())
    assert np.bincount(repaired, sizes).tolist() == [25.0, 25.0]


@pytest.mark.parametrize(("items", "expected"), [(2, [2, 2]), (3, [1, 3])])
def test_exchanges_keep_the_limit_of_items(items: int, expected: list[int]):
    """Bin 0 is late; all items are alike, so that no swap helps, but a move to bin 1 does."""
    problem = build_problem(
        np.full((2, 4), 5.0),
        np.ones(2),
        carried=np.array([20.0, 0.0]),
        limits=Limits(items=items),
        kind_of=np.array([0, 1]),
    )
    found = improve(problem, np.array([0, 0, 1, 1]), 25.0 / problem.unit)
    assert np.bincount(found).tolist() == expected


class TestKinds:
    def test_items_go_to_the_kind_on_which_they_cost_less(self):
        costs = np.array([[1.0, 1.0, 9.0, 9.0], [9.0, 9.0, 1.0, 1.0]])
        problem = build_problem(costs, np.ones(2), kind_of=np.array([0, 1]))
        found = solve(problem)
        assert found.bin_of.tolist() == [0, 0, 1, 1]
        assert found.bound == pytest.approx(2.0)

    @pytest.mark.parametrize("seed", range(20))
    def test_bound_and_answer_enclose_the_best_of_all(self, seed: int):
        rng = np.random.default_rng(seed)
        kind_of, limits = np.array([0, 0, 1]), Limits(items=3) if seed % 2 else None
        wires = rng.uniform(0.0, 3.0, size=6)
        costs = rng.uniform(1.0, 9.0, size=6) + np.outer([1.0, 2.0], wires)
        problem = build_problem(
            costs, np.ones(3), kind_of=kind_of, carried=rng.uniform(0.0, 3.0, 3), limits=limits
        )
        found = solve(problem)
        options = (np.array(option) for option in itertools.product(range(3), repeat=6))
        best = min(problem.loads(o).max() for o in options if not problem.excess(o))
        assert found.bound <= best * (1 + 1e-9)
        assert best <= problem.loads(found.bin_of).max() * (1 + 1e-9) <= best * 1.2
        assert not problem.excess(found.bin_of)


class TestFoundBy:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"costs": [], "num_bins": 2}, "nothing to do"),
            ({"costs": [2.0, 1.0], "num_bins": 2}, "longest first"),
            ({"costs": [3, 3, 2, 2, 2], "num_bins": 2}, "longest first, improved"),
            ({"costs": [4, 4], "num_bins": 2, "home": [1, 0]}, "relabelled"),
        ],
    )
    def test_names_the_stage(self, arguments: dict[str, object], name: str):
        assert assign(**arguments).found_by == name  # type: ignore[arg-type]

    def test_names_the_repair_of_limits(self):
        costs, sizes = [10.0, 5.0, 5.0], [1.0, 9.0, 9.0]
        plan = assign(costs, 2, sizes=sizes, limits=Limits(tokens=10))
        assert plan.found_by == "longest first, improved"


def test_a_limit_on_items_is_kept_from_the_start_and_bounded_by_company() -> None:
    """A giant in a bin that must hold three items: the two shortest keep it company."""
    costs = [90, 9, 8, 7, 6, 5, 4, 3, 2]
    plan = assign(costs, 3, limits=Limits(items=3))
    assert plan.makespan == 95.0 == plan.lower_bound and plan.gap == 0.0
    assert plan.found_by == "longest first, counted"
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
    assert not Limits(tokens=9).keeps(tokens=tokens, items=items)
    assert not Limits(items=1).keeps(tokens=tokens, items=items)
    assert not Limits(num_bytes=9).keeps(num_bytes=tokens)
