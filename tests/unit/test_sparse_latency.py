"""The latency model of sparse attention: planted coefficients come back, choices are damped."""

import dataclasses
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.fits import fit_attention_latency
from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse.choose import Strategies, StrategyChoice
from tests.helpers.sparse_studies import even_load

A800 = AttentionLatency(40e-6, 6e-12, 15e-6, 9e-12, 2e-12, 30e-6, 2e-12)
CPU = AttentionLatency(4e-4, 4e-10, 3e-4, 6e-10, 3e-9, 2e-4, 5e-10)
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))


def written_out(model: AttentionLatency, load: AttentionLoad) -> float:
    """Equation 4, a period at a time, after what a rank lays out."""
    seconds = model.copy_s_per_byte * load.copied_bytes
    if load.all_to_all_bytes:
        for _ in ("to the ranks", "back"):
            seconds += model.all_to_all_latency_s
            seconds += model.all_to_all_s_per_byte * load.all_to_all_bytes / 2
    for period in range(load.ring_degree):
        compute = model.launch_s + model.compute_s_per_work * load.work / load.ring_degree
        exchange = model.p2p_latency_s + model.p2p_s_per_byte * load.p2p_bytes
        seconds += compute if period == load.ring_degree - 1 else max(compute, exchange)
    return seconds


def measured_loads(scale: float, repeats: int = 10) -> list[AttentionLoad]:
    """Dense calls of some lengths, and calls without work, as a calibration would take them."""
    loads = [
        even_load(mesh, seq_len=int(scale * length), num_heads=40, head_dim=128)
        for mesh in ((1, 1), *MESHES)
        for length in (2048, 8192, 32768, 65536)
    ]
    return (loads + [replace(load, work=0.0) for load in loads]) * repeats


def sparse_loads(scale: float) -> list[AttentionLoad]:
    return [
        even_load(
            mesh,
            seq_len=int(scale * length),
            num_heads=40,
            head_dim=128,
            density=density,
            imbalance=rho,
        )
        for mesh in ((1, 1), *MESHES, (3, 2))
        for length in (4096, 20000, 75600)
        for density in (0.1, 0.41, 0.68)
        for rho in (1.0, 1.4)
    ]


