"""Hard limits of a rank, and limits on bytes expressed in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import MAX_WHOLE, each, fields, of_type, whole
from bascule.errors import ConfigError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost, PolynomialCost, TransformerCost

Limit = int | Sequence[int] | None
"""A limit of every rank, or an entry a rank; None: unlimited."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rank in one microbatch; None means unlimited.

    A bag of G ranks holds G times the tokens and bytes, but no more items, because each rank holds
    a part of every item. If ranks differ, give one entry per rank: `Limits(tokens=(1000, 2000))`.
    The smallest limit in a bag then applies to all its ranks, because they hold equal parts.

    Args:
        tokens: Most tokens on a rank.
        items: Most sequences (or samples) on a rank.
        num_bytes: Most bytes on a rank. In `assign` these are the items' sizes; in `plan_batch`,
            they are activations, and the cost model must have `bytes_per_token`.
    """

    tokens: Limit = None
    items: Limit = None
    num_bytes: Limit = None

    def __post_init__(self) -> None:
        fields(self, tokens=_limit, items=_limit, num_bytes=_limit)

    @property
    def are_alike(self) -> bool:
        """True if no limit has one entry per rank."""
        return not any(isinstance(m, tuple) for m in (self.tokens, self.items, self.num_bytes))

    def common(self, name: str) -> int | None:
        """Return a limit by its name; refuse one entry per rank."""
        most: Limit = getattr(self, name)
        if isinstance(most, Sequence):
            raise ConfigError(f"{self}: here all ranks need the same limit: give one number")
        return most

    def room(self, name: str, num_ranks: int) -> Floats:
        """Return a limit by its name, (num_ranks,), inf for None."""
        most: Limit = getattr(self, name)
        if isinstance(most, Sequence) and len(most) != num_ranks:
            wrong = f"Limits({name}=..) has {len(most)} entries for {num_ranks} ranks"
            raise ConfigError(f"{wrong}: give one number, or one per rank")
        return np.full(num_ranks, np.inf if most is None else most, np.float64)

    def of_bags(self, first_ranks: Ints, num_ranks: int) -> "Limits":
        """Return the limits for each bag: the smallest limits among its ranks."""
        if self.are_alike:
            return self
        rooms = {
            name: np.minimum.reduceat(self.room(name, num_ranks), first_ranks).astype(int).tolist()
            for name in ("tokens", "items", "num_bytes")
            if getattr(self, name) is not None
        }
        return Limits(**rooms)

    def keeps(self, **sums: npt.NDArray[Any]) -> bool:
        """Return whether no rank exceeds a limit; `sums` are (.., ranks) amounts by limit name."""
        rooms = ((self.room(name, amounts.shape[-1]), amounts) for name, amounts in sums.items())
        return all(bool((amounts <= room).all()) for room, amounts in rooms)


def _limit(name: str, value: object) -> int | tuple[int, ...]:
    """Check a limit: a number, or a list with an entry a rank."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return each(name, cast(object, value), whole, 1)
    return whole(name, value, 1)


def in_tokens(limits: Limits | None, cost: Cost, cluster: Cluster | None) -> Limits | None:
    """Return the limits in tokens and items only: bytes become bytes / `cost.bytes_per_token`.

    Without `num_bytes`, the cluster's `memory_bytes` is the limit.
    """
    if limits is not None:
        of_type("limits", limits, Limits, "Limits(tokens=..), or None")
    limited = limits or Limits()
    per_token = cost.bytes_per_token if isinstance(cost, TransformerCost | PolynomialCost) else None
    if per_token is None:
        if limited.num_bytes is not None:
            wrong = f"Limits(num_bytes={limited.num_bytes}): the cost model has no bytes_per_token"
            raise ConfigError(f"{wrong}: give it, or limit tokens")
        return limits
    memory = limited.num_bytes or (cluster and cluster.memory_bytes)
    if memory is None:
        return limits
    num_ranks = max(np.size(memory), np.size(limited.tokens or 0))
    fitting = np.broadcast_to(np.array(memory) / per_token, np.shape(memory) or num_ranks)
    if fitting.min() < 1:
        wrong = f"a rank's {np.min(memory):,.0f} bytes hold no token of {per_token:,.0f} bytes"
        raise ConfigError(f"{wrong}: raise Limits(num_bytes=..), or check bytes_per_token")
    most = np.minimum(np.minimum(fitting, MAX_WHOLE), limited.room("tokens", fitting.size))
    are_alike = np.ndim(memory) == np.ndim(limited.tokens or 0) == 0
    tokens = int(most[0]) if are_alike else most.astype(int).tolist()
    return Limits(tokens=tokens, items=limited.items)
