"""Blocks of ranks that compute a request together, and what is reported of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh, mesh_over
from bascule.errors import ConfigError
from bascule.plan.checks import is_int
from bascule.plan.requests import Block as Block


def check_block(block: Block, num_ranks: int) -> Block:
    """Return a block, or raise ConfigError if so many ranks do not have it."""
    first, degree = block
    if not is_int(first) or not is_int(degree) or degree < 1 or degree & (degree - 1):
        raise ConfigError(f"{block!r}: its degree must be a power of two, and its first a rank")
    if first < 0 or first % degree or first + degree > num_ranks:
        raise ConfigError(
            f"{block!r} of {num_ranks} ranks: it must begin at a multiple of its degree, and end "
            f"at rank {num_ranks - 1} at most"
        )
    return Block(first, degree)


class Place(NamedTuple):
    """This rank's place in one of its blocks."""

    control: RankGroup | None  # on the host; None for one rank
    mesh: AttentionMesh


def places_of(control: RankGroup, attending: RankGroup, num_heads: int) -> dict[Block, Place]:
    """Return this rank's place in each of its blocks. No collective.

    The ranks of a block share heads; where they are more than the heads, the rest is a ring.
    """
    return dict(_places(control, attending, num_heads))


def _places(
    control: RankGroup, attending: RankGroup, num_heads: int
) -> Iterator[tuple[Block, Place]]:
    rank, degree = control.rank, 1
    yield Block(rank, 1), Place(None, AttentionMesh(None, None, None))
    while (degree := 2 * degree) <= control.size:
        block = Block(rank // degree * degree, degree)
        if block.first + degree <= control.size:
            ours = control.part(block.ranks, str(block))
            whole = replace(attending.part(block.ranks, str(block)), control=ours)
            ulysses = min(degree, 1 << (max(num_heads, 1).bit_length() - 1))
            yield block, Place(ours, mesh_over(whole, degree // ulysses, ulysses))


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request.

    Attributes:
        kind: "step": `step` steps are done, and the request may change ranks here; 0 means that
            its prompts are encoded. "halted": it waits for an order. "moved": it goes on, on
            `block`. "paused", "cancelled". "done": `output` is there. "failed": for `reason`.
            "refused": it could not move or pause, for `reason`, and goes on. "ended": the engine
            ended, for `reason` unless it was closed.
        request_id: Empty for "ended".
        time: When rank 0 knew, by its `time.monotonic`.
        block: The ranks that computed, or after a move compute, it.
        step: Steps done.
        num_steps: Of the request; None if the pipeline does not say.
        seconds: That the step took, or the encoding; for "moved" that the first rank waited for the
            others, for "done" that decoding took.
        reason: For people.
        output: Images of PIL, frames, arrays or tensors, as the pipeline returns them first.
    """

    kind: str
    request_id: str
    time: float
    block: Block
    step: int = 0
    num_steps: int | None = None
    seconds: float = 0.0
    reason: str = ""
    output: Any = None
