"""What an attention call takes on a mesh of Ulysses and ring degrees: a fitted latency model.

The model is db-SP's equation 4: the all-to-alls, then R periods of compute, of which all but the
last hide an exchange of keys and values, or are hidden by it. There the imbalance multiplies
compute and exchange alike; here only the work, since what is exchanged does not depend on the mask.
What a rank lays out in its own memory, before and after, is ours: it is a good part of a call with
little work.

Legend: U Ulysses degree, R ring degree, O observed calls, K = 7 coefficients.
"""

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, floats, listed, number, of_type, put, whole
from bascule.plan.files import parse_json, read_lines, to_path
from bascule.plan.sparse import SparsePlan

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NUM_ALL_TO_ALLS = 2
"""All-to-alls of a call: queries, keys and values to their ranks, and the output back."""

NUM_COEFFICIENTS = 7

MIN_SHARE = 0.1
"""Of a measured time; a prediction below it counts as this when errors are made relative."""

MAX_ROUNDS = 50
NUM_STARTS = 9


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """What an attention call asks of the slowest of U x R ranks.

    Args:
        ulysses_degree: U.
        ring_degree: R.
        work: What the slowest rank computes in all R periods: the imbalance times the mean over the
            ranks, in query-key pairs or in blocks; in one unit for a fit and its predictions.
        all_to_all_bytes: What it sends to other ranks in both all-to-alls; 0 if there are none.
        p2p_bytes: Keys and values that it passes on in a period.
        copied_bytes: Queries, keys, values and outputs of a rank, which it lays out for exchange
            and compute; 0 where all rows are used by the rank that has them.

    Raises:
        ConfigError: A value is out of range.
    """

    ulysses_degree: int
    ring_degree: int
    work: float
    all_to_all_bytes: float
    p2p_bytes: float
    copied_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ulysses_degree", "ring_degree"):
            put(self, name, whole(f"AttentionLoad({name}", getattr(self, name), 1))
        for name in ("work", "all_to_all_bytes", "p2p_bytes", "copied_bytes"):
            put(self, name, number(f"AttentionLoad({name}", getattr(self, name)))

    @classmethod
    def even(
        cls,
        degrees: tuple[int, int],
        *,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        density: float = 1.0,
        imbalance: float = 1.0,
        bytes_per_value: int = 2,
    ) -> "AttentionLoad":
        """The load of one sequence whose tokens and heads are shared evenly, in query-key pairs.

        Args:
            degrees: (U, R).
            seq_len: Tokens.
            num_heads: Heads, of queries as of keys and values.
            head_dim: Values of a head.
            density: Share of the query-key pairs that is computed.
            imbalance: Max over mean of the ranks' work, as `sparse_imbalance` gives it.
            bytes_per_value: As they travel.
        """
        ulysses, ring = degrees
        share = seq_len * num_heads / (ulysses * ring)  # rows of a rank
        row_bytes = head_dim * bytes_per_value
        return cls(
            ulysses,
            ring,
            imbalance * density * share * seq_len,
            4.0 * share * row_bytes * (ulysses - 1) / ulysses,
            2.0 * share * row_bytes if ring > 1 else 0.0,
            4.0 * share * row_bytes,
        )

    @classmethod
    def of_plan(cls, plan: SparsePlan, batch: int, row_bytes: int) -> "AttentionLoad":
        """The load of a plan, in query-key pairs; of bytes other than p2p the mean over the ranks.

        Args:
            plan: Its tiles are the work.
            batch: Sequences that are attended alike.
            row_bytes: Of one token of one head of one of them.
        """
        mean_work = float(plan.tiles.sum()) / plan.num_ranks
        used = plan.kv_rank_of >= 0
        lens = np.broadcast_to(plan.kv.lens, used.shape)[used]
        kv_tokens = np.bincount(plan.kv_rank_of[used], lens, plan.num_ranks)
        q_tokens = len(plan.ring_of) * int(plan.q.lens.sum())
        copied = 2.0 * (q_tokens + float(kv_tokens.sum())) / plan.num_ranks
        return cls(
            plan.ulysses_degree,
            plan.ring_degree,
            batch * plan.imbalance * mean_work,
            plan.wire_bytes(row_bytes, 1, batch) / plan.num_ranks,
            2.0 * batch * float(kv_tokens.max()) * row_bytes if plan.ring_degree > 1 else 0.0,
            0.0 if plan.is_local else batch * copied * row_bytes,
        )

    @property
    def degrees(self) -> tuple[int, int]:
        """(U, R)."""
        return (self.ulysses_degree, self.ring_degree)


@dataclass(frozen=True, slots=True)
class AttentionLatency:
    """Seconds of a call: `copies + exchanges + (R - 1) max(compute, p2p) + compute`.

    With `copies = copy_s_per_byte copied_bytes`, `exchanges = 2 all_to_all_latency_s +
    all_to_all_s_per_byte all_to_all_bytes`, or 0 where nothing is sent, `compute = launch_s +
    compute_s_per_work work / R`, and `p2p = p2p_latency_s + p2p_s_per_byte p2p_bytes`. Source:
    db-SP, equation 4; latencies, bytes and copies are ours.

    Args:
        all_to_all_latency_s: Seconds to start an all-to-all.
        all_to_all_s_per_byte: Seconds per byte that a rank sends in it.
        p2p_latency_s: Seconds to start an exchange with the neighbours in the ring.
        p2p_s_per_byte: Seconds per byte that a rank passes on.
        compute_s_per_work: Seconds per unit of work.
        launch_s: Seconds to start the kernel of a period.
        copy_s_per_byte: Seconds per byte that a rank lays out.
        fit_error: Root mean square relative error of the fit that gave the above, if any.

    Raises:
        ConfigError: A coefficient, or the error, is negative or not finite.
    """

    all_to_all_latency_s: float
    all_to_all_s_per_byte: float
    p2p_latency_s: float
    p2p_s_per_byte: float
    compute_s_per_work: float
    launch_s: float
    copy_s_per_byte: float = 0.0
    _: KW_ONLY
    fit_error: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "fit_error":
                put(self, field.name, number(f"AttentionLatency({field.name}", value))

    def __call__(self, load: AttentionLoad) -> float:
        """Predicted seconds of a call."""
        compute_s = self.launch_s + self.compute_s_per_work * load.work / load.ring_degree
        p2p_s = self.p2p_latency_s + self.p2p_s_per_byte * load.p2p_bytes
        exchange_s = self.all_to_all_s_per_byte * load.all_to_all_bytes
        if load.all_to_all_bytes > 0:
            exchange_s += NUM_ALL_TO_ALLS * self.all_to_all_latency_s
        exchange_s += self.copy_s_per_byte * load.copied_bytes
        return exchange_s + (load.ring_degree - 1) * max(compute_s, p2p_s) + compute_s

    def save(self, path: str | Path) -> None:
        """Write the fields to a JSON file.

        Raises:
            ConfigError: The file cannot be written; says why.
        """
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            to_path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: The file cannot be read, or holds something else; says what.
        """
        found = parse_json("".join(read_lines(path)), str(path))
        values = cast(dict[str, Any], found) if isinstance(found, dict) else {}
        names = [field.name for field in fields(cls)]
        if values.keys() != set(names):
            raise ConfigError(
                f"{path} holds {', '.join(values) or 'no fields'}; it must hold "
                f"{', '.join(names)}, as AttentionLatency.save writes them"
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


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
