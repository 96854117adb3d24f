"""Cost models of a sequence: FLOPs from its length, or seconds on a measured device."""

from dataclasses import KW_ONLY, dataclass, field, is_dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.checks import called, fields, floats, function, number, rate, whole
from bascule.errors import ConfigError
from bascule.quantities import amount, count

FLOPS_PER_UNIT = 1e12

MAX_SIZE = 2**31
"""Largest width, and most layers, of a model."""


class Cost(Protocol):
    """A function that predicts the cost of each sequence, in one unit within a plan.

    With masks or cross-attention, a second argument has the number of (query, key) pairs computed.
    """

    def __call__(self, seq_lens: npt.ArrayLike, /) -> Floats:
        """Return the costs of sequences with these numbers of tokens, in the same shape."""
        ...


def evaluate(cost: Cost, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None) -> Floats:
    """Return a cost model's costs, and check them; `num_pairs` None: the squares of the lengths."""
    lens = np.asarray(seq_lens).view()
    lens.flags.writeable = False  # a function that works in place would change the batch
    args = (lens,) if num_pairs is None else (lens, np.asarray(num_pairs))
    name = "the cost model"
    if num_pairs is not None:
        name += ", called with tokens and, as there are masks or contexts, pairs,"
    result = called(name, function("the cost model", cost), *args)
    costs = floats("what the cost model gives", result)
    if costs.shape != lens.shape:
        raise ConfigError(f"the cost model gave {costs.shape} costs for {lens.shape} lengths")
    return costs


def heads_of(cost: Cost) -> int | None:
    """Return the number of heads that ranks share; None if the cost model does not know it."""
    return cost.num_heads if isinstance(cost, TransformerCost) else None


def in_bag(cost: Cost, num_ranks: int) -> Cost:
    """Return the cost model of a bag: the cost of the rank with most heads, times the ranks."""
    if not isinstance(cost, TransformerCost) or cost.num_heads is None:
        return cost
    longer = -(-cost.num_heads // num_ranks) * num_ranks / cost.num_heads
    return cost if longer == 1.0 else replace(cost, gamma=cost.gamma * longer)


def unit_seconds(cost: Cost) -> float | None:
    """Return the seconds per unit of cost; None if the cost model does not know them."""
    if isinstance(cost, PolynomialCost):
        return 1.0
    return cost.seconds_per_unit if isinstance(cost, TransformerCost) else None


def describe_cost(cost: Cost) -> str:
    """Describe a cost model, functions included: equal texts mean equal plans."""
    if type(cost) in (TransformerCost, PolynomialCost):
        return repr(cost)
    name = repr(cost) if is_dataclass(cost) else type(cost).__qualname__
    probes = [1, 1_000, 100_000]
    pairs = [tokens * tokens / 2 for tokens in probes]
    try:
        with_pairs = str(evaluate(cost, probes, pairs).tolist())
    except ConfigError:
        with_pairs = "no number"
    costs = evaluate(cost, probes).tolist()
    return f"{name} costs {costs} at {probes} tokens, and {with_pairs} at {pairs} pairs"


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """Forward cost of a transformer: `num_layers * (24 L d^2 + gamma * 4 L^2 d)`, in TFLOPs.

    Source: KnapFormer, equations 1 and 2. `gamma` is the time of a FLOP of attention on a device
    over the time of a FLOP of linear layers; `fit_latency` measures it.

    Args:
        d_model: Model width d.
        gamma: Weight of the attention term; 1 counts plain FLOPs.
        num_layers: Number of blocks of that width.
        seconds_per_unit: Seconds per TFLOP on the device, if measured.
        fit_error: Root mean square relative error of the fit that gave these numbers, if any.
        bytes_per_token: Bytes of activations per token until the backward pass, over all layers, if
            known; memory limits need it.
        num_heads: Number of key-value heads, which the ranks of a bag share; the rank with the most
            heads sets the time of attention. None: ranks share heads evenly.
    """

    d_model: int = 3072
    _: KW_ONLY
    gamma: float = 1.0
    num_layers: int = 1
    seconds_per_unit: float | None = None
    fit_error: float | None = None
    bytes_per_token: float | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        size = whole, 1, MAX_SIZE
        fields(self, d_model=size, num_layers=size, num_heads=size, gamma=number)
        fields(self, seconds_per_unit=rate, fit_error=number, bytes_per_token=rate)

    def __call__(self, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None) -> Floats:
        """Return the forward TFLOPs of sequences, attention times gamma; pairs as in `evaluate`."""
        tokens = floats("seq_lens", seq_lens)
        linear = 24.0 * self.d_model**2 * self.num_layers / FLOPS_PER_UNIT
        quadratic = 4.0 * self.gamma * self.d_model * self.num_layers / FLOPS_PER_UNIT
        if num_pairs is None:
            return tokens * (linear + quadratic * tokens)
        return linear * tokens + quadratic * floats("num_pairs", num_pairs)

    @property
    def shape(self) -> str:
        """The model in words, to print beside its numbers."""
        layers, gamma = count(self.num_layers, "layer"), amount(self.gamma, "")
        return f"width {self.d_model}, {layers}, gamma {gamma}"

    def seconds(self, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None) -> Floats:
        """Return the forward seconds of sequences on a measured device."""
        if self.seconds_per_unit is None:
            wrong = "this TransformerCost counts FLOPs, not seconds"
            raise ConfigError(f"{wrong}: use fit_latency, or give seconds_per_unit")
        return self(seq_lens, num_pairs) * self.seconds_per_unit


@dataclass(frozen=True, slots=True)
class IterationFit:
    """Confidence in the four coefficients of a fitted `PolynomialCost`, in their order.

    `unidentified` names coefficients that the fit assumed, as measurements show only their sum.
    """

    standard_errors: tuple[float, float, float, float]  # by the measurements alone, or infinite
    unidentified: tuple[str, ...]
    loo_error: float  # relative, of one by all others; the mean without the worst tenth
    num_observations: int
    num_outliers: int  # observations with less than half of the usual weight


@dataclass(frozen=True, slots=True)
class PolynomialCost:
    """Seconds of a sequence of L tokens: `quadratic * L^2 + linear * L + constant`.

    Source: LoongForge, the load of a data-parallel rank. We add an overhead: a rank's step takes
    the sum over its sequences, plus `overhead`, which a call does not include.

    Args:
        quadratic: Seconds per square token: attention.
        linear: Seconds per token: linear layers, and communication per token.
        constant: Seconds per sequence: launches.
        overhead: Seconds per rank and step: optimiser, gradients, data.
        fit: Confidence in the coefficients, if fitted (`fit_iterations`); ranks do not compare it.
        bytes_per_token: As in `TransformerCost`.
    """

    quadratic: float
    linear: float
    constant: float
    overhead: float = 0.0
    _: KW_ONLY
    fit: IterationFit | None = field(default=None, repr=False)
    bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        fields(self, quadratic=number, linear=number, constant=number, overhead=number)
        fields(self, bytes_per_token=rate)

    def __call__(self, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None) -> Floats:
        """Return the seconds of each sequence, without `overhead`; pairs as in `evaluate`."""
        tokens = floats("seq_lens", seq_lens)
        if num_pairs is None:
            return tokens * (self.linear + self.quadratic * tokens) + self.constant
        quadratic = self.quadratic * floats("num_pairs", num_pairs)
        return self.linear * tokens + quadratic + self.constant
