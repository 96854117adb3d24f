"""Balanced training; modules load at first use, since options are parsed without torch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.train.stepping import keep_exchanges as keep_exchanges
    from bascule.train.stepping import measure_speeds as measure_speeds
    from bascule.train.stepping import sync_of as sync_of
    from bascule.train.stepping import train_step as train_step


def __getattr__(name: str) -> object:
    if name not in ("keep_exchanges", "measure_speeds", "sync_of", "train_step"):
        raise AttributeError(f"module 'bascule.train' has no attribute {name!r}")
    return getattr(importlib.import_module("bascule.train.stepping"), name)
