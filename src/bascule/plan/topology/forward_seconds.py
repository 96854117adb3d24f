"""Seconds of a forward pass on ranks that share a sequence, from what each of them does and sends.

In the layers of a kind, with R ring ranks, U Ulysses ranks, and rates of a `HardwareProfile`, a
rank takes

    linear_flops / matmul_rate + attention_flops / attention_rate                   [compute]
    heads_bytes * ((n - 1) / intra + (U - n) / inter) / (U - 1)                     [Ulysses]
    max(0, ring_bytes / wire - attention * (R - 1) / R)                             [ring]
    launch_s * (exchanges + rounds) + max(0, launch_s * kernels - compute)          [launches]

seconds: n of its U ranks are in its node; `wire` is that between nodes where the R U ranks do not
fit into one; a ring that does not send while it computes hides nothing; and the host launches
kernels while the device computes. Overlapped Ulysses is priced as if it were not. All wait for the
slowest rank in every layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from bascule.errors import ConfigError
from bascule.plan.costs.hardware import HardwareProfile

_RATES = "matmul_flops_per_s", "attention_flops_per_s", "launch_s"


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank does in the layers of a kind in a forward pass.

    Attributes:
        linear_flops: Of products with weights.
        attention_flops: Of attention over the mesh.
        heads_bytes: That it sends to Ulysses ranks.
        ring_bytes: That it passes on.
        num_exchanges: All-to-alls.
        num_rounds: Times that it passes keys and values on.
        num_kernels: Kernels that are launched.
    """

    linear_flops: float
    attention_flops: float
    heads_bytes: float
    ring_bytes: float
    num_exchanges: int
    num_rounds: int
    num_kernels: int


@dataclass(frozen=True, slots=True)
class Wires:
    """The mesh, and where its ranks are.

    Attributes:
        ring_degree: R.
        ulysses_degree: U; neighbours share heads.
        ranks_per_node: Of how many one node is.
        is_hidden: Whether the ring sends while it computes.
    """

    ring_degree: int
    ulysses_degree: int
    ranks_per_node: int
    is_hidden: bool = True


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of the slowest rank, and how long the average one waits for it, which is none of the total.

    Attributes:
        linear_s: Products with weights.
        attention_s: Attention.
        heads_s: Ulysses' bytes on wires.
        ring_s: The ring's, as far as attention does not hide them.
        launch_s: Exchanges, and kernels that the device waits for.
        waiting_s: Of the average rank.
    """

    linear_s: float = 0.0
    attention_s: float = 0.0
    heads_s: float = 0.0
    ring_s: float = 0.0
    launch_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total(self) -> float:
        """Without what others wait."""
        return self.linear_s + self.attention_s + self.heads_s + self.ring_s + self.launch_s

    def __add__(self, other: Self) -> "Seconds":
        names = [field.name for field in fields(self)]
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        parts = {
            "compute": self.linear_s + self.attention_s,
            "wires": self.heads_s + self.ring_s,
            "launches": self.launch_s,
            "waiting": self.waiting_s,
        }
        said = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts.items())
        return f"{self.total * 1e3:.3g} ms ({said})"


def layer_seconds(ranks: Sequence[RankWork], wires: Wires, profile: HardwareProfile) -> Seconds:
    """Seconds of the layers of a kind.

    Args:
        ranks: What each rank does in them.
        wires: The mesh.
        profile: What the machine does in a second.

    Raises:
        ConfigError: The profile lacks a number.
    """
    num_ranks = wires.ring_degree * wires.ulysses_degree
    near = ("intra_bytes_per_s",) if num_ranks > 1 else ()
    far = ("inter_bytes_per_s",) if num_ranks > wires.ranks_per_node else ()
    missing = [name for name in (*_RATES, *near, *far) if getattr(profile, name) is None]
    if missing:
        raise ConfigError(
            f"the hardware profile of {profile.device} has no {', '.join(missing)}: add what is "
            "missing to the file, or use another profile"
        )
    each = [_rank_seconds(work, wires, profile) for work in ranks]
    slowest = max(each, key=lambda one: one.total)
    mean = sum(one.total for one in each) / len(each)
    return slowest + Seconds(waiting_s=slowest.total - mean)


def _rank_seconds(work: RankWork, wires: Wires, profile: HardwareProfile) -> Seconds:
    ring, ulysses = wires.ring_degree, wires.ulysses_degree
    matmul, attention, launch = (getattr(profile, name) for name in _RATES)
    near = profile.intra_bytes_per_s or math.inf
    far = profile.inter_bytes_per_s or near
    linear_s = work.linear_flops / matmul
    attention_s = work.attention_flops / attention
    in_node = min(ulysses, wires.ranks_per_node)
    byte_s = ((in_node - 1) / near + (ulysses - in_node) / far) / max(1, ulysses - 1)
    wire = near if ring * ulysses <= wires.ranks_per_node else far
    hidden_s = attention_s * (ring - 1) / ring if wires.is_hidden else 0.0
    exposed_s = max(0.0, launch * work.num_kernels - linear_s - attention_s)
    return Seconds(
        linear_s=linear_s,
        attention_s=attention_s,
        heads_s=work.heads_bytes * byte_s,
        ring_s=max(0.0, work.ring_bytes / wire - hidden_s),
        launch_s=launch * (work.num_exchanges + work.num_rounds) + exposed_s,
    )
