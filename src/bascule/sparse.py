"""Block-sparse attention: plans of heads and blocks, and the choice of a mesh."""

from bascule.plan.sparse import partition_blocks as partition_blocks
from bascule.plan.sparse import partition_heads as partition_heads
from bascule.plan.sparse import sparse_imbalance as sparse_imbalance
from bascule.plan.sparse.choose import Strategies as Strategies
