"""Plan block-sparse attention: which rank computes which query blocks of which heads.

A mask says which query blocks see which key blocks. On a mesh of U Ulysses x R ring ranks, every
ring has some heads, maybe only a part of a head's queries. A query block stays on a ring rank; keys
and values travel around the ring. Source: db-SP, whose method is the baseline "paper". Blocks dealt
in stripes are nearly even without moves; a few moves remove the remaining imbalance.

Legend: H heads, Q query blocks, K key blocks, U rings (Ulysses ranks), R ranks of a ring. Rank =
ring rank * U + Ulysses rank.
"""

from bascule.plan.sparse.choose import PlanReuse as PlanReuse
from bascule.plan.sparse.layout import BlockLayout as BlockLayout
from bascule.plan.sparse.layout import block_counts as block_counts
from bascule.plan.sparse.layout import block_lens as block_lens
from bascule.plan.sparse.layout import check_degrees as check_degrees
from bascule.plan.sparse.layout import turns as turns
from bascule.plan.sparse.partition import partition_blocks as partition_blocks
from bascule.plan.sparse.partition import partition_heads as partition_heads
from bascule.plan.sparse.plan import PackedRows as PackedRows
from bascule.plan.sparse.plan import SparsePlan as SparsePlan
from bascule.plan.sparse.planner import SparsePlanner as SparsePlanner
from bascule.plan.sparse.planner import in_order as in_order
from bascule.plan.sparse.planner import plan_under as plan_under
from bascule.plan.sparse.planner import sparse_imbalance as sparse_imbalance
