"""Calibrations that nobody measured: times that follow known curves, with noise."""

import numpy as np

from bascule.machine.calibration import BYTES, PASSES, TOKENS, Calibration, Fit, Overhead
from bascule.machine.cluster import HardwareProfile
from bascule.machine.fits import fit_curve

LENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIZES = tuple(4**power for power in range(6, 15))
CURVES = {
    "forward": (5e-5, 2e-7, 3e-11),
    "recompute": (6e-5, 2.2e-7, 3e-11),
    "backward": (9e-5, 4e-7, 8e-11),
    "all-to-all": (4e-5, 6e-12),
    "to the next rank": (3e-5, 5e-12),
}
"""Seconds by power of the size, from 0."""


def fitted(what: str, noise: float = 0.0, seed: int = 0) -> Fit:
    """A curve through noisy times that follow one of `CURVES`."""
    unit, sizes = (TOKENS, LENS) if what in PASSES else (BYTES, SIZES)
    x = np.array(sizes, dtype=np.float64)
    seconds = (x[:, None] ** np.arange(len(CURVES[what]))) @ np.array(CURVES[what])
    factors = 1.0 + noise * np.random.default_rng(seed).standard_normal(x.size)
    return fit_curve(what, unit, sizes, seconds * factors, np.full(x.size, noise))


def calibrated(name: str = "mine", noise: float = 0.01) -> HardwareProfile:
    """A whole profile: 4 nodes' worth of guesses, of which some were measured."""
    calibration = Calibration(
        name=name,
        date="2026-11-23",
        torch="2.13.0",
        num_ranks=8,
        settings="a block",
        d_model=1024,
        measured=("matmul_flops_per_s", "intra_bytes_per_s", "launch_s"),
        base="h100-datasheet",
        fits=tuple(fitted(what, noise) for what in CURVES),
        overheads=(Overhead(what="exchange of attention", seconds=5e-5, error=1e-6),),
    )
    return HardwareProfile(
        device="a GPU",
        source="measured",
        matmul_flops_per_s=calibration.rates["matmul_flops_per_s"],
        attention_flops_per_s=calibration.rates["attention_flops_per_s"],
        intra_bytes_per_s=1 / 6e-12,
        inter_bytes_per_s=25e9,
        memory_bytes=80e9,
        launch_s=5e-5,
        calibration=calibration,
    )
