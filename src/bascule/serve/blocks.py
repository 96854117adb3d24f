"""Blocks of ranks that compute a request together, and what is reported of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bascule.comm.groups import RankGroup
from bascule.diffusers.degrees import Replica, Shape, replica_over
from bascule.plan.requests import Block as Block


def shape_of_block(degree: int, num_heads: int, num_groups: int = 1) -> Shape:
    """Return the mesh of a block: guidance groups, whose ranks share heads; the rest is a ring."""
    groups = math.gcd(degree, num_groups)
    ulysses = min(degree // groups, 1 << (max(num_heads, 1).bit_length() - 1))
    return Shape(1, groups, degree // groups // ulysses, ulysses)


def places_of(
    control: RankGroup, attending: RankGroup, shapes: Mapping[int, Shape], size: int = 1
) -> dict[Block, Replica]:
    """Return this rank's place in each of its blocks. No collective.

    Args:
        control: All ranks, on the host.
        attending: All ranks, for attention.
        shapes: The mesh of a block by its degree.
        size: Ranks that a block counts as one.
    """
    unit, places = control.rank // size, dict[Block, Replica]()
    for degree, shape in shapes.items():
        block = Block(unit // degree * degree, degree)
        ranks = range(block.first * size, (block.first + degree) * size)
        if ranks.stop <= control.size:
            whole = attending.part(ranks, str(ranks))
            whole = replace(whole, control=control.part(ranks, str(ranks)))
            places[block] = replica_over(whole, shape)
    return places


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
