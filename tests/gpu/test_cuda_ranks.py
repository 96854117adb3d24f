"""On one CUDA device: two ranks that share it, over gloo, whose tensors travel through the host.

Run with `pytest -m gpu tests/gpu`, and the long ones with `pytest -m "gpu and stress" tests/gpu`;
without a device everything here is skipped.
"""

import pytest
import torch

from bascule.comm.quantized import Quantized
from tests.helpers.device_runs import MODELS, split_together, train_together
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: several ranks NOT TESTED"
    ),
]
TOPOLOGIES = ["g1n2", "g2n1", "g1r2n1"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_steps_are_those_of_one_process(topology: str) -> None:
    assert run_ranks(train_together, 2, "cuda", topology, 8, 1) == [8, 8]


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_thousand_steps_are_those_of_one_process(topology: str) -> None:
    args = "cuda", topology, 1000, 20
    assert run_ranks(train_together, 2, *args, timeout_s=1700.0) == [50, 50]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("wire", "allowed"), [(None, 2e-3), (Quantized("int8"), 3e-2)])
def test_models_are_those_of_one_process(
    name: str, ulysses: int, ring: int, wire: Quantized | None, allowed: float
) -> None:
    pytest.importorskip("diffusers")
    errors = run_ranks(split_together, 2, "cuda", name, ulysses, ring, wire)
    assert max(errors) < allowed
