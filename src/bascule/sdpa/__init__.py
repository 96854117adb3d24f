"""Sequence parallelism for code that calls torch's attention function."""

from bascule.sdpa.mode import context_parallel as context_parallel
