"""Block-sparse attention over a mesh of ranks."""

from bascule.attention.sparse.attend import PooledRule as PooledRule
from bascule.attention.sparse.attend import attend_sparse as attend_sparse
from bascule.attention.sparse.attend import gather_counts as gather_counts
from bascule.attention.sparse.attend import rows_of as rows_of
from bascule.attention.sparse.attend import sparse_attention as sparse_attention
from bascule.attention.sparse.rules import keep_top_k as keep_top_k
from bascule.attention.sparse.timing import CallShape as CallShape
