"""Invented results of `bascule bench` and measurements of `bascule doctor`, for their reports."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.bench.doctor import Finding, Measured, Timing, judge
from bascule.cli.bench import report_of
from bascule.report.page import Report

ARM: dict[str, Any] = {"wir": 2.0, "imbalance": 1.5, "fbl_median_s": 1.5, "hfu": None}
ARM |= {"fbl_spread_s": [1.4, 1.6], "tokens_per_s": 9.0, "flops_per_s": 9e9}
LOSSES = {"loss_first": [0.3, 0.3], "loss_last": [0.2, 0.2], "tokens_per_rank": [4.0, 5.0]}
SETTING = {"world_size": 2, "device": "cpu", "topology": "g1n2", "skipped_photos": 0}
NAMES = ("seconds_unbalanced", "seconds_balanced", "loss_unbalanced", "loss_balanced")


def reported(
    gamma: float = 0.4, fit_error: float | None = 0.1, binding: int = 0, **changes: Any
) -> Report:
    summary = {"setting": SETTING | {"gamma": gamma, "fit_error": fit_error}, "steps": 5, **LOSSES}
    summary |= {"unbalanced": ARM, "balanced": ARM | {"wir": 1.1, "fbl_median_s": 1.0}}
    summary |= {"measured_ratio": 1.5, "predicted_ratio": 1.6, "measured_ratio_spread": [1.4, 1.6]}
    summary |= {"single_binds_steps": binding, "sent_bytes_per_step": 2**20, "moved_tokens": 9}
    summary |= {"loss_difference": 1e-9, "grad_difference": 1e-8, "grad_difference_first": 1e-8}
    summary |= changes
    step: dict[str, Any] = dict(zip(NAMES, (1.5, 1.0, 0.3, 0.3), strict=True))
    return report_of(summary | {"topologies": {"g1n2": summary}}, [step | {"topology": "g1n2"}] * 5)


ROUNDS = 8
FACTS = {"host": "a", "device": "H100", "memory_bytes": 80 * 10**9, "num_threads": 8}
FACTS |= {"python": "3.12.1", "torch": "2.13.0", "bascule": "0.1.0", "numpy": "2.4.0"}
FACTS |= {"cuda": "12.9", "nccl": "2.27.3", "backend": "cpu:gloo,cuda:nccl", "timeout_s": 120.0}
FAR = 8e-3
"""Seconds of a link between hosts, which is slower than one within a host: no finding."""


def seconds(of_ranks: Sequence[float] | Floats) -> Floats:
    """(rounds, ranks) with a percent of noise, and one round in which everything is slow."""
    noise = np.random.default_rng(0).uniform(0.99, 1.01, (ROUNDS, len(of_ranks)))
    noise[3] *= 5.0
    return noise * np.array(of_ranks)


def measured(
    work_s: Sequence[float] = (1e-3,) * 4,
    link_s: Sequence[float] = (1e-3,) * 4,
    hosts: str = "aabb",
    store_s: float = 1e-4,
    last: dict[str, object] | None = None,
    **facts: object,
) -> Measured:
    """Ranks with work of a TFLOP, and links of their ring with messages of a megabyte.

    Some facts of all ranks, and of the last one, may be others.
    """
    size = len(hosts)
    ones, of_links = np.ones(size), seconds(link_s)
    of_ranks = [FACTS | {"host": host} | facts for host in hosts]
    of_ranks[-1] |= last or {}
    return Measured(
        of_ranks,
        [
            Timing("store", "store", "cpu", 0, 0.0, seconds(store_s * ones)),
            Timing("work", "matmul", "cuda", 0, 1e12, seconds(work_s)),
            Timing("work", "attention", "cuda", 0, 1e12, seconds(1e-3 * ones)),
            Timing("collective", "all-to-all", "cuda", 10**6, 75e4, seconds(1e-3 * ones)),
            *(
                Timing("link", "link", "cuda", num_bytes, num_bytes, own, (rank, (rank + 1) % size))
                for rank in range(size)
                for num_bytes, part in ((1000, 0.01), (10**6, 1.0))
                for own in (part * of_links[:, [rank]],)
            ),
        ],
    )


def found(given: Measured, profile: Any = None, tolerance: float = 0.1) -> list[Finding]:
    return judge(given, tolerance, 0.5, profile)
