"""Dynamic context parallelism in verl: ``VERL_USE_EXTERNAL_MODULES=bascule.plugins.verl_packing``.

verl imports this module in each process, and the scheduler by its name in Megatron.
"""

# pyright: reportMissingImports=false

from megatron.core.datasets import data_schedule

from bascule.plugins.megatron_packing import DynamicPackingScheduler

data_schedule.DefaultDynamicCPScheduler = DynamicPackingScheduler
