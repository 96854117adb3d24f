"""Balanced encoders: ranks that have time encode images, videos and texts of other ranks."""

from bascule.encoders.encoder import BalancedEncoder as BalancedEncoder
from bascule.encoders.encoder import EncoderOptions as EncoderOptions
from bascule.encoders.items import EncoderTable as EncoderTable
from bascule.encoders.items import split_frames as split_frames
from bascule.encoders.step_costs import StepCosts as StepCosts
from bascule.encoders.step_costs import step_costs as step_costs
from bascule.encoders.tiled_vae import TiledVAE as TiledVAE
