"""A wait ends for a rank that failed before it came, and for no other."""

from dataclasses import replace

import pytest

from bascule.comm.guard.notes import Failure
from bascule.comm.guard.verdicts import judge

FAILED = Failure("here", cause="oops", is_input=True, done={"all": 5})


@pytest.mark.parametrize(
    ("own", "failed"),
    [
        (None, None),
        (None, Failure("here", cause="oops", done={"all": 6})),  # it failed after it had come
        (None, Failure("here", cause="oops", done={"all": 5}, came={"all": 6})),
        (None, Failure("here", cause="oops", done={"all": 5}, goes_on=True)),
        (None, Failure("here", done={"all": 5})),  # it only noticed that others failed
        (FAILED, FAILED),  # all failed alike, and this one was the first to go on
        (replace(FAILED, came={"all": 6}), FAILED),
    ],
)
def test_a_rank_that_may_come_is_waited_for(own: Failure | None, failed: Failure | None) -> None:
    assert judge("all", 5, (1, 2), own, {2: failed}.get) is None


@pytest.mark.parametrize("own", [None, Failure("there", cause="oops", done={"all": 4})])
def test_a_rank_that_failed_before_does_not_come(own: Failure | None) -> None:
    verdict = judge("all", 5, (1, 2), own, {2: FAILED}.get)
    assert verdict is not None and verdict.is_input
    assert verdict.text == "rank 2 failed in here: oops"
