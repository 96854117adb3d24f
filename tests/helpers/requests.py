"""Requests as published measurements have them."""

from collections.abc import Sequence
from dataclasses import replace

from bascule.plan.requests import Request
from benchmarks import published


def random4(
    rate: float, seed: int, *, degrees: Sequence[int] = (1,), num: int = 500
) -> list[Request]:
    """Four sizes in random order, one each 1 / rate seconds."""
    mix = published.random4()
    kinds = [replace(one, step_s={d: one.step_s[d] for d in degrees}) for one in mix.kinds]
    return replace(mix, kinds=kinds, most=num).draw(rate, seed)


def gf_dit(load: float, num_ranks: int, seed: int) -> list[Request]:
    """Clips of Wan in phases, whose work is a share of what the ranks can do."""
    mix = published.gf_dit_wan("tridentserve")
    return mix.draw(mix.scale(load, num_ranks), seed)
