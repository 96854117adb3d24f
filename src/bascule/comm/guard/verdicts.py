"""Whether a wait for other ranks can ever end, from where they say they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bascule.comm.guard.notes import Failure, Position, Waiting

MOST_READ = 64
"""Notes of other ranks that one look may read."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a wait can never end.

    Attributes:
        text: As errors say it.
        evidence: (rank, id of its wait) along a way of waits, (rank, None) at its end if that rank
            failed; what must be found twice to be certain. Empty if it is.
        is_input: Whether a rank was given bad input.
    """

    text: str
    evidence: tuple[tuple[int, int | None], ...] = ()
    is_input: bool = False


def judge(
    rank: int,
    wait: Waiting,
    position_of: Callable[[int], Position | None],
    failure_of: Callable[[int], Failure | None],
) -> Verdict | None:
    """Why a wait can never end, or None if it may.

    Certain at once if a rank that is needed made another call in place of this one. Otherwise a
    rank that is needed failed before this call, and has not made it since; or a way from rank to
    rank, each waiting in a call that the next has not made, comes back to this one. These are
    certain if they are found twice. A rank that fails where this one failed, too, met what all did;
    and one that waits for a rank that failed will not wait for ever.

    Args:
        rank: Whose wait it is.
        wait: The wait.
        position_of: Where a rank is, this one included; None for another that does not wait.
        failure_of: How a rank failed, this one included; None for one that did not, or went on.
    """
    seen: set[tuple[int, int]] = set()

    def failure_before(at: Waiting, other: int) -> Failure | None:
        failed, own = failure_of(other), failure_of(rank)
        if failed is None or failed.goes_on or not failed.cause:
            return None
        if failed.done.get(at.group, 0) > at.number:
            return None
        is_alike = (
            other != rank
            and own is not None
            and own.done.get(at.group) == failed.done.get(at.group)
        )
        return None if is_alike else failed

    def follow(of: int, at: Waiting, way: list[tuple[int, Waiting]]) -> Verdict | None:
        way = [*way, (of, at)]
        evidence = tuple((who, where.id) for who, where in way)
        for other in at.needs:
            position = position_of(other)
            begun = (
                {one[0]: one[1:] for one in position.begun.get(at.group, ())} if position else {}
            )
            if at.number in begun and begun[at.number][0] != at.mark:
                return Verdict(_unlike(of, at, other, begun, position_of(of)))
            if (begun and max(begun) >= at.number) or _is_there(at, position):
                continue  # it came; its part is on the way
            failed = failure_before(at, other) if at.on is None else None
            if failed is not None and of == rank:
                return Verdict(failed.told_of(other), (*evidence, (other, None)), failed.is_input)
            if failed is not None or position is None:
                continue
            maker = position.threads.get(at.group, position.main)
            thread = maker if at.on is None else at.on
            for after in (one for one in position.waits if one.thread == thread):
                if (other, after.id) == (rank, wait.id):
                    calls = [at for _, at in way[1:] if at.on is None]
                    others = ((at, who) for at in calls for who in at.needs[:MOST_READ])
                    is_broken = any(failure_before(at, who) is not None for at, who in others)
                    return None if is_broken else Verdict(_circle(way), evidence)
                if (other, after.id) not in seen:
                    seen.add((other, after.id))
                    found = follow(other, after, way)
                    if found is not None:
                        return found
        return None

    return follow(rank, wait, [])


def _is_there(at: Waiting, position: Position | None) -> bool:
    """Whether a rank is in the same wait: a meeting has no calls that it could have begun."""
    waits = () if position is None or at.on is not None else position.waits
    return any((one.group, one.number) == (at.group, at.number) for one in waits)


def _unlike(
    rank: int,
    wait: Waiting,
    other: int,
    theirs: Mapping[int, tuple[int, str]],
    position: Position | None,
) -> str:
    """Names the first calls that differ: marks tell of all calls before, too."""
    own = {wait.number: (wait.mark, wait.text)}
    if position is not None:
        own |= {one[0]: one[1:] for one in position.begun.get(wait.group, ())}
    both = sorted(own.keys() & theirs.keys())
    first = next((number for number in both if own[number][0] != theirs[number][0]), wait.number)
    mine, other_one = own[first][1], theirs[first][1]
    if mine == other_one.partition(" on ")[0] or mine.partition(" on ")[0] == other_one:
        other_one += " of another form (shapes, dtypes, a mask, a scale, a kernel)"
    return (
        f"ranks make unlike calls: rank {rank} made {mine} where rank {other} made "
        f"{other_one}: all ranks must make the same calls, with the same settings, in the "
        "same order"
    )


def _circle(way: list[tuple[int, Waiting]]) -> str:
    said = "; ".join(f"rank {rank} in {wait.text}" for rank, wait in way)
    return (
        f"ranks wait for each other for ever: {said}: all ranks must make the same calls in the "
        "same order"
    )
