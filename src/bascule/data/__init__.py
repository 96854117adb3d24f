"""Data loading that gives every rank the same work, by moving samples or dealing indices."""

from bascule.data.cost_tracker import CostTracker as CostTracker
from bascule.data.loader import BalancedLoader as BalancedLoader
from bascule.data.loader import LoaderOptions as LoaderOptions
from bascule.data.packs import Pack as Pack
from bascule.data.packs import collate_padded as collate_padded
from bascule.data.samplers import BalancedSampler as BalancedSampler
from bascule.data.samplers import ResumableSampler as ResumableSampler
from bascule.data.samplers import SamplerOptions as SamplerOptions
from bascule.data.steps import Batch as Batch
