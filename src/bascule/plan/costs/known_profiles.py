"""Profiles that are known by name: nobody here measured them; each says where it is from."""

from typing import Any

KNOWN_PROFILES: dict[str, dict[str, Any]] = {
    "h100-datasheet": {
        "device": "NVIDIA H100 SXM",
        "source": "datasheet",
        "matmul_flops_per_s": 544e12,
        "attention_flops_per_s": 544e12,
        "intra_bytes_per_s": 180e9,
        "inter_bytes_per_s": 25e9,
        "memory_bytes": 80e9,
        "launch_s": 10e-6,
        "peak_flops_per_s": 989e12,
        "note": "55 % of the peak of 989 TFLOP/s in bf16, 40 % of NVLink's 450 GB/s a direction, "
        "half of a link of 400 Gb/s; launches guessed",
    },
    "h100-knapformer": {
        "device": "NVIDIA H100 SXM under KnapFormer",
        "source": "published",
        "matmul_flops_per_s": 325e12,
        "attention_flops_per_s": 325e12 / 0.426,
        "intra_bytes_per_s": 450e9,
        "inter_bytes_per_s": 25e9,
        "memory_bytes": 80e9,
        "launch_s": 10e-6,
        "host_s": 0.583,
        "peak_flops_per_s": 989e12,
        "pack_bytes_per_s": 182e9,
        "piece_s": 9.25e-6,
        "note": "matmul_flops_per_s, host_s and piece_s were fitted to four rows of Table 1 of "
        "KnapFormer; NVLink is the data sheet's, packing (5.5 passes over what is exchanged, at "
        "30 % of 3.35 TB/s) and half of a link of 400 Gb/s are assumed",
    },
}
"""Fields of a `HardwareProfile` by name."""