def test_a_load_written_out() -> None:
    load = even_load(
        (2, 3), seq_len=60, num_heads=8, head_dim=5, density=0.5, imbalance=1.2, bytes_per_value=4
    )
    pairs = 60 * 60 * 8  # of all ranks, dense
    rows = 60 // 6 * 8  # (token, head) of a rank at home
    assert load.degrees == (2, 3)
    assert load.work == pytest.approx(1.2 * 0.5 * pairs / 6)
    assert load.all_to_all_bytes == 4 * (rows // 2) * 5 * 4  # q, k, v and output; half stays
    assert load.p2p_bytes == 2 * (60 // 3) * (8 // 2) * 5 * 4  # k and v of a third, half the heads
    assert load.copied_bytes == 4 * rows * 5 * 4  # q, k, v and output
    whole = even_load((1, 1), seq_len=60, num_heads=8, head_dim=5)
    assert (whole.work, whole.all_to_all_bytes, whole.p2p_bytes) == (pairs, 0.0, 0.0)


@pytest.mark.parametrize("model", [A800, CPU])
def test_predictions_follow_the_equation(model: AttentionLatency) -> None:
    for load in sparse_loads(0.1) + measured_loads(0.1, 1):
        assert model(load) == pytest.approx(written_out(model, load), rel=1e-12)


def test_both_sides_of_the_maximum_occur() -> None:
    """Else the tests of the fit would show little."""
    for model, scale in ((A800, 1.0), (CPU, 0.05)):
        free = replace(model, p2p_latency_s=0.0, p2p_s_per_byte=0.0)
        rings = [load for load in measured_loads(scale, 1) if load.ring_degree > 1]
        hidden = [load for load in rings if model(load) == free(load)]
        assert 0.25 < len(hidden) / len(rings) < 0.75


@pytest.mark.parametrize(("model", "scale"), [(A800, 1.0), (CPU, 0.05)])
def test_exact_times_give_the_coefficients_back(model: AttentionLatency, scale: float) -> None:
    loads = measured_loads(scale, 1)
    fit = fit_attention_latency(loads, [model(load) for load in loads])
    assert fit.fit_error is not None
    assert fit.fit_error < 1e-6
    np.testing.assert_allclose(dataclasses.astuple(fit)[:7], dataclasses.astuple(model)[:7], 1e-5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("model", "scale"), [(A800, 1.0), (CPU, 0.05)])
def test_ten_percent_of_noise(model: AttentionLatency, scale: float, seed: int) -> None:
    loads = measured_loads(scale)
    noise = 1.0 + 0.1 * np.random.default_rng(seed).standard_normal(len(loads))
    fit = fit_attention_latency(loads, noise * [model(load) for load in loads])
    assert fit.fit_error == pytest.approx(0.1, rel=0.3)
    errors = [fit(load) / model(load) - 1.0 for load in sparse_loads(scale)]
    assert max(map(abs, errors)) < 0.05


def test_no_bias_under_noise() -> None:
    """Errors relative to the measured time would predict 2 % less than the mean of the times."""
    loads = measured_loads(1.0, repeats=60)
    exact = np.array([A800(load) for load in loads])
    noise = 1.0 + 0.1 * np.random.default_rng(0).standard_normal(len(loads))
    fit = fit_attention_latency(loads, exact * noise)
    predicted = np.array([fit(load) for load in loads])
    assert np.mean(predicted / exact) == pytest.approx(1.0, abs=0.005)


def test_the_order_and_the_unit_do_not_matter() -> None:
    loads = measured_loads(1.0)
    noise = np.random.default_rng(3).lognormal(0.0, 0.1, len(loads))
    seconds = noise * [A800(load) for load in loads]
    fit = fit_attention_latency(loads, seconds)
    assert fit_attention_latency(loads, seconds) == fit
    order = np.random.default_rng(4).permutation(len(loads))
    shuffled = fit_attention_latency([loads[i] for i in order], seconds[order])
    in_blocks = [replace(load, work=load.work / 64**2) for load in loads]
    blocks = fit_attention_latency(in_blocks, seconds)
    for load, other in zip(loads, in_blocks, strict=True):
        assert shuffled(load) == pytest.approx(fit(load), rel=1e-6)
        assert blocks(other) == pytest.approx(fit(load), rel=1e-6)


def test_illegal_measurements() -> None:
    loads = measured_loads(1.0, 1)
    seconds = np.array([A800(load) for load in loads])
    with pytest.raises(ConfigError, match=r"40 loads and seconds of shape \(39,\)"):
        fit_attention_latency(loads, seconds[:-1])
    with pytest.raises(ConfigError, match=r"5 loads.*at least 7"):
        fit_attention_latency(loads[:5], seconds[:5])
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="positive and finite"):
            fit_attention_latency(loads, np.where(np.arange(40) == 7, bad, seconds))
    flat = [load for load in loads if load.ring_degree == 1]
    with pytest.raises(ConfigError, match="no call with a ring"):
        fit_attention_latency(flat, [A800(load) for load in flat])
    rings = [load for load in loads if load.ulysses_degree == 1]
    with pytest.raises(ConfigError, match="no call with all-to-alls"):
        fit_attention_latency(rings, [A800(load) for load in rings])
    hidden = replace(A800, p2p_latency_s=0.0, p2p_s_per_byte=0.0)
    with pytest.raises(ConfigError, match="no call waits for the exchange"):
        fit_attention_latency(loads, [hidden(load) for load in loads])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ulysses_degree": 0}, "ulysses_degree=0"),
        ({"ring_degree": 1.5}, "ring_degree=1.5"),
        ({"ring_degree": True}, "ring_degree=True"),
        ({"work": -1.0}, "work=-1.0"),
        ({"p2p_bytes": math.nan}, "p2p_bytes=nan"),
        ({"all_to_all_bytes": math.inf}, "all_to_all_bytes=inf"),
        ({"copied_bytes": -1.0}, "copied_bytes=-1.0"),
    ],
)
def test_illegal_loads(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(AttentionLoad(2, 2, 1.0, 1.0, 1.0), **changes)


def test_illegal_coefficients() -> None:
    with pytest.raises(ConfigError, match="launch_s=-1"):
        replace(A800, launch_s=-1.0)
    with pytest.raises(ConfigError, match="p2p_s_per_byte=nan"):
        replace(A800, p2p_s_per_byte=math.nan)
    with pytest.raises(ConfigError, match=r"AttentionLatency\(fit_error=-0\.1\)"):
        replace(A800, fit_error=-0.1)


PER_WORK = AttentionLatency(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""A call takes as many seconds as its work, so that tests say what is predicted."""


def choose_strategy(
    latency: AttentionLatency,
    loads: list[AttentionLoad],
    last: StrategyChoice | None = None,
    *,
    min_gain: float = 0.03,
    switch_s: float = 0.0,
) -> StrategyChoice:
    return Strategies(latency, min_gain=min_gain, switch_s=switch_s).choose(loads, last)


def calls(*seconds: float) -> list[AttentionLoad]:
    """Loads of (1, 1), (2, 1), ... that take these many seconds."""
    return [AttentionLoad(place + 1, 1, work, 0.0, 0.0) for place, work in enumerate(seconds)]


def brute_force(
    table: list[list[float]], min_gain: float, switch_s: float
) -> tuple[list[int], int]:
    """Places in each row, and the switches: the rule of the docstring, from the start each time."""
    places: list[int] = []
    for row, seconds in enumerate(table):
        best = min(seconds)
        if not places:
            places.append(seconds.index(best))
            continue
        here = places[-1]
        arrived = row - 1
        while arrived > 0 and places[arrived - 1] == here:
            arrived -= 1
        gains = [table[t][here] - min(table[t]) for t in range(arrived + 1, row + 1)]
        lost = [
            gain if gain > min_gain * table[t][here] else 0.0
            for gain, t in zip(gains, range(arrived + 1, row + 1), strict=True)
        ]
        leaves = lost[-1] > 0.0 and sum(lost) >= switch_s
        places.append(seconds.index(best) if leaves else here)
    return places, sum(a != b for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("min_gain", "switch_s"), [(0.0, 0.0), (0.1, 0.0), (0.0, 2.5), (0.1, 2.5)])
def test_choices_against_brute_force(seed: int, min_gain: float, switch_s: float) -> None:
    table = np.random.default_rng(seed).integers(1, 9, (40, 4)).astype(float).tolist()
    places: list[int] = []
    last: StrategyChoice | None = None
    for seconds in table:
        last = choose_strategy(
            PER_WORK, calls(*seconds), last, min_gain=min_gain, switch_s=switch_s
        )
        assert last.predicted_s == seconds[last.degrees[0] - 1]
        places.append(last.degrees[0] - 1)
    expected, switches = brute_force(table, min_gain, switch_s)
    assert places == expected
    assert last is not None
    assert last.num_switches == switches
    if min_gain == switch_s == 0.0:
        assert [row[place] for row, place in zip(table, places, strict=True)] == list(
            map(min, table)
        )


def test_small_gains_do_not_count_and_others_are_summed() -> None:
    choice = choose_strategy(PER_WORK, calls(1.0, 1.1))
    for seconds in [(1.02, 1.0), (1.0, 1.02)] * 10:
        choice = choose_strategy(PER_WORK, calls(*seconds), choice)
    assert choice == StrategyChoice((1, 1), 1.0, 0.0, 0)
    slow = calls(1.5, 1.0)
    for _ in range(3):
        choice = choose_strategy(PER_WORK, slow, choice, switch_s=2.0)
    assert (choice.degrees, choice.foregone_s) == ((1, 1), 1.5)
    choice = choose_strategy(PER_WORK, slow, choice, switch_s=2.0)
    assert choice == StrategyChoice((2, 1), 1.0, 0.0, 1)


def test_the_imbalance_decides() -> None:
    """Ring is cheaper to exchange for, until its ranks have to wait for the slowest."""

    def loads(ring_imbalance: float) -> list[AttentionLoad]:
        return [
            even_load(mesh, seq_len=75600, num_heads=40, head_dim=128, density=0.41, imbalance=rho)
            for mesh, rho in (((8, 1), 1.01), ((1, 8), ring_imbalance))
        ]

    assert choose_strategy(A800, loads(1.0)).degrees == (1, 8)
    assert choose_strategy(A800, loads(1.25)).degrees == (8, 1)


def test_equal_predictions_take_the_first() -> None:
    same = calls(1.0, 1.0, 1.0)
    assert choose_strategy(PER_WORK, same).degrees == (1, 1)
    assert choose_strategy(PER_WORK, same[::-1]).degrees == (3, 1)
