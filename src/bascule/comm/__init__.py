"""Move: process groups, agreement between ranks, and the exchange of rows."""

from bascule.comm.exchange import BoundRoute as BoundRoute
from bascule.comm.exchange import exchange as exchange
from bascule.comm.groups import RankGroup as RankGroup
from bascule.comm.groups import stage_cuda as stage_cuda
from bascule.comm.quantized import Quantized as Quantized
