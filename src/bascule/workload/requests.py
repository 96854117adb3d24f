"""Requests as published measurements have them, as a file lists them, or by a mix of sizes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np

from bascule.checks import number, whole
from bascule.errors import ConfigError
from bascule.files import read_json_lines
from bascule.machine.cluster import BagShape, HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.plan.requests import NEVER, Request
from bascule.workload.tokens import TokenRule, model_shape

Costs = Callable[[int], Mapping[int, float]]
"""Gives the seconds of a step by degree, of so many tokens."""

# --- seconds of a step ----------------------------------------------------------------------------

# Milliseconds by tokens at degrees 1, 2, 4. Source: the README of GF-DiT.
_H20_MS = {1024: (155, 161, 172), 4096: (605, 350, 207), 9216: (1557, 880, 464)}
_WAN_GAINS = {1: 1.0, 2: 1.82, 4: 3.33, 8: 5.88}  # source: the simulator of GF-DiT
_MOST_DEGREE = 8


def qwen_h20(tokens: int) -> dict[int, float]:
    """Return those of Qwen-Image on H20: a parabola through the measured sizes, measured gains."""
    one = (4.817e-6 * tokens**2 + 0.12182 * tokens + 25.2) / 1e3
    gains = [[of_size[0] / of_size[k] for of_size in _H20_MS.values()] for k in range(3)]
    return {2**k: one / float(np.interp(tokens, list(_H20_MS), gains[k])) for k in range(3)}


def synthetic_wan(tokens: int) -> dict[int, float]:
    """Return those of the Wan that GF-DiT simulates: linear in tokens."""
    return {d: tokens * 0.1323e-3 / gain + 0.02 * (d - 1) for d, gain in _WAN_GAINS.items()}


def predicted(profile: HardwareProfile, cost: TransformerCost, passes: int = 1) -> Costs:
    """Return those of a model on a machine with nodes of eight ranks."""
    cluster = profile.cluster(1, _MOST_DEGREE)

    def step(tokens: int) -> dict[int, float]:
        lens = np.array([tokens])
        seconds = dict[int, float]()
        for degree in (1, 2, 4, 8):
            bag = BagShape.aligned(degree, 1, _MOST_DEGREE)
            each = cluster.sequence_seconds(cost, bag, lens)
            spread = float(np.sum(each.compute_s + each.heads_s)) / degree
            once = float(np.sum(each.launch_s)) + cluster.host_seconds(cost, bag)
            seconds[degree] = passes * (spread + once)
        return seconds

    return step


COSTS: Mapping[str, Costs] = {"qwen-h20": qwen_h20, "wan-synthetic": synthetic_wan}

# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Classes of requests that arrive by chance.

    Attributes:
        kinds: A request of each class, as if it arrived at 0.
        phases: Seconds, requests a second, and the share of each class; one after the other.
        most: Requests at most.
        is_regular: They come at equal intervals, and not as a Poisson process.
    """

    kinds: Sequence[Request]
    phases: Sequence[tuple[float, float, Sequence[float]]]
    most: int | None = None
    is_regular: bool = False

    def scale(self, load: float, num_ranks: int) -> float:
        """Return the factor of the rates at which the ranks have a load, at cheapest degrees."""
        work = [one.work_s for one in self.kinds]
        rates = [rate * float(np.dot(shares, work)) for _, rate, shares in self.phases]
        return load * num_ranks / float(np.average(rates, weights=[s for s, _, _ in self.phases]))

    def draw(self, scale: float, seed: int, *, slo: float = 1.0) -> list[Request]:
        """Return requests at so many times the rates; `slo` scales the time until deadlines."""
        random, requests, begin = np.random.default_rng(seed), list[Request](), 0.0
        for seconds, rate, shares in self.phases:
            interval = 1.0 / (rate * scale) if rate else NEVER
            draw = (lambda of: of) if self.is_regular else random.exponential
            now = begin + draw(interval)
            while now < begin + seconds and len(requests) != self.most:
                one = self.kinds[int(random.choice(len(self.kinds), p=shares))]
                due = now + slo * one.deadline_s
                requests.append(replace(one, arrival_s=float(now), deadline_s=float(due)))
                now += draw(interval)
            begin += seconds
        return requests


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests that came once; with the methods of a `Mix`, to come again faster or slower."""

    requests: Sequence[Request]

    def scale(self, load: float, num_ranks: int) -> float:
        """Return how many times as fast they must come for a load."""
        lasts = self.requests[-1].arrival_s - self.requests[0].arrival_s
        if not lasts:
            raise ConfigError("all requests come at once, which is no load: give --rates 1")
        return load * num_ranks * lasts / sum(one.work_s for one in self.requests)

    def draw(self, scale: float, seed: int, *, slo: float = 1.0) -> list[Request]:
        """Return them; time runs so many times as fast up to their arrivals. Nothing is random."""
        del seed
        return [
            replace(one, arrival_s=one.arrival_s / scale, deadline_s=one.arrival_s / scale + wait)
            for one in self.requests
            for wait in [slo * (one.deadline_s - one.arrival_s)]
        ]


Workload = Mix | Recorded
_LONG_S = 1e12


def evenly(kinds: Sequence[Request], shares: Sequence[float], most: int, **more: Any) -> Mix:
    """Return a mix at one rate, 1 a second."""
    phases = [(_LONG_S, 1.0, (np.array(shares) / sum(shares)).tolist())]
    return Mix(kinds=kinds, phases=phases, most=most, **more)


def random4() -> Mix:
    """Pictures of four sizes at fixed intervals, without deadlines (vLLM-Omni 3916)."""
    sizes = {"512": (1024, 20), "768": (2304, 20), "1024": (4096, 25), "1536": (9216, 35)}
    kinds = [Request(step_s=qwen_h20(n), steps=k, kind=kind) for kind, (n, k) in sizes.items()]
    return evenly(kinds, (0.15, 0.25, 0.45, 0.15), 500, is_regular=True)


_GF_DIT = {  # seconds, requests a minute, shares of S, M, L: traces of GF-DiT
    "tridentserve": [
        (600, 0.8, (0.5, 0.35, 0.15)),
        (900, 1.4, (0.35, 0.40, 0.25)),
        (900, 2.4, (0.5, 0.3, 0.2)),
        (600, 1.2, (0.2, 0.35, 0.45)),
        (600, 0.6, (0.55, 0.35, 0.10)),
    ],
    "foreground_burst": [
        (180, 0.5, (0.0, 0.4, 0.6)),
        (180, 3.0, (0.85, 0.1, 0.05)),
        (540, 0.8, (0.3, 0.3, 0.4)),
        (180, 3.0, (0.85, 0.1, 0.05)),
        (720, 0.5, (0.4, 0.3, 0.3)),
    ],
    "inflight_burst": [
        (300, 0.6, (0.0, 0.0, 1.0)),
        (300, 0.0, (0.0, 0.0, 1.0)),
        (180, 4.0, (1.0, 0.0, 0.0)),
    ],
}


def gf_dit(
    trace: str, kinds: Mapping[str, tuple[Mapping[int, float], float, float]], extra_s: float
) -> Mix:
    """Return a trace of GF-DiT for classes of 50 steps.

    Args:
        trace: Its name.
        kinds: Seconds of a step, seconds of text and pixels, and how many times as long as on one
            rank a request may take.
        extra_s: Seconds more that each may take.
    """
    requests = [
        Request(
            step_s=step_s, steps=50, once_s=once_s, kind=kind,
            deadline_s=factor * (50 * step_s[1] + once_s) + extra_s,
        )
        for kind, (step_s, once_s, factor) in kinds.items()
    ]  # fmt: skip
    phases = [(float(seconds), rate / 60, shares) for seconds, rate, shares in _GF_DIT[trace]]
    return Mix(kinds=requests, phases=phases)


def gf_dit_qwen(trace: str) -> Mix:
    """Pictures of three sizes at the costs of Qwen-Image on H20."""
    sizes = {"S": (1024, 1.5), "M": (4096, 2.0), "L": (9216, 6.0)}
    kinds = {kind: (qwen_h20(n), 0.0, slo) for kind, (n, slo) in sizes.items()}
    return gf_dit(trace, kinds, 1.0)


def gf_dit_wan(trace: str) -> Mix:
    """Clips of 480p and 49 frames, 480p and 81, 720p and 81, at synthetic costs of Wan."""
    sizes = {
        "S": (20_280, 832 * 480 * 49, 2.0),
        "M": (32_760, 832 * 480 * 81, 2.5),
        "L": (75_600, 1280 * 720 * 81, 3.5),
    }
    kinds = {
        kind: (synthetic_wan(tokens), 9e-11 * voxels + 0.155, slo)
        for kind, (tokens, voxels, slo) in sizes.items()
    }
    return gf_dit(trace, kinds, 5.0)


def tetriserve(skew: float) -> Mix:
    """Pictures of four sizes with tight deadlines, after TetriServe: FLUX.1 on H100, as predicted.

    The sizes and the bias towards large ones are the paper's; 28 steps, the deadlines and the costs
    are ours. A share is in proportion to exp(skew x tokens over the most tokens).
    """
    profile = HardwareProfile.load("h100-datasheet")
    cost = replace(model_shape("flux.1").cost, gamma=profile.gamma)
    costs, due = predicted(profile, cost), {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}
    kinds = [
        Request(step_s=costs(side**2 // 256 + 512), steps=28, deadline_s=due[side], kind=str(side))
        for side in due
    ]
    return evenly(kinds, [float(np.exp(skew * (side / 2048) ** 2)) for side in due], 300)


NAMED: Mapping[str, Callable[[], Mix]] = {
    "random4": random4,
    "gf-dit-qwen": lambda: gf_dit_qwen("tridentserve"),
    "gf-dit-wan": lambda: gf_dit_wan("tridentserve"),
    "gf-dit-wan-foreground": lambda: gf_dit_wan("foreground_burst"),
    "gf-dit-wan-inflight": lambda: gf_dit_wan("inflight_burst"),
    "tetriserve-uniform": lambda: tetriserve(0.0),
    "tetriserve-skewed": lambda: tetriserve(1.0),
}


# --- requests by their sizes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Makes requests of sizes.

    Attributes:
        rule: Makes tokens of pixels.
        costs: Seconds of a step.
    """

    rule: TokenRule
    costs: Costs

    def request(
        self,
        *,
        width: int,
        height: int,
        steps: int,
        frames: int = 1,
        arrival_s: float = 0.0,
        deadline_s: float = NEVER,
        kind: str = "",
    ) -> Request:
        """Return a request; its deadline counts from its arrival."""
        sides = {"width": width, "height": height, "frames": frames}
        w, h, f = (np.array([whole(name, n, 1, 2**20)], float) for name, n in sides.items())
        tokens = int(self.rule.grids(w, h, f, np.ones(1)).prod())
        if not tokens:
            raise ConfigError(f"{width}x{height}: has no token: give more pixels")
        begin = number("arrival_s", arrival_s)
        wait = deadline_s if deadline_s == NEVER else number("deadline_s", deadline_s)
        return Request(
            step_s=self.costs(tokens),
            steps=whole("steps", steps, 1, 10**6),
            arrival_s=begin,
            deadline_s=begin + wait,
            kind=kind or f"{width}x{height}" + (f"x{frames}" if frames > 1 else ""),
        )

    def read(self, path: Path) -> Recorded:
        """Read a JSON object a line, with the names that `request` takes."""
        requests, names = list[Request](), signature(self.request).parameters
        for where, line in read_json_lines(path):
            values = cast(dict[str, Any], line) if isinstance(line, dict) else {}
            missing = {"width", "height", "steps"} - values.keys()
            if missing or values.keys() - names.keys():
                raise ConfigError(
                    f"{where}: a request has width, height and steps, and may have frames, "
                    f"arrival_s, deadline_s (after its arrival) and kind, not {', '.join(values)}"
                )
            values["kind"] = str(values.get("kind", ""))
            try:
                requests.append(self.request(**values))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        if not requests:
            raise ConfigError(f"{path} has no requests: write a JSON object a line")
        return Recorded(sorted(requests, key=lambda one: one.arrival_s))

    def mix(self, words: Sequence[str], most: int, deadline: float | None) -> Mix:
        """Return a mix of "1024x1024@25=0.6" (steps, share) or "832x480x49@50".

        Args:
            words: One for each class.
            most: Requests.
            deadline: Times of its seconds on one rank that a request may take; None: any time.
        """
        kinds, shares = list[Request](), list[float]()
        for word in words:
            match = _OF_MIX.fullmatch(word)
            if match is None:
                raise ConfigError(
                    f"{word!r}: write a size, steps and a share, such as 1024x1024@25=0.6 or "
                    "832x480x49@50=0.1"
                )
            width, height, frames, steps = (int(text or 1) for text in match.groups()[:4])
            one = self.request(width=width, height=height, frames=frames, steps=steps)
            due = NEVER if deadline is None else deadline * one.seconds(1)
            kinds.append(replace(one, deadline_s=due))
            shares.append(float(match[5] or 1))
        if not sum(shares):
            raise ConfigError(f"{' '.join(words)}: all shares are 0")
        return evenly(kinds, shares, most)


_OF_MIX = re.compile(r"(\d{1,7})x(\d{1,7})(?:x(\d{1,7}))?@(\d{1,7})(?:=(\d{1,7}(?:\.\d{1,7})?))?")
