"""Steps on CUDA, without a device: nothing is read on the host, and no tensor of it is mixed in."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.diffusers import parallelize
from bascule.diffusers.arguments import SameInputs
from bascule.models.layout import count_text
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.fake_cuda import (
    BATCHES,
    CUDA,
    fake_cuda,
    join_with_cuda,
    move,
    moved,
    packed_model,
)
from tests.helpers.guarded_ranks import run_guarded
from tests.helpers.inference_cases import Case, make_inputs, make_model
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow
HALF = torch.bfloat16
LENS = [[32, 1, 12], [4]]  # of each rank's samples


def steps(topologies: list[str]) -> dict[str, Any]:
    """All exchanges of a training step, planned for each of these bags."""
    join_with_cuda()
    lens, found = LENS[dist.get_rank()], dict[str, Any]()
    for topology in topologies:
        sp = SequenceParallel(None, topology, COST)
        with fake_cuda():
            x = torch.empty(sum(lens), 8, dtype=HALF, device=CUDA)
            step = sp.plan(lens)
            ids = torch.empty(len(x), dtype=torch.int64, device=CUDA)
            here = step.route(x=x, ids=ids)
            q = torch.empty(len(here["x"]), 4, 64, dtype=HALF, device=CUDA)
            attended = step.attend(q, q, q, causal=True)
            vectors = step.gather_samples(torch.empty(len(lens), 3, device=CUDA))
            vectors.index_select(0, step.local_seq_ids)
            back = step.restore(here["x"] + attended.mean())
            loss = step.mean(back.square().mean(-1))
        tensors = [*here.values(), attended, vectors, back, loss]
        found[topology] = {str(x.device) for x in tensors}, tuple(back.shape)
    return found


def test_a_training_step_reads_nothing_on_the_host() -> None:
    topologies = ["g1n2", "g2n1", "g1r2n1"]
    for lens, found in zip(LENS, run_ranks(steps, 2, topologies), strict=True):
        for topology in topologies:
            assert found[topology] == ({str(CUDA)}, (sum(lens), 8)), found


def check_packed_model(of_ranks: list[list[Any]], topologies: list[str]) -> None:
    cases = [[topology, name] for topology in topologies for name in BATCHES]
    for found in of_ranks:
        assert [one[:2] for one in found] == cases
        # One attention for each of the two blocks, and nothing without a gradient, or elsewhere.
        assert all(one[2:] == [[str(CUDA)], True, 2] for one in found), found


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_packed_model_reads_nothing_on_the_host(dtype: str) -> None:
    topologies = ["g1n2", "g2n1", "g1r2n1"]
    check_packed_model(run_ranks(packed_model, 2, topologies, dtype, False), topologies)


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_backward_of_the_packed_model_reads_nothing_on_the_host(dtype: str) -> None:
    topologies = ["g2n1", "g1r2n1"]
    function = f"{packed_model.__module__}:{packed_model.__name__}"
    check_packed_model(run_guarded(function, 2, topologies, dtype, True), topologies)


def split_models(models: list[str]) -> dict[str, Any]:
    """Calls whose inputs ranks do not compare: those that they compare read a few numbers."""
    join_with_cuda()
    compares: Any = SameInputs
    compares.due = lambda *_: lambda: None
    found = dict[str, Any]()
    for name in models:
        case = Case(name, 4, 2, 7, (3, 5))
        for degrees in ({"ulysses_degree": 2}, {"ring_degree": 2}):
            model, inputs = make_model(case, torch.float32), make_inputs(case)
            with torch.no_grad():
                wanted = model(**inputs)[0].shape
            with parallelize(model, **degrees), fake_cuda():  # pyright: ignore[reportArgumentType]
                move(model, HALF)
                tensors = {k: x for k, x in inputs.items() if isinstance(x, torch.Tensor)}
                given = inputs | {k: moved(x, HALF) for k, x in tensors.items()}
                out = model(**given)[0]
            found[f"{name}, {degrees}"] = str(out.device), out.shape == wanted
    return found


def test_split_models_read_nothing_on_the_host() -> None:
    pytest.importorskip("diffusers")
    for found in run_ranks(split_models, 2, ["flux", "wan"]):
        assert len(found) == 4 and set(found.values()) == {(str(CUDA), True)}, found


def reads() -> list[str]:
    join_with_cuda()
    with fake_cuda():
        x = torch.ones(3, device=CUDA)
        said = list[str]()
        for wrong in (
            lambda: x.sum().item(),
            lambda: x + torch.ones(3),
            lambda: x.cpu().numpy(),
            lambda: count_text(x > 0),
        ):
            try:
                wrong()
            except Exception as error:
                said.append(type(error).__name__)
    return said


def test_what_reads_a_value_or_mixes_devices_is_found() -> None:
    for said in run_ranks(reads, 1):
        assert len(said) == 4, said
