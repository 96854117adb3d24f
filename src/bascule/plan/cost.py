"""What a sequence costs: FLOPs from its length, and seconds once a device was measured."""

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError

FLOPS_PER_UNIT = 1e12


class Cost(Protocol):
    """Predicts the cost of each sequence, in a unit that stays the same within a plan."""

    def __call__(self, seq_lens: npt.ArrayLike, /) -> npt.NDArray[np.float64]:
        """Costs of sequences of these many tokens; same shape as the input."""
        ...


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """Forward cost of a transformer: `num_layers * (24 L d^2 + gamma * 4 L^2 d)`, in TFLOPs.

    Source: KnapFormer, equations 1 and 2. `gamma` says how much dearer (or cheaper) a FLOP of
    attention is on a device than one of the linear layers; `fit_latency` measures it.

    Args:
        d_model: Model width d.
        gamma: Weight of the attention term; 1 counts plain FLOPs.
        num_layers: Blocks of that width.
        seconds_per_unit: Seconds a TFLOP takes on the device, if measured.
        fit_error: Root mean square relative error of the fit that gave the above, if any.
        bytes_per_token: Activations that a token of a rank holds until the backward pass, over all
            layers, if known; limits on memory need it.

    Raises:
        ConfigError: A value is out of range.
    """

    d_model: int = 3072
    _: KW_ONLY
    gamma: float = 1.0
    num_layers: int = 1
    seconds_per_unit: float | None = None
    fit_error: float | None = None
    bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("d_model", self.d_model), ("num_layers", self.num_layers)):
            is_int = isinstance(value, int)  # pyright: ignore[reportUnnecessaryIsInstance]
            if isinstance(value, bool) or not is_int or value < 1:
                raise ConfigError(
                    f"TransformerCost({name}={value!r}): must be an integer of at least 1"
                )
        if not (np.isfinite(self.gamma) and self.gamma >= 0):
            raise ConfigError(
                f"TransformerCost(gamma={self.gamma!r}): must be finite and at least 0"
            )
        for name in ("seconds_per_unit", "bytes_per_token"):
            rate = getattr(self, name)
            if rate is not None and not (np.isfinite(rate) and rate > 0):
                raise ConfigError(f"TransformerCost({name}={rate!r}): must be positive and finite")

    def __call__(self, seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Forward TFLOPs of sequences of these many tokens, attention scaled by gamma."""
        tokens = np.asarray(seq_lens, dtype=np.float64)
        linear = 24.0 * self.d_model**2 * self.num_layers / FLOPS_PER_UNIT
        quadratic = 4.0 * self.gamma * self.d_model * self.num_layers / FLOPS_PER_UNIT
        return tokens * (linear + quadratic * tokens)

    def seconds(self, seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Forward seconds of sequences of these many tokens.

        Raises:
            ConfigError: The device was not measured (`seconds_per_unit` is None).
        """
        if self.seconds_per_unit is None:
            raise ConfigError(
                "this TransformerCost counts FLOPs, not seconds: measure the device with "
                "fit_latency, or give seconds_per_unit"
            )
        return self(seq_lens) * self.seconds_per_unit
