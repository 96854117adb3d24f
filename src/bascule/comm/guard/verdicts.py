"""Whether a wait for other ranks can ever end, from how they failed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bascule.comm.guard.notes import Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a wait can never end.

    Attributes:
        text: As errors say it.
        is_input: Whether a rank was given bad input.
    """

    text: str
    is_input: bool = False


def judge(
    group: str,
    number: int,
    needs: Sequence[int],
    own: Failure | None,
    failure_of: Callable[[int], Failure | None],
) -> Verdict | None:
    """Why a wait can never end, or None if it may.

    A rank that is needed failed before this call, and has not made it since. One that failed where
    this one failed, too, met what all did. It is certain if it is found twice.

    Args:
        group: Key of the group of the call.
        number: Of the call.
        needs: Global ranks of the others.
        own: How this rank failed; None if it did not, or went on.
        failure_of: The same of another rank.
    """
    for other in needs:
        failed = failure_of(other)
        if failed is None or failed.goes_on or not failed.cause:
            continue
        is_alike = own is not None and own.done.get(group) == failed.done.get(group)
        num_came = max(failed.done.get(group, 0), failed.came.get(group, 0))
        if num_came <= number and not is_alike:
            return Verdict(failed.told_of(other), failed.is_input)
    return None
