"""Training in balance: one step of it, how fast ranks are, and `bascule train`.

Names are resolved when they are first used: options are parsed without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.train.rank_speeds import measure_speeds as measure_speeds
    from bascule.train.recompute_policy import keep_exchanges as keep_exchanges
    from bascule.train.stepping import sync_of as sync_of
    from bascule.train.stepping import train_step as train_step

# No name is that of a module: importing that would put the module in its place.
_HOMES = {
    "keep_exchanges": "bascule.train.recompute_policy",
    "measure_speeds": "bascule.train.rank_speeds",
    "sync_of": "bascule.train.stepping",
    "train_step": "bascule.train.stepping",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'bascule.train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
