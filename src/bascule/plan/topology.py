"""Which ranks work together: the topology grammar of KnapFormer (section 3.2), made total.

`g1n2+g2n1+g4n1` is two bags of one rank, one bag of two and one bag of four: a unit of eight ranks.
A larger world is filled with replicas of the unit, each on the next contiguous ranks.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.layout import frozen

_TERM = re.compile(r"g([1-9][0-9]{0,8})n([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Topology:
    """Compute bags: groups of ranks that share each sequence assigned to them.

    Attributes:
        terms: (ranks in a bag, number of such bags) in the order written; one unit.
        num_replicas: How many times the unit is repeated to fill the world.
    """

    terms: tuple[tuple[int, int], ...]
    num_replicas: int = 1

    def __post_init__(self) -> None:
        numbers = (*(number for term in self.terms for number in term), self.num_replicas)
        if not all(type(number) is int for number in numbers):
            raise ConfigError(f"topology {self.terms!r} x {self.num_replicas!r}: not whole numbers")
        if not self.terms or any(size < 1 or count < 1 for size, count in self.terms):
            raise ConfigError(
                f"topology {self.terms!r}: needs at least one bag, each of at least one rank"
            )
        if self.num_replicas < 1:
            raise ConfigError(f"topology with {self.num_replicas} replicas: needs at least one")

    @classmethod
    def parse(cls, spec: "str | Topology", *, world_size: int | None = None) -> Self:
        """Read `gGnN` terms joined by `+`; with `world_size`, replicas of the unit fill that world.

        Args:
            spec: For example "g1n8+g8n3". A Topology is taken as the unit that it describes.
            world_size: Number of ranks to fill; None keeps one unit.

        Raises:
            ConfigError: A term is malformed (it is named), or whole units cannot fill the world.
        """
        if isinstance(spec, Topology):
            terms = spec.terms
            world_size = spec.num_ranks if world_size is None else world_size
        else:
            terms = tuple(_parse_term(term, spec) for term in spec.split("+"))
        unit = sum(size * count for size, count in terms)
        if world_size is None:
            return cls(terms)
        if world_size < 1 or world_size % unit:
            legal = unit * max(1, round(world_size / unit))
            raise ConfigError(
                f"topology {_spec(terms)} has units of {unit} ranks, which do not fill a world of "
                f"{world_size}: use {legal} ranks, or bags that add up to a divisor of {world_size}"
            )
        return cls(terms, world_size // unit)

    def __str__(self) -> str:
        """The spec of one unit."""
        return _spec(self.terms)

    @property
    def unit_size(self) -> int:
        """Ranks in one unit."""
        return sum(size * count for size, count in self.terms)

    @property
    def num_ranks(self) -> int:
        """Ranks in all replicas."""
        return self.unit_size * self.num_replicas

    @property
    def num_bags(self) -> int:
        """Bags in all replicas."""
        return len(self.bag_sizes)

    @cached_property
    def bag_sizes(self) -> npt.NDArray[np.int64]:
        """(num_bags,) ranks in each bag."""
        unit = np.concatenate([np.full(count, size, np.int64) for size, count in self.terms])
        return frozen(np.tile(unit, self.num_replicas))

    @cached_property
    def first_ranks(self) -> npt.NDArray[np.int64]:
        """(num_bags,) lowest rank of each bag; a bag's ranks are contiguous."""
        return frozen(np.cumsum(self.bag_sizes) - self.bag_sizes)

    @cached_property
    def bag_of_rank(self) -> npt.NDArray[np.int64]:
        """(num_ranks,) bag of each rank."""
        return frozen(np.repeat(np.arange(self.num_bags), self.bag_sizes))

    @cached_property
    def bags(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every bag, all replicas included."""
        return tuple(
            tuple(range(first, first + size))
            for first, size in zip(self.first_ranks.tolist(), self.bag_sizes.tolist(), strict=True)
        )


def _parse_term(term: str, spec: str) -> tuple[int, int]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise ConfigError(
            f"topology {spec!r}: {term!r} is not a term; write gGnN (N bags of G ranks, both at "
            'least one) joined by "+", for example g1n8+g8n3'
        )
    return int(match[1]), int(match[2])


def _spec(terms: tuple[tuple[int, int], ...]) -> str:
    return "+".join(f"g{size}n{count}" for size, count in terms)
