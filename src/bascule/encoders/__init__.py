"""Encoders in balance: images, videos and texts go where there is time to encode them."""

from bascule.encoders.encoder import BalancedEncoder as BalancedEncoder
from bascule.encoders.encoder import EncoderOptions as EncoderOptions
from bascule.encoders.items import EncoderTable as EncoderTable
from bascule.encoders.tiled_vae import TiledVAE as TiledVAE
