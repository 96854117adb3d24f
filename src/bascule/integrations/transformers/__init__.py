"""Balanced training with the Trainer of transformers."""

from bascule.integrations.transformers.balance_config import BalanceConfig as BalanceConfig
from bascule.integrations.transformers.trainer import BalancedTrainerMixin as BalancedTrainerMixin
