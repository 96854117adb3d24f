"""Hard limits of a rank, and those of bytes as tokens."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_WHOLE, fields, of_type, whole
from bascule.plan.costs import Cost, PolynomialCost, TransformerCost
from bascule.plan.machine import Cluster


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rank in one microbatch; None means unlimited.

    A bag of G ranks holds G times the tokens and bytes, but the same number of items: each of its
    ranks has a part of all of them.

    Args:
        tokens: Most tokens on a rank.
        items: Most sequences (or samples) on a rank.
        num_bytes: Most bytes on a rank: of the items' sizes in `assign`, of activations in
            `plan_batch`, where the cost model says how many bytes a token takes.
    """

    tokens: int | None = None
    items: int | None = None
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        fields(self, tokens=(whole, 1), items=(whole, 1), num_bytes=(whole, 1))

    def keeps(self, **sums: npt.NDArray[Any]) -> bool:
        """True if no rank has more; `sums` are those of each rank, by the names of the limits."""
        limits = ((getattr(self, name), amounts) for name, amounts in sums.items())
        return all(most is None or amounts.max() <= most for most, amounts in limits)


def in_tokens(limits: Limits | None, cost: Cost, cluster: Cluster | None) -> Limits | None:
    """Return limits on tokens and items alone: `num_bytes / cost.bytes_per_token` tokens.

    Without `num_bytes`, the `memory_bytes` of a cluster are the limit.
    """
    if limits is not None:
        of_type("limits", limits, Limits, "Limits(tokens=..), or None")
    own = limits or Limits()
    per_token = cost.bytes_per_token if isinstance(cost, TransformerCost | PolynomialCost) else None
    if per_token is None:
        if own.num_bytes is not None:
            raise ConfigError(
                f"Limits(num_bytes={own.num_bytes}): the cost model does not say how many bytes "
                "of activations a token takes: use TransformerCost(bytes_per_token=..), or limit "
                "tokens"
            )
        return limits
    memory = own.num_bytes or (cluster and cluster.memory_bytes)
    if memory is None:
        return limits
    fitting = min(int(memory / per_token), MAX_WHOLE)
    if fitting < 1:
        raise ConfigError(
            f"a rank's {memory:,.0f} bytes hold no token of {per_token:,.0f} bytes: raise "
            "Limits(num_bytes=..), or check bytes_per_token"
        )
    return Limits(tokens=min(own.tokens or fitting, fitting), items=own.items)
