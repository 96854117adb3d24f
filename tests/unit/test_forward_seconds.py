"""Seconds of a forward pass, by hand."""

from dataclasses import replace

import pytest

from bascule.errors import ConfigError
from bascule.plan.machine import HardwareProfile, RankWork, Wires, layer_seconds

PROFILE = HardwareProfile(
    device="paper",
    matmul_flops_per_s=100.0,
    attention_flops_per_s=50.0,
    intra_bytes_per_s=10.0,
    inter_bytes_per_s=2.0,
    launch_s=0.25,
)
WORK = RankWork(
    linear_flops=400.0,
    attention_flops=100.0,
    heads_bytes=30.0,
    ring_bytes=0.0,
    num_exchanges=2,
    num_rounds=0,
    num_kernels=8,
)


def test_ulysses_in_a_node_and_over_two() -> None:
    near = layer_seconds([WORK] * 4, Wires(1, 4, 4), PROFILE)
    assert (near.linear_s, near.attention_s, near.ring_s, near.launch_s) == (4.0, 2.0, 0.0, 0.5)
    assert near.heads_s == pytest.approx(3.0)
    assert near.total == pytest.approx(9.5)
    # Of the three others, one is in the node and two are not.
    far = layer_seconds([WORK] * 4, Wires(1, 4, 2), PROFILE)
    assert far.heads_s == pytest.approx(30.0 / 3 * (1 / 10.0 + 2 / 2.0))


def test_attention_hides_what_a_ring_sends() -> None:
    work = replace(WORK, heads_bytes=0.0, num_exchanges=0, ring_bytes=30.0, num_rounds=3)
    ring = layer_seconds([work] * 4, Wires(4, 1, 4), PROFILE)
    assert ring.ring_s == pytest.approx(3.0 - 2.0 * 3 / 4) and ring.launch_s == 0.75
    blocking = layer_seconds([work] * 4, Wires(4, 1, 4, is_hidden=False), PROFILE)
    assert blocking.ring_s == 3.0
    less = replace(work, ring_bytes=5.0)
    assert layer_seconds([less] * 4, Wires(4, 1, 4), PROFILE).ring_s == 0.0
    assert layer_seconds([work] * 4, Wires(4, 1, 2), PROFILE).ring_s == pytest.approx(15.0 - 1.5)


def test_launches_show_where_they_take_longer_than_the_device() -> None:
    many = replace(WORK, num_kernels=40)
    assert layer_seconds([many], Wires(1, 1, 1), PROFILE).launch_s == 0.5 + (10.0 - 6.0)


def test_the_average_rank_waits_for_the_slowest() -> None:
    idle = replace(WORK, linear_flops=0.0)
    found = layer_seconds([WORK, idle, idle, idle], Wires(1, 4, 4), PROFILE)
    assert found.total == pytest.approx(9.5) and found.waiting_s == pytest.approx(3.0)
    both = found + found
    assert both.total == pytest.approx(19.0) and "waiting 6e+03" in str(both)


def test_a_number_that_is_needed_and_missing_is_named() -> None:
    lacking = replace(PROFILE, inter_bytes_per_s=None, launch_s=None)
    with pytest.raises(ConfigError, match="of paper has no launch_s: "):
        layer_seconds([WORK], Wires(1, 2, 2), lacking)
    with pytest.raises(ConfigError, match="has no launch_s, inter_bytes_per_s: "):
        layer_seconds([WORK], Wires(1, 4, 2), lacking)
