"""The packed MM-DiT and what it needs to run on one process or on many."""

from bascule.models.config import MMDiTConfig as MMDiTConfig
from bascule.models.exchange import Attend as Attend
from bascule.models.exchange import Exchange as Exchange
from bascule.models.exchange import LocalExchange as LocalExchange
from bascule.models.layout import TokenLayout as TokenLayout
from bascule.models.mmdit import MMDiT as MMDiT
from bascule.models.mmdit import PackedBatch as PackedBatch

__all__ = [
    "Attend",
    "Exchange",
    "LocalExchange",
    "MMDiT",
    "MMDiTConfig",
    "PackedBatch",
    "TokenLayout",
]
