"""What parallelize and its handle refuse: misuse, and ranks that are given different things.

Each wrong use ends in an error of a few sentences on every rank, with the same text or the rank's
own part of it.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bascule.comm.groups import set_timeout
from bascule.comm.quantized import Quantized
from bascule.diffusers import SparseConfig, parallelize
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import TABLE, Toy, direct, make_toy, toy_gradients, toy_inputs
from tests.helpers.misuse_arguments import DEGREES, SETTINGS, TABLES, Wrong, is_in_step
from tests.helpers.misuse_models import CALLS, ENDING, MODELS
from tests.helpers.misuse_ranks import RANKS
from tests.helpers.misuse_runs import QUICK, RUNS
from tests.helpers.ranks import raised_by, run_ranks


def disagreements() -> dict[str, tuple[list[str], str]]:
    """What one of two ranks is given alone."""
    rank, mesh = dist.get_rank(), make_mesh(1, 2)
    is_other = rank == 1
    said: dict[str, tuple[list[str], str]] = {}
    sparse, wire = SparseConfig(keep=0.5, block=4), Quantized("int8")
    table = replace(TABLE, replicated=("time", "context", "extra"))
    for name, options in (
        ("sparse", {"sparse": sparse if is_other else None}),
        ("wire", {"comm_dtype": wire if is_other else None}),
        ("wires", {"comm_dtype": Quantized("e4m3") if is_other else wire}),
        ("table", {"table": table if is_other else TABLE}),
        ("both", {"sparse": sparse, "comm_dtype": wire if is_other else None}),
    ):
        given: Any = {"mesh": mesh, "table": TABLE, **options}
        said[name] = raised_by(parallelize, make_toy(), **given)
    sizes = make_toy(num_blocks=2 + is_other)
    said["model"] = raised_by(parallelize, sizes, mesh=mesh, table=TABLE)
    degrees: Any = {"ulysses_degree": 2} if is_other else {"ring_degree": 2}
    said["degrees"] = raised_by(parallelize, make_toy(), table=TABLE, **degrees)
    model = make_toy()
    with parallelize(model, mesh=mesh, table=TABLE) as handle:
        toy_gradients(model, toy_inputs())
        if is_other:
            model.head.bias.grad = None
        said["gradients"] = raised_by(handle.average_gradients)
        if is_other:
            model.register_parameter("extra", nn.Parameter(torch.ones(2)))
        said["parameters"] = raised_by(handle.average_gradients)
    made = make_toy() if is_other else model
    handles = (
        [parallelize(model, mesh=mesh, table=TABLE)]
        if not is_other
        else [parallelize(make_toy(), mesh=mesh, table=TABLE)]
    )
    said["split already"] = raised_by(parallelize, made, mesh=mesh, table=TABLE)
    handles[0].undo()
    with parallelize(make_toy(), mesh=mesh, table=TABLE) as handle:
        assert handle.verify(**toy_inputs()).ok  # the ranks still agree on what comes next
    return said


def test_ranks_that_are_given_different_things_all_raise() -> None:
    first, second = run_ranks(disagreements, 2, timeout_s=40.0)
    texts = {
        "sparse": "disagree on sparse: ranks [0]: none; ranks [1]: given",
        "wire": "comm_dtype=Quantized(format=",
        "wires": "disagree on attention",
        "table": "disagree on tables",
        "both": "leave out comm_dtype or sparse",
        "model": "disagree on models: ranks [0]: Toy with",
        "degrees": "disagree on mesh: ranks [0]: ring 2 x Ulysses 1; ranks [1]: ring 1 x Ulysses 2",
        "gradients": "disagree on parameters without gradients: ranks [0]: 0: ; ranks [1]: 1: "
        "head.bias",
        "parameters": "disagree on parameters: ranks [0]: 50:",
        "split already": "split over ranks already",
    }
    for said in (first, second):
        assert set(said) == set(texts)
        for name, text in texts.items():
            assert text in said[name][1], (name, said[name])
            assert {"ConfigError", "CommError"} & set(said[name][0]), said[name]


def outside() -> tuple[list[str], str] | float:
    """The last of three ranks is in no mesh."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ulysses",))
    model, inputs = make_toy(), toy_inputs()
    if dist.get_rank() == 2:
        return raised_by(parallelize, model, mesh=mesh, table=TABLE)
    wanted = model(**inputs)
    with parallelize(model, mesh=mesh, table=TABLE):
        return difference(model(**inputs), wanted)


def test_a_rank_outside_of_the_mesh() -> None:
    *errors, (classes, text) = run_ranks(outside, 3)
    assert max(errors) < 1e-12
    assert "ConfigError" in classes and "rank 2 is not in the mesh of ranks [0, 1]" in text


