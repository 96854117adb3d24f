"""Balance transformers' Trainer, and run its models on packed sequences in bags of ranks."""

from bascule.transformers.bag_attention import call_packed as call_packed
from bascule.transformers.bag_attention import register_attention as register_attention
from bascule.transformers.context import context_parallel as context_parallel
from bascule.transformers.delta_rule import split_delta_layers as split_delta_layers
from bascule.transformers.trainer import BalanceConfig as BalanceConfig
from bascule.transformers.trainer import BalancedTrainerMixin as BalancedTrainerMixin
from bascule.transformers.trainer import inputs_of_pack as inputs_of_pack
