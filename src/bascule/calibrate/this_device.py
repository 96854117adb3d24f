"""What the device of this rank is."""

import os
import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Its name, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")  # Linux; elsewhere Python's own name must do
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int | None:
    """All its memory; of a CPU that of the host. None: the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
