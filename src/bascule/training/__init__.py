"""Training in balance: one step of it, and what checkpoints of activations keep."""

from bascule.training.keep_exchanges import keep_exchanges as keep_exchanges
from bascule.training.rank_speeds import measure_speeds as measure_speeds
from bascule.training.train_step import sync_of as sync_of
from bascule.training.train_step import train_step as train_step
