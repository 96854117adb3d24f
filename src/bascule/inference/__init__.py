"""Sequence parallelism for models as they are: split, verified, and undone."""

from bascule.inference.handle import Parallelized as Parallelized
from bascule.inference.handle import parallelize as parallelize
from bascule.inference.mode import sequence_parallel as sequence_parallel
from bascule.inference.sparse import SparseLayer as SparseLayer
from bascule.inference.sparse_config import SparseConfig as SparseConfig
from bascule.inference.tables import Cut as Cut
from bascule.inference.tables import SplitTable as SplitTable
from bascule.inference.verify import Verification as Verification