class Lazy(Toy):
    """Its forward pass runs when somebody asks for what it yields."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        yield super().forward(*args, **kwargs)


@dataclass
class Extra:
    adapters: list[Tensor]


def misused() -> dict[str, str]:
    mesh, inputs, said = make_mesh(1, 2), toy_inputs(), dict[str, str]()
    model = make_toy()
    given: Any = {"mesh": mesh, "table": TABLE}
    handle = parallelize(model, **given)
    said["object"] = raised_by(model, **inputs, extra=Extra([inputs["text"]]))[1]
    said["argument"] = raised_by(model, *inputs.values(), None, None, inputs["text"])[1]
    said["forward"] = raised_by(model.forward, **inputs)[1]
    with handle:
        model(**inputs)
    said["entered again"] = raised_by(handle.__enter__)[1]
    lazy = Lazy().double()
    with parallelize(lazy, **given):
        said["generator"] = raised_by(next, lazy(**inputs))[1]
    fully_shard(model)
    with parallelize(model, **given) as handle:
        model(**inputs).clone().sum().backward()
        said["sharded"] = raised_by(handle.average_gradients)[1]
    return said


def test_misuse_is_refused_with_the_reason() -> None:
    texts = {
        "object": "the tensors of extra",
        "argument": "the tensors of argument 6",
        "forward": "call the model itself",
        "entered again": "undo() was called: call parallelize again",
        "generator": "which must not be a generator",
        "sharded": "the gradient of text_in.weight is sharded, as by FSDP",
    }
    for said in run_ranks(misused, 2):
        assert set(said) == set(texts)
        for name, text in texts.items():
            assert text in said[name], (name, said[name])


def failed_alone() -> tuple[list[str], str]:
    """One of two ranks meets an error in a forward pass; all met others before, alike."""
    model, inputs = make_toy(), toy_inputs()
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE) as handle:
        for _ in range(3):
            raised_by(model, **inputs, extra=[inputs["text"]])
            model(**inputs)
        model.run = handle.checkpoint
        model(**inputs).sum().backward()
        model.run = direct

        def fail(module: nn.Module, *args: Any) -> None:
            raise ValueError("no memory is left")

        if dist.get_rank() == 1:
            model.blocks[1].register_forward_pre_hook(fail)
        return raised_by(model, **inputs)


def test_an_error_of_one_rank_ends_the_others_with_its_text() -> None:
    (classes, text), own = run_ranks(failed_alone, 2)
    assert "CommError" in classes and "forward pass of Toy" in text
    assert "no memory is left" in text and own[1] == "no memory is left"


GROUPS: dict[str, dict[str, Wrong]] = {
    "degrees": DEGREES,
    "settings": SETTINGS,
    "tables": TABLES,
    "models": MODELS,
    "calls": CALLS,
    "ending": ENDING,
    "ranks": RANKS,
    "runs": RUNS,
}
_STRESS = pytest.mark.stress
_LONGEST = 700  # characters: a few sentences, with what each rank was given


def said_of(group: str, name: str) -> str:
    """What the error of a wrong use says; some are torch's own."""
    try:
        GROUPS[group][name][0]()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    raise AssertionError(f"{name}: nothing was raised")


def all_said_of(group: str) -> dict[str, str]:
    """One after the other: the ranks must be in step after each."""
    said = dict[str, str]()
    for name in GROUPS[group]:
        said[name] = said_of(group, name)
        assert is_in_step(), name
    return said


@pytest.mark.parametrize("group", ["settings", "calls"])
def test_what_every_rank_does_wrong_is_told(group: str) -> None:
    for said in run_ranks(all_said_of, 2, group):
        for name, (_, text) in GROUPS[group].items():
            assert text in said[name] and len(said[name]) < _LONGEST, (name, said[name])


@pytest.mark.some(17)
@pytest.mark.parametrize(
    ("group", "name"),
    [("ranks", name) for name in RANKS]
    + [("ending", name) for name in ENDING]
    + [pytest.param("runs", name, marks=[] if name in QUICK else _STRESS) for name in RUNS],
)
def test_what_ends_a_mesh_is_told_to_all_ranks(group: str, name: str) -> None:
    for said in run_ranks(said_of, 2, group, name):
        assert GROUPS[group][name][1] in said, said


def does_not_come() -> str:
    model = make_toy()
    with parallelize(model, ulysses_degree=2, table=TABLE) as handle:
        assert handle.mesh.whole is not None
        set_timeout(handle.mesh.whole, 2.0)
        if dist.get_rank() == 0:
            return raised_by(model, **toy_inputs())[1]
    with suppress(RuntimeError):
        dist.barrier()
    return ""


def test_a_rank_that_does_not_come_is_named() -> None:
    assert "no report from ranks [1]" in run_ranks(does_not_come, 2)[0]
