"""Plans stay what they are: digests and makespans of recorded cases."""

import pytest

from tests.goldens.plans import cases, read_table, solve

FAMILIES = ("free", "capped", "kinds", "home", "tight", "few", "sparse")


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_are_those_recorded(family: str) -> None:
    expected = {name: row for name, row in read_table().items() if name.split()[0] == family}
    calls = {name: call for name, call in cases().items() if name.split()[0] == family}
    assert calls.keys() == expected.keys() and calls
    for name, call in calls.items():
        plan, recorded = solve(call), expected[name]
        if plan is None or recorded is None:
            assert plan is recorded, name
        else:
            assert plan[0] == recorded[0], name
            assert plan[1] == pytest.approx(recorded[1], rel=1e-12), name
