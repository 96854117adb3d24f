"""Sequence parallelism for code that calls torch's attention function."""

from bascule.integrations.sdpa.mode import sequence_parallel as sequence_parallel
