"""Data loading that gives every rank the same work: samples move, or indices are dealt."""

from bascule.data.collators import collate_padded as collate_padded
from bascule.data.cost_tracker import CostTracker as CostTracker
from bascule.data.loader import BalancedLoader as BalancedLoader
from bascule.data.loader_batch import Batch as Batch
from bascule.data.packs import Pack as Pack
from bascule.data.samplers.balanced import BalancedSampler as BalancedSampler
from bascule.data.samplers.balanced import SamplerOptions as SamplerOptions
from bascule.data.samplers.resumable import ResumableSampler as ResumableSampler
from bascule.data.setup import LoaderOptions as LoaderOptions
