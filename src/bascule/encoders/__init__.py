"""Encoders in balance: images, videos and texts go where there is time to encode them."""

from bascule.encoders.balanced_encoder import BalancedEncoder as BalancedEncoder
from bascule.encoders.encoder_tables import EncoderOptions as EncoderOptions
from bascule.encoders.encoder_tables import EncoderTable as EncoderTable
from bascule.encoders.tiled_vae import TiledVAE as TiledVAE
