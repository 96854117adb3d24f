"""Steps on CUDA, without a device: nothing is read on the host, and no tensor of it is mixed in."""

from collections.abc import Callable
from functools import partial
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
from tests.helpers.inference_cases import Case, Inputs, make_inputs, make_model

pytestmark = pytest.mark.slow
HALF = torch.bfloat16
LENS = [[32, 1, 12], [4]]  # of each rank's samples
Made = tuple[dict[str, Any], Any, Inputs, torch.Size]  # degrees, model, inputs, output
TOPOLOGIES = ["g1n2", "g2n1", "g1r2n1"]
TRAINED = [
    ("g1n2", "both", torch.float32),
    ("g1r2n1", "both", HALF),
    *(("g2n1", batch, HALF) for batch in BATCHES if batch != "both"),
]


def steps() -> dict[str, Any]:
    """All exchanges of a training step, planned for each of the bags."""
    lens, found = LENS[dist.get_rank()], dict[str, Any]()
    for topology in TOPOLOGIES:
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
        found[topology] = sorted({str(x.device) for x in tensors}), list(back.shape)
    return found


def split_models(made: list[Made]) -> list[Any]:
    """Calls whose inputs ranks do not compare: those that they compare read a few numbers."""
    compares: Any = SameInputs
    compares.comparison = lambda *_: None
    found = list[Any]()
    for degrees, model, inputs, wanted in made:
        with parallelize(model, **degrees), fake_cuda():
            move(model, HALF)
            tensors = {k: x for k, x in inputs.items() if isinstance(x, torch.Tensor)}
            out = model(**inputs | {k: moved(x, HALF) for k, x in tensors.items()})[0]
        found.append([str(out.device), out.shape == wanted])
    return found


def reads() -> list[str]:
    """Errors of what reads a value, or mixes devices."""
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


def everything(models: list[Made]) -> list[Any]:
    join_with_cuda()
    trained = [packed_model(topology, BATCHES[name], dtype) for topology, name, dtype in TRAINED]
    return [reads(), steps(), trained, split_models(models)]


def prepared() -> Callable[[], list[Any]]:
    """Make the models, with the shapes of their outputs; return what a rank does with them."""
    models = list[Made]()
    for name, degrees in (("flux", {"ulysses_degree": 2}), ("wan", {"ring_degree": 2})):
        case = Case(name, 4, 2, 7, (3, 5))
        model, inputs = make_model(case), make_inputs(case)
        with torch.no_grad():
            models.append((degrees, model, inputs, model(**inputs)[0].shape))
    return partial(everything, models)


def test_nothing_is_read_on_the_host() -> None:
    pytest.importorskip("diffusers")
    function = f"{prepared.__module__}:{prepared.__name__}"
    for lens, of_rank in zip(LENS, run_guarded(function, 2), strict=True):
        said, stepped, trained, split = of_rank
        assert len(said) == 4, said
        assert stepped == {one: [[str(CUDA)], [sum(lens), 8]] for one in TOPOLOGIES}
        # One attention for each of the two blocks, and no gradient missing, or elsewhere.
        assert trained == [[[str(CUDA)], True, 2]] * len(TRAINED)
        assert split == [[str(CUDA), True]] * 2
