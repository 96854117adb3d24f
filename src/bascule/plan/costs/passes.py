"""How much more a training step runs than the forward pass that plans are priced by."""

from dataclasses import dataclass, replace

import numpy as np

from bascule.errors import ConfigError
from bascule.plan.checks import of_type, put, rate
from bascule.plan.costs.calibration import BACKWARD, PASSES, RECOMPUTE
from bascule.plan.costs.cluster import Cluster
from bascule.plan.costs.cost_models import TransformerCost
from bascule.plan.costs.hardware import HardwareProfile

_ATTENTION_BACKWARD = 2.5 * 648 / 561
"""Seconds of the backward of attention over those of its forward: five products of matrices against
two, at 561 TFLOP/s against 648. Source: FlashAttention-3, speeds on an H100 at a head dimension of
128 and 16k tokens, not causal."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What runs in a step, in units of what runs in its forward pass.

    Attributes:
        linear: Seconds of the linear layers; their backward takes two forward passes.
        attention: Seconds of attention.
        exchanges: All-to-alls and passes of keys and values; as many backward as forward.
        name: For tables.

    Raises:
        ConfigError: A value is not above 0.
    """

    linear: float
    attention: float
    exchanges: float
    name: str

    def __post_init__(self) -> None:
        for name in ("linear", "attention", "exchanges"):
            put(self, name, rate(f"Passes({name}", getattr(self, name)))

    def over(self, timed: "Passes") -> "Passes":
        """The same for a cost model whose seconds are those of other passes, such as measured ones.

        Wires are those of a forward pass all the same.
        """
        linear, attention = self.linear / timed.linear, self.attention / timed.attention
        return replace(self, linear=linear, attention=attention)


FORWARD = Passes(1.0, 1.0, 1.0, "forward")
TRAINING = Passes(4.0, 2.0 + _ATTENTION_BACKWARD, 3.0, "step")
"""Forward, recomputation and backward, every block checkpointed."""

WITHOUT_RECOMPUTING = Passes(3.0, 1.0 + _ATTENTION_BACKWARD, 2.0, "step-without-recompute")
"""Forward and backward, no block checkpointed."""


def in_passes(
    cost: TransformerCost, cluster: Cluster, passes: Passes
) -> tuple[TransformerCost, Cluster]:
    """A cost model and a cluster whose seconds are those of a step, not of a forward pass.

    Whatever takes both then plans, prices and ranks by seconds of a step.

    Raises:
        ConfigError: The cost model is not a `TransformerCost`, so that attention cannot be told
            from the rest.
    """
    of_type("model", cost, TransformerCost, "a TransformerCost, which tells attention apart")
    each, exchanges = cost.seconds_per_unit, passes.exchanges
    priced = replace(
        cost,
        gamma=cost.gamma * passes.attention / passes.linear,
        seconds_per_unit=None if each is None else each * passes.linear,
    )
    pack = cluster.pack_bytes_per_s
    slowed = replace(
        cluster,
        flops_per_s=cluster.flops_per_s / passes.linear,
        intra_bytes_per_s=cluster.intra_bytes_per_s / exchanges,
        inter_bytes_per_s=cluster.inter_bytes_per_s / exchanges,
        pack_bytes_per_s=None if pack is None else pack / exchanges,
        latency_s=cluster.latency_s * exchanges,
        piece_s=cluster.piece_s * exchanges,
    )
    return priced, slowed


def passes_of(name: str, profile: HardwareProfile | None = None) -> Passes:
    """`FORWARD`, or a training step that recomputes or does not, by name.

    Args:
        name: "forward", "step" or "step-without-recompute".
        profile: Whose passes of a block a step runs, if it was calibrated. Default: `TRAINING` and
            `WITHOUT_RECOMPUTING`.

    Raises:
        ConfigError: There is no such name.
    """
    known = {passes.name: passes for passes in (FORWARD, TRAINING, WITHOUT_RECOMPUTING)}
    if name not in known:
        raise ConfigError(f"passes {name!r}: choose one of {', '.join(known)}")
    run = PASSES if name == TRAINING.name else (RECOMPUTE, BACKWARD)
    measured = None if name == FORWARD.name else _measured(profile, run)
    return known[name] if measured is None else replace(known[name], **measured)


def _measured(profile: HardwareProfile | None, run: tuple[str, ...]) -> dict[str, float] | None:
    """Passes as they were timed, over the forward pass: by tokens, and by pairs.

    Exchanges were not timed by pass. None: not all was, or the noise left nothing of a pass.
    """
    made = None if profile is None else profile.calibration
    fits = {} if made is None else {name: made.fit(name) for name in PASSES}
    rates = {name: fit.coefficients[1:] for name, fit in fits.items() if fit is not None}
    if len(rates) < len(PASSES) or min(rates[PASSES[0]]) <= 0:
        return None
    linear, attention = np.sum([rates[name] for name in run], axis=0) / rates[PASSES[0]]
    return {"linear": float(linear), "attention": float(attention)}
