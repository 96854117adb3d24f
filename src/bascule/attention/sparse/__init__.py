"""Block-sparse attention over a mesh of ranks."""

from bascule.attention.sparse.attend import attend_sparse as attend_sparse
from bascule.attention.sparse.attend import gather_counts as gather_counts
from bascule.attention.sparse.attend import rows_of as rows_of
from bascule.attention.sparse.attend import sparse_attention as sparse_attention
from bascule.attention.sparse.clusters import Clusters as Clusters
from bascule.attention.sparse.rules import BlockRule as BlockRule
from bascule.attention.sparse.rules import RuleCall as RuleCall
from bascule.attention.sparse.rules import keep_mass as keep_mass
from bascule.attention.sparse.rules import keep_top_k as keep_top_k
from bascule.attention.sparse.rules import radial as radial
from bascule.attention.sparse.rules import sliding_tiles as sliding_tiles
from bascule.attention.sparse.rules import sparge as sparge
from bascule.attention.sparse.rules import spatial_or_temporal as spatial_or_temporal
from bascule.attention.sparse.rules import top_mass as top_mass
from bascule.attention.sparse.rules import top_share as top_share
