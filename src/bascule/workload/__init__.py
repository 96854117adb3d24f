"""Inputs to plan for: data codes, manifests, masks, traces and requests. Nothing imports torch.

Names are resolved when they are first used: a command that plans lengths loads no masks.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.workload.codes import parse_data_codes as parse_data_codes
    from bascule.workload.codes import sample_lengths as sample_lengths
    from bascule.workload.manifest import Manifest as Manifest
    from bascule.workload.manifest import read_manifest as read_manifest
    from bascule.workload.masks import load_masks as load_masks
    from bascule.workload.masks import save_masks as save_masks
    from bascule.workload.tokens import TokenRule as TokenRule

_NAMES = {
    "codes": ("parse_data_codes", "sample_lengths"),
    "manifest": ("Manifest", "read_manifest"),
    "masks": ("load_masks", "save_masks"),
    "tokens": ("TokenRule",),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"bascule.workload.{module}"), name)
    raise AttributeError(f"module 'bascule.workload' has no attribute {name!r}")
