"""Requests for pictures and clips: read from a file, or drawn from a mix of sizes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np

from bascule.checks import number, whole
from bascule.errors import ConfigError
from bascule.files import read_json_lines
from bascule.machine.cluster import BagShape, HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.machine.mesh_choice import mesh_of_block
from bascule.plan.requests import NEVER, Request
from bascule.workload.tokens import TokenRule

Costs = Callable[[int], Mapping[int, float]]
"""Returns the seconds of a step by degree, from its tokens."""

_MOST_DEGREE, _MOST_BATCH = 8, 64
_CURVE = re.compile(r"(\d{1,7}x\d{1,7}(?:x\d{1,7})?)=(.+)")
_CLASS = re.compile(r"(\d{1,7})x(\d{1,7})(?:x(\d{1,7}))?@(\d{1,7})(?:=(\d{1,7}(?:\.\d{1,7})?))?")


def predicted(
    profile: HardwareProfile, cost: TransformerCost, passes: int = 1, num_groups: int = 1
) -> Costs:
    """Return the predicted costs of a model on nodes of eight ranks, with guidance groups."""
    cluster = profile.cluster(1, _MOST_DEGREE)

    def step(tokens: int) -> dict[int, float]:
        lens = np.array([tokens])
        seconds = dict[int, float]()
        for degree in (1, 2, 4, 8):
            mesh = mesh_of_block(degree, cost.num_heads or degree, num_groups)
            bag = BagShape.aligned(mesh.ring, mesh.ulysses, _MOST_DEGREE)
            each = cluster.sequence_seconds(cost, bag, lens)
            spread = float(np.sum(each.compute_s + each.heads_s)) / bag.size
            once = float(np.sum(each.launch_s)) + cluster.host_seconds(cost, bag)
            exchange = (profile.launch_s or 0.0) if mesh.guidance > 1 else 0.0
            seconds[degree] = -(-passes // mesh.guidance) * (spread + once) + exchange
        return seconds

    return step


def curves_of(words: Sequence[str]) -> dict[str, list[float]]:
    """Return seconds of a step of 1, 2, .. requests in a batch by size.

    The text "512x512=0.167,0.183,4:0.240" has the seconds of 1, 2 and 4; those of 3 lie between.
    """
    curves = dict[str, list[float]]()
    for word in words:
        known = dict[int, float]()
        try:
            match = _CURVE.fullmatch(word)
            size, texts = match.groups() if match else ("", "")
            for text in texts.split(","):
                num, colon, seconds = text.rpartition(":")
                known[int(num) if colon else max(known, default=0) + 1] = float(seconds)
            if list(known) != sorted(known) or min(known) != 1 or max(known) > _MOST_BATCH:
                raise ValueError(word)
        except ValueError:
            wrong = f"--batch-s {word}: write a size and the seconds of 1, 2, .. requests"
            raise ConfigError(f"{wrong}, as 512x512=0.167,0.183,4:0.240") from None
        for seconds in known.values():
            number(f"--batch-s {size}", seconds, 1e-9, 1e6)
        sizes = np.arange(1, max(known) + 1)
        curves[size] = np.interp(sizes, list(known), list(known.values())).tolist()
    return curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Classes of requests that arrive as a Poisson process, one per second on average.

    Attributes:
        kinds: A request of each class that arrives at 0.
        shares: The share of each class in the requests.
        most: Number of requests.
    """

    kinds: Sequence[Request]
    shares: Sequence[float]
    most: int

    def scale(self, load: float, num_ranks: int) -> float:
        """Return the requests per second that give a load if each runs at its cheapest degree."""
        return load * num_ranks / float(np.dot(self.shares, [kind.work_s for kind in self.kinds]))

    def draw(self, scale: float, seed: int, *, slo: float = 1.0) -> list[Request]:
        """Draw requests that arrive at `scale` per second; `slo` scales the time to deadlines."""
        random, requests, now = np.random.default_rng(seed), list[Request](), 0.0
        for _ in range(self.most):
            now += float(random.exponential(1.0 / scale))
            kind = self.kinds[int(random.choice(len(self.kinds), p=self.shares))]
            due = now + slo * kind.deadline_s
            requests.append(replace(kind, arrival_s=now, deadline_s=due))
        return requests


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests of a file, to replay faster or slower; it has the methods of `Mix`."""

    requests: Sequence[Request]

    def scale(self, load: float, num_ranks: int) -> float:
        """Return how many times as fast the requests must arrive for a load."""
        duration_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        if not duration_s:
            raise ConfigError("all requests arrive at once, so they have no load: give --rates 1")
        return load * num_ranks * duration_s / sum(request.work_s for request in self.requests)

    def draw(self, scale: float, seed: int, *, slo: float = 1.0) -> list[Request]:
        """Return the requests, which arrive `scale` times as fast; `seed` changes nothing."""
        requests = list[Request]()
        for request in self.requests:
            arrival_s = request.arrival_s / scale
            due = arrival_s + slo * (request.deadline_s - request.arrival_s)
            requests.append(replace(request, arrival_s=arrival_s, deadline_s=due))
        return requests


Workload = Mix | Recorded


@dataclass(frozen=True, slots=True)
class Sizes:
    """Makes requests from their sizes.

    Attributes:
        rule: Turns pixels into tokens.
        costs: Predicts the seconds of a step.
        curves: Seconds of a step of 1, 2, .. requests in a batch on one rank, by size; they replace
            predictions, in proportion on more ranks.
    """

    rule: TokenRule
    costs: Costs
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

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
        """Make a request; `deadline_s` counts from its arrival."""
        sides = {"width": width, "height": height, "frames": frames}
        w, h, f = (np.array([whole(name, n, 1, 2**20)], float) for name, n in sides.items())
        tokens = int(self.rule.grids(w, h, f, np.ones(1)).prod())
        if not tokens:
            raise ConfigError(f"{width}x{height}: has no token: give more pixels")
        begin = number("arrival_s", arrival_s)
        wait = deadline_s if deadline_s == NEVER else number("deadline_s", deadline_s)
        size = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        step_s, batch_s = self.costs(tokens), dict[int, Sequence[float]]()
        if (curve := self.curves.get(size)) is not None:
            batch_s = {d: [s / step_s[1] * each for each in curve] for d, s in step_s.items()}
            step_s = {degree: seconds[0] for degree, seconds in batch_s.items()}
        return Request(
            step_s=step_s,
            steps=whole("steps", steps, 1, 10**6),
            arrival_s=begin,
            deadline_s=begin + wait,
            kind=kind or size,
            batch_key=size if batch_s else None,
            batch_s=batch_s,
        )

    def read(self, path: Path) -> Recorded:
        """Read one JSON object per line, with the arguments of `request`."""
        requests, names = list[Request](), signature(self.request).parameters
        for where, line in read_json_lines(path):
            values = cast(dict[str, Any], line) if isinstance(line, dict) else {}
            missing = {"width", "height", "steps"} - values.keys()
            if missing or values.keys() - names.keys():
                legal = "and may have frames, arrival_s, deadline_s (after its arrival) and kind"
                wrong = f"{legal}, not {', '.join(values)}"
                raise ConfigError(f"{where}: a request needs width, height and steps, {wrong}")
            values["kind"] = str(values.get("kind", ""))
            try:
                requests.append(self.request(**values))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
        if not requests:
            raise ConfigError(f"{path} has no requests: write one JSON object per line")
        return Recorded(sorted(requests, key=lambda request: request.arrival_s))

    def mix(self, words: Sequence[str], most: int, deadline: float | None) -> Mix:
        """Return a mix of classes such as "1024x1024@25=0.6" (steps, share) or "832x480x49@50".

        Args:
            words: One text for each class.
            most: Number of requests.
            deadline: Deadline as a multiple of a request's seconds on one rank; None: no deadline.
        """
        kinds, shares = list[Request](), list[float]()
        for word in words:
            match = _CLASS.fullmatch(word)
            if match is None:
                raise ConfigError(f"{word!r}: write a size, steps and a share, as 1024x1024@25=0.6")
            width, height, frames, steps = (int(text or 1) for text in match.groups()[:4])
            kind = self.request(width=width, height=height, frames=frames, steps=steps)
            due = NEVER if deadline is None else deadline * kind.seconds(1)
            kinds.append(replace(kind, deadline_s=due))
            shares.append(float(match[5] or 1))
        if not sum(shares):
            raise ConfigError(f"{' '.join(words)}: all shares are 0; give one above 0")
        return Mix(kinds=kinds, shares=(np.array(shares) / sum(shares)).tolist(), most=most)
