"""Measured calls of attention, fitted by the latency model.

Legend: U Ulysses degree, R ring degree, O observed calls, K = 7 coefficients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from bascule.arrays import Bools, Floats
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, floats, listed, of_type
from bascule.plan.costs.attention_latency import NUM_ALL_TO_ALLS, AttentionLatency, AttentionLoad

NUM_COEFFICIENTS = 7

MIN_SHARE = 0.1
"""Of a measured time; a prediction below it counts as this when errors are made relative."""

MAX_ROUNDS = 50
NUM_STARTS = 9


def fit_attention_latency(
    loads: Sequence[AttentionLoad], seconds: npt.ArrayLike
) -> AttentionLatency:
    """Fit the latency model to measured calls.

    Once it is known which calls wait for the exchange in the ring and which for the compute, the
    model is linear in its coefficients. So the two alternate, as in `fit_iterations`: non-negative
    least squares, then the slower side by the coefficients, until both stay; from several starts,
    of which that with the smallest error counts. Errors are relative to the predicted time:
    relative to the measured one, calls that the noise made short would count more.

    Args:
        loads: Of each call, in ranges as wide as those that will be predicted. Some should have so
            little work (0 is legal) that a ring waits for its exchange: else nothing tells how long
            that takes. Some should be on one rank: they tell launches from latencies.
        seconds: (n,) of each; best the median of some repeats, since a stall counts in full.

    Raises:
        ConfigError: Fewer than 7 calls, a time that is not positive, no call with all-to-alls or
            none with a ring, or none that waits for the exchange in the ring.
    """
    loads = listed("fit_attention_latency: loads", loads)
    measured_O = floats("fit_attention_latency: seconds", seconds)
    _check_observations(loads, measured_O)
    observed = _Observed(
        *(
            np.array([getattr(load, field.name) for load in loads], dtype=np.float64)
            for field in fields(_Observed)
        )
    )
    found = [_alternate(observed, measured_O, waits_O) for waits_O in _starts(observed)]
    # Rounded, so that of equally good solutions the first is taken, not the luckiest rounding.
    coefs_K, waits_O, error = min(found, key=lambda solution: round(solution[2], 9))
    if not waits_O.any():
        raise ConfigError(
            "fit_attention_latency: no call waits for the exchange in the ring, so its time is not "
            "known: measure some calls with little work, or with none"
        )
    return AttentionLatency(*coefs_K.tolist(), fit_error=error)


@dataclass(frozen=True)
class _Observed:
    """The loads of O calls, as arrays (O,)."""

    ring_degree: Floats
    work: Floats
    all_to_all_bytes: Floats
    p2p_bytes: Floats
    copied_bytes: Floats

    def rows(self, waits_O: Bools) -> Floats:
        """(O, K) factors of the coefficients, given the calls that wait for the exchange."""
        waited_O = np.where(waits_O, self.ring_degree - 1.0, 0.0)
        computed_O = self.ring_degree - waited_O
        columns = (
            np.where(self.all_to_all_bytes > 0, float(NUM_ALL_TO_ALLS), 0.0),
            self.all_to_all_bytes,
            waited_O,
            waited_O * self.p2p_bytes,
            computed_O * self.work / self.ring_degree,
            computed_O,
            self.copied_bytes,
        )
        return np.stack(columns, axis=1)

    def waits(self, coefs_K: Floats) -> Bools:
        """(O,) whether a call waits for the exchange by these coefficients."""
        _, _, p2p_latency_s, p2p_s_per_byte, compute_s_per_work, launch_s, _ = coefs_K.tolist()
        compute_O = launch_s + compute_s_per_work * self.work / self.ring_degree
        p2p_O = p2p_latency_s + p2p_s_per_byte * self.p2p_bytes
        # What is as long as the compute is not seen: rounding must not say that it is.
        return (self.ring_degree > 1) & (p2p_O > (1.0 + 1e-6) * compute_O)


def _starts(observed: _Observed) -> list[Bools]:
    """Calls that wait for the exchange at first: those with the most bytes for their work."""
    in_ring_O = observed.ring_degree > 1
    work_O = np.maximum(observed.work / observed.ring_degree, observed.work.mean() * 1e-9)
    bytes_per_work_O = observed.p2p_bytes / np.maximum(work_O, np.finfo(np.float64).tiny)
    cuts = np.quantile(bytes_per_work_O[in_ring_O], np.linspace(0.0, 1.0, NUM_STARTS))
    return [in_ring_O & (bytes_per_work_O >= cut) for cut in cuts]


def _alternate(
    observed: _Observed, measured_O: Floats, waits_O: Bools
) -> tuple[Floats, Bools, float]:
    """Coefficients (K,), the calls that wait by them (O,), and the relative error."""
    coefs_K, predicted_O = np.zeros(NUM_COEFFICIENTS), measured_O
    for _ in range(MAX_ROUNDS):
        last_K, last_O = coefs_K, waits_O
        rows_OK = observed.rows(waits_O) / predicted_O[:, None]
        means_K = rows_OK.mean(axis=0)
        units_K = np.divide(1.0, means_K, out=np.zeros_like(means_K), where=means_K > 0)
        coefs_K = units_K * nnls(rows_OK * units_K, measured_O / predicted_O)[0]
        waits_O = observed.waits(coefs_K)
        predicted_O = np.maximum(observed.rows(waits_O) @ coefs_K, MIN_SHARE * measured_O)
        if np.array_equal(waits_O, last_O) and np.allclose(coefs_K, last_K, rtol=1e-9, atol=0.0):
            break
    return coefs_K, waits_O, float(np.sqrt(np.mean((measured_O / predicted_O - 1.0) ** 2)))


def _check_observations(loads: Sequence[AttentionLoad], measured_O: Floats) -> None:
    if measured_O.shape != (len(loads),) or len(loads) < NUM_COEFFICIENTS:
        raise ConfigError(
            f"fit_attention_latency: {len(loads)} loads and seconds of shape {measured_O.shape}; "
            f"give one time for each load, and at least {NUM_COEFFICIENTS}"
        )
    for load in loads:
        of_type("fit_attention_latency: a load", load, AttentionLoad, "an AttentionLoad")
    if not np.all((measured_O >= 1.0 / MAX_NUMBER) & (measured_O <= MAX_NUMBER)):
        raise ConfigError("fit_attention_latency: seconds must be positive and finite")
    rings = any(load.ring_degree > 1 for load in loads)
    if not rings or not any(load.all_to_all_bytes > 0 for load in loads):
        raise ConfigError(
            f"fit_attention_latency: no call with {'all-to-alls' if rings else 'a ring'}; measure "
            "some, such as all ranks in one Ulysses group, and all in one ring"
        )
