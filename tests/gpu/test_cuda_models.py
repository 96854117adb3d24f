"""On one CUDA device: models of diffusers that one rank has to itself, compiled and recorded.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped.
"""

import pytest
import torch

from tests.helpers.device_runs import MODELS, split_alone
from tests.helpers.ranks import run_ranks

pytest.importorskip("diffusers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: models of diffusers NOT TESTED"
    ),
]
BOTH = "cpu:gloo,cuda:nccl"
ALLOWED = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", ALLOWED)
def test_models_eager_compiled_and_as_graphs(
    name: str, mode: str | None, dtype: torch.dtype
) -> None:
    (errors,) = run_ranks(split_alone, 1, "cuda", name, mode, dtype, backend=BOTH, timeout_s=500.0)
    assert max(errors) < ALLOWED[dtype], errors
