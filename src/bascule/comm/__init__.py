"""Move: process groups, agreement between ranks, and the exchange of rows."""

from bascule.comm.groups import RankGroup as RankGroup
from bascule.comm.groups import stage_cuda as stage_cuda
from bascule.comm.quantized import Quantized as Quantized
from bascule.comm.route import BoundRoute as BoundRoute
from bascule.comm.route import move as move
