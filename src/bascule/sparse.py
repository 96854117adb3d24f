"""Block-sparse attention: its latency, measured and fitted, and plans of heads and blocks."""

from bascule.attention.sparse.timing import measure_attention_latency as measure_attention_latency
from bascule.machine.cluster import AttentionLatency as AttentionLatency
from bascule.machine.fits import fit_attention_latency as fit_attention_latency
from bascule.plan.sparse import partition_blocks as partition_blocks
from bascule.plan.sparse import partition_heads as partition_heads
from bascule.plan.sparse import sparse_imbalance as sparse_imbalance
from bascule.plan.sparse.choose import Strategies as Strategies
