"""The packed MM-DiT and what it needs to run on one process or on many."""

from bascule.models.layout import TokenLayout as TokenLayout
from bascule.models.mmdit import Attend as Attend
from bascule.models.mmdit import Exchange as Exchange
from bascule.models.mmdit import LocalExchange as LocalExchange
from bascule.models.mmdit import MMDiT as MMDiT
from bascule.models.mmdit import MMDiTConfig as MMDiTConfig
from bascule.models.mmdit import PackedBatch as PackedBatch
