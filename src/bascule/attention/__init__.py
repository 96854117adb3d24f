"""Attend: kernels on packed sequences, Ulysses inside bags, and the object that binds it all."""

from bascule.attention.kernels import PackedSequences as PackedSequences
from bascule.attention.kernels import select_kernel as select_kernel
from bascule.attention.parallel import SequenceParallel as SequenceParallel
from bascule.attention.parallel import Step as Step
