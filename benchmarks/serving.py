"""Policies that serve requests, on paper: published workloads, and how fast the paper is."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from measuring import say
from published import NAMED, policy_of

from bascule.plan.requests import Balanced, Request, Starts, State
from bascule.sim.requests import BOUND, Row, compare, serve

NUM_RANKS = 8
REPLICAS = "random", "least-in-flight", "least-work", "sjf", "super-p95"
ELASTIC = "sjf", "pause", "load", "demote", "greedy", "best-fit", "tetriserve"
OURS = "balanced"
MOST_S, MOST_DECISION_MS = 60.0, 2.0


def requests(*, quick: bool = False) -> dict[str, Any]:
    """Serve published workloads on eight ranks by all policies, beside the bound.

    Ten minutes. Rows are means over draws. RANDOM4 has no deadlines: on time is within three times
    the seconds on one rank. Moving a request takes 50 ms.
    """
    seeds = 1 if quick else 3
    rates, loads = (0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.8), (0.4, 0.6, 0.8, 1.0, 1.2)
    tables = {
        "random4": _rows("random4", rates, (*REPLICAS, "tetriserve", OURS), seeds, is_rate=True),
        "gf-dit-qwen": _rows("gf-dit-qwen", loads, (*ELASTIC, OURS), seeds),
        "gf-dit-wan": _rows("gf-dit-wan", loads, (*ELASTIC, OURS), seeds),
    }
    for name in ("tetriserve-uniform", "tetriserve-skewed"):
        policies = "sjf", "rssp", "greedy", "best-fit", "tetriserve", OURS
        tables[name] = _rows(name, (0.2, 0.3, 0.4, 0.6), policies, seeds, slo=1.2)
    _judge(tables)
    speed = _speed(2000 if quick else 100_000)
    return {"num_ranks": NUM_RANKS, "seeds": seeds, "speed": speed} | {
        name: [{"load": row.load, "policy": row.policy} | row.figures for row in rows]
        for name, rows in tables.items()
    }


def _rows(
    name: str,
    loads: Sequence[float],
    policies: Sequence[str],
    seeds: int,
    *,
    is_rate: bool = False,
    slo: float = 1.0,
) -> list[Row]:
    mix = NAMED[name]()

    def draw(load: float, seed: int) -> list[Request]:
        return mix.draw(load if is_rate else mix.scale(load, NUM_RANKS), seed, slo=slo)

    rows = compare(draw, loads, policies, num_ranks=NUM_RANKS, num_seeds=seeds, make=policy_of)
    for row in rows:
        shown = [f"{key} {value:.3g}" for key, value in row.figures.items() if " of " not in key]
        say(f"{name} {row.load:g} {row.policy}: {', '.join(shown)}")
    return rows


def _judge(tables: dict[str, list[Row]]) -> None:
    """Say which goals are met."""
    of = {
        name: {(row.policy, row.load): row.figures for row in rows} for name, rows in tables.items()
    }
    four = of["random4"]
    for rate in dict.fromkeys(load for _, load in four):
        ours, least, sjf = (four[name, rate] for name in (OURS, "least-work", "sjf"))
        for key in ("p95_s", "p99_s"):
            text = f"random4 {rate:g}: {key} {ours[key]:.4g}, least work {least[key]:.4g}"
            say(text, ours[key] <= least[key])
        text = f"random4 {rate:g}: on time {ours['on_time']:.1%}, sjf {sjf['on_time']:.1%}"
        text += f", bound {four[BOUND, rate]['on_time']:.1%}"
        say(text, ours["on_time"] >= sjf["on_time"])
    ratio = four[OURS, 0.4]["p95_s"] / four["least-work", 0.4]["p95_s"]
    say(f"random4 0.4: P95 {ratio:.2f}x that of single ranks (goal 0.6)", ratio <= 0.6)
    for name in ("gf-dit-qwen", "gf-dit-wan"):
        ours, bound = of[name][OURS, 0.8], of[name][BOUND, 0.8]["on_time"]
        small, large = ours["on_time of S"], ours["on_time of L"]
        text = f"{name} at load 0.8: small {small:.1%}, large {large:.1%}, bound of all {bound:.1%}"
        say(text, small >= 0.92 and large == 1.0)
    for name in ("tetriserve-uniform", "tetriserve-skewed"):
        for load in (0.2, 0.3, 0.4, 0.6):
            share, bound = (of[name][one, load]["on_time"] for one in (OURS, BOUND))
            say(f"{name} {load:g}: on time {share:.1%}, bound {bound:.1%}", share >= 0.91)


class _Timed(Balanced):
    """Keeps the seconds of decisions about many requests."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least, self.seconds = least, list[float]()

    def decide(self, state: State, act: Starts) -> None:
        num, begin = len(state.waiting) + len(state.running), time.process_time()
        super().decide(state, act)
        if num >= self._least:
            self.seconds.append(time.process_time() - begin)


def _speed(num: int) -> dict[str, float]:
    """Time 1,024 ranks and decisions on 64 ranks about 200 to 256 requests: seconds of a core."""
    seconds = dict[str, float]()
    for load in (0.8, 1.0):
        mix = replace(NAMED["random4"](), most=num)
        drawn = mix.draw(mix.scale(load, 1024), 0)
        begin = time.process_time()
        serve(drawn, Balanced(), 1024, move_s=0.05)
        seconds[f"load {load:g}"] = passed = time.process_time() - begin
        say(f"{num:,} requests on 1,024 ranks at load {load:g}: {passed:.1f} s", passed <= MOST_S)
    mix, timed = NAMED["gf-dit-qwen"](), _Timed(200)
    drawn = mix.draw(mix.scale(0.8, 64), 0)[:256]
    begin_s = drawn[0].arrival_s
    burst = [
        replace(one, arrival_s=begin_s, deadline_s=begin_s + one.deadline_s - one.arrival_s)
        for one in drawn
    ]
    serve(burst, timed, 64, move_s=0.05)
    median_ms, most_ms = 1e3 * float(np.median(timed.seconds)), 1e3 * max(timed.seconds)
    text = f"a decision on 64 ranks, 256 requests: {median_ms:.2f} ms, {most_ms:.2f} at most"
    say(text, most_ms <= MOST_DECISION_MS)
    return {"requests": num, **seconds, "decision_ms": median_ms, "most_decision_ms": most_ms}
