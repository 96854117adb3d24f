"""Small studies of block-sparse attention."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bascule.machine.cluster import HardwareProfile
from bascule.sim.sparse_study import Mesh, Setting
from bascule.workload.masks import WAN21, synthetic_masks

Bools = NDArray[np.bool_]


def machine_of(flops_per_s: float, bytes_per_s: float, launch_s: float) -> HardwareProfile:
    return HardwareProfile(
        device="small",
        source="measured",
        attention_flops_per_s=flops_per_s,
        intra_bytes_per_s=bytes_per_s,
        launch_s=launch_s,
    )


MACHINE, DEAR_LAUNCHES = machine_of(6.4e9, 1e9, 5e-6), machine_of(1e12, 1e12, 1.0)

HEAD_DIM, ITEMSIZE, TOLERANCE = 16, 2, 0.05

TARGET = 1.1  # few blocks cannot be much more even, and the search for it takes long


def drifting(num_steps: int) -> list[Bools]:
    model = replace(WAN21, grid=(4, 6, 8), num_heads=6, block=8, step_drift=0.15)
    return [synthetic_masks(model, step=step) for step in range(num_steps)]


def setting_of(masks: Bools, *meshes: Mesh, machine: HardwareProfile = MACHINE) -> Setting:
    q_lens, kv_lens = (np.full(size, 8) for size in masks.shape[1:])
    return Setting(meshes, q_lens, kv_lens, machine, HEAD_DIM, ITEMSIZE, TARGET, 2.0, TOLERANCE)
