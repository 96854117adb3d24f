"""Profiles that are known by name: nobody here measured them; each says where it is from."""

from typing import Any


def _of_datasheet(
    device: str, peak_tflops: float, link_gbs: float, link: str, memory_gb: float
) -> dict[str, Any]:
    """What training is taken to sustain of a data sheet's numbers, by the same shares for all.

    Args:
        device: Its name.
        peak_tflops: In bf16, dense.
        link_gbs: GB/s of a rank to others of its node, in one direction.
        link: What that is.
        memory_gb: Of a rank.
    """
    return {
        "device": device,
        "source": "datasheet",
        "matmul_flops_per_s": 0.55 * peak_tflops * 1e12,
        "attention_flops_per_s": 0.55 * peak_tflops * 1e12,
        "intra_bytes_per_s": 0.4 * link_gbs * 1e9,
        "inter_bytes_per_s": 25e9,
        "memory_bytes": memory_gb * 1e9,
        "launch_s": 10e-6,
        "peak_flops_per_s": peak_tflops * 1e12,
        "note": f"55 % of the peak of {peak_tflops:g} TFLOP/s in bf16, 40 % of {link}'s "
        f"{link_gbs:g} GB/s a direction, half of a link of 400 Gb/s; launches guessed",
    }


KNOWN_PROFILES: dict[str, dict[str, Any]] = {
    "h100-datasheet": _of_datasheet("NVIDIA H100 SXM", 989.0, 450.0, "NVLink", 80.0)
    | {"matmul_flops_per_s": 544e12, "attention_flops_per_s": 544e12},  # rounded
    "h200-datasheet": _of_datasheet("NVIDIA H200 SXM", 989.0, 450.0, "NVLink", 141.0),
    "b200-datasheet": _of_datasheet("NVIDIA B200 SXM", 2250.0, 900.0, "NVLink", 180.0),
    "a100-datasheet": _of_datasheet("NVIDIA A100 SXM 80GB", 312.0, 300.0, "NVLink", 80.0),
    "l40s-datasheet": _of_datasheet("NVIDIA L40S", 362.0, 32.0, "PCIe 4.0 x16", 48.0),
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
