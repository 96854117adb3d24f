"""Bags of ranks that share sequences: the topology grammar of KnapFormer (section 3.2), extended.

`g1n2+g2n1+g4n1` is a unit of eight ranks: two bags of one rank, one of two and one of four.
Replicas of the unit fill a larger world, each on the next contiguous ranks.

`g4r2n1` is one bag of eight ranks with a ring: groups of four ranks share the heads of a sequence
(Ulysses), and two such groups pass its keys and values around. Source of the two degrees: USP
(arXiv:2405.07719), as in FastUSP.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from bascule.arrays import Ints, frozen
from bascule.checks import MAX_RANKS, each, fields, of_type, shown, whole
from bascule.errors import ConfigError

Degrees = tuple[int, int]
"""Ring degree, Ulysses degree: the order of a mesh's axes, the last of which changes fastest."""


def all_degrees(num_ranks: int) -> list[Degrees]:
    """Return the (ring, Ulysses) degrees of all meshes of `num_ranks`, largest Ulysses first."""
    return [(ring, num_ranks // ring) for ring in range(1, num_ranks + 1) if num_ranks % ring == 0]


_NUMBER = "([1-9][0-9]{0,8})"
_TERM = re.compile(f"g{_NUMBER}(?:r{_NUMBER})?n{_NUMBER}")


class BagPlace(NamedTuple):
    """The place of a rank in its bag."""

    bag: int  # number of the bag in the topology
    ring: int  # ring rank
    ulysses: int  # Ulysses rank
    ulysses_degree: int  # ranks that share heads, this one included


@dataclass(frozen=True)
class Topology:
    """Compute bags: groups of ranks that share each sequence assigned to them.

    Attributes:
        terms: (ranks in a bag, number of such bags) in the order written; one unit.
        num_replicas: How many times the unit is repeated to fill the world.
        rings: Ring degree of the bags of each term, a divisor of their ranks; () if all are 1.
    """

    terms: tuple[tuple[int, int], ...]
    num_replicas: int = 1
    rings: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fields(self, terms=(each, _term), num_replicas=(whole, 1), rings=(each, whole, 1))
        if not self.terms:
            raise ConfigError("topology without terms: needs at least one bag")
        is_short = bool(self.rings) and len(self.rings) != len(self.terms)
        if is_short or any(size % ring for size, _, ring in self._terms_with_rings):
            wrong = f"topology {shown(self.terms)} with rings {shown(self.rings)}"
            raise ConfigError(f"{wrong}: give a divisor of the ranks of a bag for each term")
        if max(self.rings, default=1) == 1:
            object.__setattr__(self, "rings", ())
        if self.num_ranks > MAX_RANKS:
            wrong = f"topology {self} has {shown(self.num_ranks)} ranks, at most {MAX_RANKS}"
            raise ConfigError(f"{wrong} can be planned for: use fewer bags, or smaller ones")

    @classmethod
    def parse(cls, spec: "str | Topology", *, world_size: int | None = None) -> "Topology":
        """Read terms joined by `+`; with `world_size`, replicas of the unit fill that world.

        Args:
            spec: For example "g1n8+g4r2n3". Of a Topology the unit is taken.
            world_size: Number of ranks to fill; None keeps one unit.

        Raises:
            ConfigError: A term is malformed, or whole units cannot fill the world.
        """
        if isinstance(spec, Topology) and world_size in (None, spec.num_ranks):
            return spec  # with the tables that it has computed
        of_type("topology", spec, (str, Topology), 'a spec such as "g1n8+g4r2n3", or a Topology')
        return _parse(spec, None if world_size is None else whole("world_size", world_size))

    def __str__(self) -> str:
        """Return the spec of one unit."""
        return "+".join(
            f"g{size // ring}{f'r{ring}' if ring > 1 else ''}n{count}"
            for size, count, ring in self._terms_with_rings
        )

    @cached_property
    def unit_size(self) -> int:
        """Ranks in one unit."""
        return sum(size * count for size, count in self.terms)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks in all replicas."""
        return self.unit_size * self.num_replicas

    @property
    def num_bags(self) -> int:
        """Bags in all replicas."""
        return len(self.bag_sizes)

    @cached_property
    def bag_sizes(self) -> Ints:
        """(num_bags,) ranks in each bag."""
        unit = np.concatenate([np.full(count, size, np.int64) for size, count in self.terms])
        return frozen(np.tile(unit, self.num_replicas))

    @cached_property
    def first_ranks(self) -> Ints:
        """(num_bags,) lowest rank of each bag; a bag's ranks are contiguous."""
        return frozen(np.cumsum(self.bag_sizes) - self.bag_sizes)

    @cached_property
    def bag_of_rank(self) -> Ints:
        """(num_ranks,) bag of each rank."""
        return frozen(np.repeat(np.arange(self.num_bags), self.bag_sizes))

    @cached_property
    def bags(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every bag, all replicas included."""
        return tuple(
            tuple(range(first, first + size))
            for first, size in zip(self.first_ranks.tolist(), self.bag_sizes.tolist(), strict=True)
        )

    @cached_property
    def ring_degrees(self) -> Ints:
        """(num_bags,) ring degree of each bag; ranks over ring degree is the Ulysses degree."""
        rings = [np.full(count, ring, np.int64) for _, count, ring in self._terms_with_rings]
        return frozen(np.tile(np.concatenate(rings), self.num_replicas))

    @cached_property
    def ulysses_groups(self) -> "Topology":
        """The topology whose bags are this one's Ulysses groups, which share heads."""
        terms = tuple((size // ring, count * ring) for size, count, ring in self._terms_with_rings)
        return Topology(terms, self.num_replicas)

    def place_of(self, rank: int) -> "BagPlace":
        """Return where a rank is in its bag."""
        bag = int(self.bag_of_rank[rank])
        degree = int(self.bag_sizes[bag]) // int(self.ring_degrees[bag])
        ring, ulysses = divmod(rank - int(self.first_ranks[bag]), degree)
        return BagPlace(bag, ring=ring, ulysses=ulysses, ulysses_degree=degree)

    def ring(self, rank: int) -> range:
        """Return the ranks of the ring of `rank`, in ring order: one rank of each Ulysses group."""
        bag, _, ulysses, degree = self.place_of(rank)
        first = int(self.first_ranks[bag])
        return range(first + ulysses, first + int(self.bag_sizes[bag]), degree)

    def for_heads(self, num_heads: int | None) -> "Topology":
        """Return the topology with longer rings in bags with fewer heads than Ulysses ranks."""
        if num_heads is None:
            return self
        rings: list[int] = []
        for size, _, ring in self._terms_with_rings:
            degrees = (degree for degree in range(1, num_heads + 1) if size % degree == 0)
            rings.append(ring if size // ring <= num_heads else size // max(degrees))
        return replace(self, rings=tuple(rings))

    @property
    def _terms_with_rings(self) -> list[tuple[int, int, int]]:
        """(ranks in a bag, number of such bags, ring degree) of each term."""
        rings = self.rings or (1,) * len(self.terms)
        return [(*term, ring) for term, ring in zip(self.terms, rings, strict=True)]


def _term(name: str, value: object) -> tuple[int, ...]:
    """Check the ranks in a bag and the number of such bags."""
    term = each(name, value, whole, 1)
    if len(term) != 2:
        raise ConfigError(f"{name}={shown(value)}): give ranks in a bag, and number of such bags")
    return term


@lru_cache(maxsize=256)  # with the tables that a topology has computed
def _parse(spec: str | Topology, world_size: int | None) -> Topology:
    """Read a spec, or take a topology's unit; repeat it until it fills the world."""
    if isinstance(spec, Topology):
        unit = Topology(spec.terms, rings=spec.rings)
    else:
        parsed = [_parse_term(term, spec) for term in spec.split("+")]
        terms = tuple((degree * ring, count) for degree, ring, count in parsed)
        unit = Topology(terms, rings=tuple(ring for _, ring, _ in parsed))
    if world_size is None:
        return unit
    size = unit.unit_size
    if world_size < 1 or world_size % size:
        legal = size * max(1, (2 * world_size + size) // (2 * size))
        wrong = f"topology {unit} needs {size} ranks, or a multiple, and there are {world_size}"
        alone = f", or g1n{world_size}, where each rank computes alone" * (world_size > 0)
        raise ConfigError(f"{wrong}: use {legal} ranks{alone}")
    return replace(unit, num_replicas=world_size // size)


def _parse_term(term: str, spec: str) -> tuple[int, int, int]:
    """Read the Ulysses degree, the ring degree and the number of bags of a term."""
    match = _TERM.fullmatch(term)
    if match is None:
        place = "" if term == spec else f" {shown(term)} is not a term;"
        raise ConfigError(
            f"topology {shown(spec)}:{place} write gGnN (N bags of G ranks) or gGrRnN (of G * R "
            'ranks, R the ring degree), all at least one, joined by "+", as in g1n8+g4r2n3'
        )
    return int(match[1]), int(match[2] or 1), int(match[3])
