"""The solver against brute force and against an exact integer program, on small cases."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from bascule.errors import PlanError
from bascule.plan.limits import Limits
from bascule.plan.solver.bounds import lower_bound
from bascule.plan.solver.portfolio import by_speed, longest_first
from bascule.plan.solver.problem import build_problem
from bascule.plan.solver.solve import assign


@dataclass(frozen=True)
class Case:
    """Arguments of ``assign`` that a test draws."""

    costs: list[float]
    speeds: list[float]
    carried: list[float]
    sizes: list[int]
    limits: Limits

    def problem(self):
        return build_problem(
            np.array(self.costs, np.float64),
            np.array(self.speeds, np.float64),
            carried=np.array(self.carried, np.float64),
            limits=self.limits,
            sizes={"": np.array(self.sizes, np.float64)},
        )

    def assign(self, **extra: object):
        return assign(
            self.costs,
            speeds=self.speeds,
            initial_loads=self.carried,
            sizes=self.sizes,
            limits=self.limits,
            tolerance=0.0,
            **extra,  # type: ignore[arg-type]
        )

    def loads(self, bin_of: np.ndarray) -> np.ndarray:
        work = np.bincount(bin_of, weights=self.costs, minlength=len(self.speeds))
        return np.array(self.carried) + work / np.array(self.speeds)

    def legal(self, bin_of: np.ndarray) -> bool:
        num_bins = len(self.speeds)
        held = np.bincount(bin_of, weights=self.sizes, minlength=num_bins)
        counts = np.bincount(bin_of, minlength=num_bins)
        tokens = self.limits.tokens or np.inf
        return bool(
            (held <= tokens * np.array(self.speeds)).all()
            and counts.max() <= (self.limits.items or np.inf)
        )

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
    num_items = draw(st.integers(0 if not limited else 1, max_items))
    num_bins = draw(st.integers(1, 3))
    same = draw(st.booleans())
    speeds = [1.0] * num_bins if same else draw(_lists(SPEED, num_bins))
    carried = draw(st.one_of(st.just([0.0] * num_bins), _lists(st.floats(0.0, 30.0), num_bins)))
    limits = Limits()
    if limited:
        limits = Limits(
            tokens=draw(st.one_of(st.none(), st.integers(1, 30))),
            items=draw(st.one_of(st.none(), st.integers(1, 4))),
        )
    return Case(
        draw(_lists(COST, num_items)),
        speeds,
        carried,
        draw(_lists(st.integers(0, 20), num_items)),
        limits,
    )


def _lists(elements: st.SearchStrategy, size: int):
    return st.lists(elements, min_size=size, max_size=size)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_bound_holds_and_answers_are_close_to_the_best(case: Case):
    plan, best = case.assign(), case.best()
    np.testing.assert_allclose(plan.loads, case.loads(plan.bin_of))
    assert plan.makespan == plan.loads.max()
    assert lower_bound(case.problem()) <= best * (1 + 1e-9)
    assert plan.lower_bound <= plan.makespan
    assert best * (1 - 1e-9) <= plan.makespan <= best * 1.34 + 1e-9


@settings(deadline=None, max_examples=150)
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


@settings(deadline=None, max_examples=25)
@given(cases(max_items=10))
def test_bound_and_answer_enclose_the_integer_program(case: Case):
    if not case.costs:
        return
    optimum = exact_makespan(case)
    plan = case.assign()
    assert plan.lower_bound <= optimum * (1 + 1e-6) + 1e-6
    assert optimum <= plan.makespan * (1 + 1e-6) + 1e-6


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


@settings(deadline=None, max_examples=100)
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


def exact_makespan(case: Case) -> float:
    """The best makespan by integer programming (HiGHS)."""
    items, bins = len(case.costs), len(case.speeds)
    cells = items * bins
    once = np.zeros((items, cells + 1))
    times = np.zeros((bins, cells + 1))
    for item, bin_ in product(range(items), range(bins)):
        once[item, item * bins + bin_] = 1.0
        times[bin_, item * bins + bin_] = case.costs[item] / case.speeds[bin_]
    times[:, -1] = -1.0
    result = milp(
        np.append(np.zeros(cells), 1.0),
        integrality=np.append(np.ones(cells, dtype=np.int64), 0),
        bounds=Bounds(0.0, np.append(np.ones(cells), np.inf)),
        constraints=[
            LinearConstraint(once, 1.0, 1.0),
            LinearConstraint(times, -np.inf, -np.array(case.carried)),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0
    return float(result.fun)
