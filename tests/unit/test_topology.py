import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.topology import Topology


@pytest.mark.parametrize(
    ("spec", "bad_term"),
    [
        ("", "''"),
        ("g1n4junk", "'g1n4junk'"),
        ("junkg1n4", "'junkg1n4'"),
        ("g0n4", "'g0n4'"),
        ("g1n0", "'g1n0'"),
        ("g01n2", "'g01n2'"),
        ("g1n02", "'g1n02'"),
        ("g1n4+", "''"),
        ("+g1n4", "''"),
        ("g1n4++g2n1", "''"),
        ("g1n4,g2n1", "'g1n4,g2n1'"),
        (" g1n4", "' g1n4'"),
        ("g1n4 ", "'g1n4 '"),
        ("g1n4 + g2n1", "'g1n4 '"),
        ("g1 n4", "'g1 n4'"),
        ("g1n4\n", r"'g1n4\\n'"),
        ("g1n\u0664", "'g1n\u0664'"),
        ("g\u00b2n4", "'g\u00b2n4'"),
        ("g-1n4", "'g-1n4'"),
        ("g1.0n4", "'g1.0n4'"),
        ("G1N4", "'G1N4'"),
        ("g1", "'g1'"),
        ("n4g1", "'n4g1'"),
        ("g2n1+x+g1n2", "'x'"),
        ("g1n" + "9" * 5000, "'g1n999"),
    ],
)
def test_a_malformed_term_is_named(spec: str, bad_term: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){bad_term}.*is not a term.*gGnN"):
        Topology.parse(spec)


@pytest.mark.parametrize(
    "spec", ["g1n1", "g1n32", "g8n4", "g1n2+g2n1+g4n1", "g4n1+g1n4", "g2n1+g2n1"]
)
def test_text_and_back(spec: str) -> None:
    topology = Topology.parse(spec)
    assert str(topology) == spec
    assert Topology.parse(str(topology)) == topology
    assert Topology.parse(topology) == topology


def test_bags_are_contiguous_in_the_order_written() -> None:
    topology = Topology.parse("g1n2+g2n1+g4n1")
    assert topology.bags == ((0,), (1,), (2, 3), (4, 5, 6, 7))
    assert (topology.num_ranks, topology.num_bags, topology.unit_size) == (8, 4, 8)
    assert Topology.parse("g4n1+g1n2").bags == ((0, 1, 2, 3), (4,), (5,))


def test_replicas_fill_the_world() -> None:
    topology = Topology.parse("g1n1+g2n1", world_size=9)
    assert topology.num_replicas == 3
    assert topology.num_ranks == 9
    assert topology.bags == ((0,), (1, 2), (3,), (4, 5), (6,), (7, 8))
    assert str(topology) == "g1n1+g2n1"
    assert Topology.parse(topology) == topology
    assert Topology.parse(topology, world_size=3).num_replicas == 1


def test_arrays_say_what_bags_say_and_cannot_be_written() -> None:
    topology = Topology.parse("g1n3+g4n2+g2n1", world_size=26)
    for bag, ranks in enumerate(topology.bags):
        assert topology.bag_sizes[bag] == len(ranks)
        assert topology.first_ranks[bag] == ranks[0]
        assert np.all(topology.bag_of_rank[list(ranks)] == bag)
    assert [rank for bag in topology.bags for rank in bag] == list(range(26))
    for array in (topology.bag_sizes, topology.first_ranks, topology.bag_of_rank):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


@pytest.mark.parametrize(
    ("spec", "world_size", "nearest"),
    [
        ("g8n4", 31, 32),
        ("g8n4", 1, 32),
        ("g8n4", 0, 32),
        ("g8n4", 33, 32),
        ("g8n4", 63, 64),
        ("g1n1+g2n1", 8, 9),
        ("g1n1+g2n1", 7, 6),
    ],
)
def test_a_world_that_does_not_fit(spec: str, world_size: int, nearest: int) -> None:
    with pytest.raises(ConfigError) as error:
        Topology.parse(spec, world_size=world_size)
    unit = Topology.parse(spec).unit_size
    assert f"units of {unit} ranks" in str(error.value)
    assert f"world of {world_size}:" in str(error.value)
    assert f"use {nearest} ranks" in str(error.value)
    assert Topology.parse(spec, world_size=nearest).num_ranks == nearest


@pytest.mark.parametrize(
    "arguments",
    [((),), (((0, 1),),), (((1, -1),),), (((1, 2),), 0), (((1, 2),), 1.5), (((1.0, 2),),)],
)
def test_a_topology_needs_whole_bags(arguments: tuple) -> None:
    with pytest.raises(ConfigError, match=r"(?i)topology"):
        Topology(*arguments)


def test_a_topology_is_a_value() -> None:
    one, other = Topology.parse("g2n2"), Topology.parse("g2n2")
    assert one == other
    assert hash(one) == hash(other)
    assert one != Topology.parse("g2n2", world_size=8)
    with pytest.raises(AttributeError):
        one.num_replicas = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_topology_that_fits_is_taken_with_the_tables_it_has_computed() -> None:
    topology = Topology.parse("g1n2+g2n1", world_size=8)
    assert Topology.parse(topology) is topology
    assert Topology.parse(topology, world_size=8) is topology
    assert Topology.parse(topology, world_size=4).num_replicas == 1
