"""Shapes that diffusers' own context parallelism refuses."""

from unittest import mock

import pytest
import torch

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import Case, difference, make_inputs, make_mesh, make_model
from tests.helpers.ranks import on_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

ODD = [Case("flux", 4, 1, 15, (4, 4)), Case("flux", 5, 1, 16, (4, 4)), Case("wan", 5, 1, 8, (3, 3))]


def theirs(case: Case) -> str:
    """Ulysses on two ranks, or how it ends."""
    from diffusers import ContextParallelConfig  # pyright: ignore[reportPrivateImportUsage]

    model = make_model(case)
    try:
        # Without an accelerator it divides by their number.
        with mock.patch.object(torch.accelerator, "device_count", lambda: 1):
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        model(**make_inputs(case))
    except (AssertionError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "nothing was refused"


@on_ranks(2)
def test_exact_where_diffusers_refuses() -> None:
    mesh, found = make_mesh(1, 2), dict[str, tuple[float, str]]()
    with torch.no_grad():
        for case in ODD:
            model, inputs = make_model(case), make_inputs(case)
            wanted = model(**inputs).sample
            with parallelize(model, mesh=mesh):
                found[str(case)] = difference(model(**inputs).sample, wanted), theirs(case)
    for error, peer in found.values():
        assert error <= 1e-6 and peer in ("AssertionError", "RuntimeError"), found
