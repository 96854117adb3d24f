"""What an attention call takes on a mesh of Ulysses and ring degrees.

The model is db-SP's equation 4: the all-to-alls, then R periods of compute, of which all but the
last hide an exchange of keys and values, or are hidden by it. There the imbalance multiplies
compute and exchange alike; here only the work, since what is exchanged does not depend on the mask.
What a rank lays out in its own memory, before and after, is ours: it is a good part of a call with
little work.

Legend: U Ulysses degree, R ring degree.
"""

from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from bascule.plan.checks import number, put, whole

if TYPE_CHECKING:  # plans are made by the solver, which imports the machines
    from bascule.plan.sparse.sparse_plan import SparsePlan

NUM_ALL_TO_ALLS = 2
"""All-to-alls of a call: queries, keys and values to their ranks, and the output back."""


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
    def of_plan(cls, plan: "SparsePlan", batch: int, row_bytes: int) -> "AttentionLoad":
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
