"""handle.compile: one graph, the numbers of eager mode, taken back; modes that ranks cannot run."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bascule.diffusers import Cut, SplitTable, parallelize
from bascule.diffusers.compiling import check_mode
from bascule.errors import ConfigError
from tests.helpers.inference_cases import same, same_gradients
from tests.helpers.inference_toy import TABLE, grads_of, make_toy, toy_gradients, toy_inputs
from tests.helpers.ranks import on_ranks

GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Small(nn.Module):
    """As little as takes a second or two to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(12, 2)

    def forward(self, image: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image)
        return self.head(image)


def make_small() -> tuple[nn.Module, SplitTable, dict[str, Tensor]]:
    """With three heads and seven tokens for two ranks."""
    torch.manual_seed(0)
    image = Cut("image")
    table = SplitTable(
        ("image",), {"": {"image": image}}, {"head": image}, {"blocks.*": ("image",)}
    )
    return Small().double(), table, {"image": torch.randn(2, 7, 12, dtype=torch.float64)}


def make_large() -> tuple[nn.Module, SplitTable, dict[str, Tensor]]:
    """With masked text and cross attention."""
    return make_toy(num_blocks=1), TABLE, toy_inputs(masked=True)


# A model, settings of parallelize and of compile, and whether it trains.
SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], bool]] = [
    (make_small, {"ulysses_degree": 2}, {}, False),
    (make_small, {"ring_degree": 2}, {"dynamic": True}, True),
    (make_large, {"ulysses_degree": 2}, {}, True),
    (make_large, {"ring_degree": 2}, {"mode": "max-autotune-no-cudagraphs"}, True),
    (make_large, {"ulysses_degree": 2, "comm_dtype": "int8"}, {}, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(one, marks=pytest.mark.stress) for one in range(1, 5))]
)
@on_ranks(2)
def test_one_graph_gives_what_eager_mode_gives(number: int) -> None:
    """Against eager mode and one process; how many graphs it took; what undo() leaves."""
    make, split, settings, trains = SETTINGS[number]
    model, table, inputs = make()
    whole, whole_grads = toy_gradients(model, inputs)
    counters, is_exact = torch._dynamo.utils.counters, "comm_dtype" not in split
    with parallelize(model, table=table, **split) as handle:
        eager, eager_grads = toy_gradients(model, inputs)
        counters.clear()
        handle.compile(**settings)
        if trains:
            output, grads = toy_gradients(model, inputs)
            same_gradients(grads, eager_grads)
            handle.average_gradients()
            same_gradients(grads_of(model), whole_grads)
        else:
            with torch.no_grad():
                output = model(**inputs)
        same(output, eager)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        verified = handle.verify(**inputs)
        if is_exact:
            same(output, whole)
            assert str(verified).startswith("the mesh agrees"), str(verified)
    counters.clear()
    with torch.no_grad():
        assert torch.equal(model(**inputs), whole)
    assert model._compiled_call_impl is None and not counters["stats"]


@on_ranks(2)
def test_lengths_share_graphs() -> None:
    """One graph for the first length, and one for all others."""
    model, table, _ = make_small()
    images = [torch.randn(2, tokens, 12, dtype=torch.float64) for tokens in (7, 10, 30, 4, 25)]
    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        wanted = [model(image) for image in images]
        with parallelize(model, ulysses_degree=2, table=table):
            counters.clear()
            model.compile(backend="aot_eager", fullgraph=True)
            for image, whole in zip(images, wanted, strict=True):
                same(model(image), whole)
    assert counters["stats"]["unique_graphs"] == 2


class Pipeline:
    """Two models, as a pipeline of diffusers with two experts has them."""

    def __init__(self) -> None:
        self.transformer, self.table, _ = make_small()
        self.transformer_2, _, _ = make_small()


@pytest.mark.stress
@on_ranks(2)
def test_all_models_of_a_pipeline_are_compiled_each_with_its_own_graphs() -> None:
    """Both models over two lengths, with no more graphs allowed than one model takes."""
    pipeline, graphs = Pipeline(), list[int]()
    counters, limit = torch._dynamo.utils.counters, torch._dynamo.config.patch(recompile_limit=2)
    with parallelize(pipeline, ulysses_degree=2, table=pipeline.table) as handle, limit:
        handle.compile()
        for model in (pipeline.transformer, pipeline.transformer_2):
            for tokens in (7, 10):
                image = torch.randn(1, tokens, 12, dtype=torch.float64)
                dist.broadcast(image, 0)
                counters.clear()
                with torch.no_grad():
                    output = model(image)
                    graphs.append(counters["stats"]["unique_graphs"])
                    with torch.compiler.set_stance("force_eager"):
                        same(output, model(image))
    assert graphs[0] == graphs[2] == 1 and max(graphs) == 1, graphs


@on_ranks(2)
def test_compiling_again_replaces_and_undo_restores_what_the_user_compiled() -> None:
    """What is compiled, by identity: nothing is called, so nothing is traced."""
    model = make_toy()
    model.compile(backend="eager")
    users_own = model._compiled_call_impl
    handle = parallelize(model, table=TABLE, ring_degree=2)
    assert model._compiled_call_impl is users_own
    handle.compile()
    first = model._compiled_call_impl
    assert first not in (users_own, None)
    refused(lambda: handle.compile("reduce-overhead"))
    assert model._compiled_call_impl is first
    handle.compile("max-autotune-no-cudagraphs", dynamic=False)
    assert model._compiled_call_impl not in (first, users_own, None)
    for _ in range(2):
        handle.undo()
        assert model._compiled_call_impl is users_own


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


@on_ranks(2)
def test_graph_modes_are_for_collectives_that_can_be_recorded() -> None:
    """By mode and device; what a mesh of NCCL gives is asked without one."""
    cuda, said = torch.device("cuda"), dict[str, str]()
    with parallelize(make_toy(), table=TABLE, ring_degree=2, ulysses_degree=1) as handle:
        modes: list[Any] = [*GRAPH_MODES, "fast"]
        for mode in modes:
            said[f"{mode} cpu"] = refused(lambda mode=mode: handle.compile(mode))
        assert handle.model._compiled_call_impl is None
        for mode in GRAPH_MODES:
            said[f"{mode} gloo"] = refused(lambda m=mode: check_mode(m, None, handle.mesh, cuda))
            for config in ("cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:ucc"):
                with mock.patch.object(dist, "get_backend_config", lambda _, c=config: c):
                    for dynamic in (None, True):
                        said[f"{mode} {config} {dynamic}"] = refused(
                            lambda m=mode, d=dynamic: check_mode(m, d, handle.mesh, cuda)
                        )
    assert said["fast cpu"] == (
        "compile: mode 'fast' is not one of default, max-autotune-no-cudagraphs, "
        "reduce-overhead, max-autotune"
    )
    for mode, nearest in GRAPH_MODES.items():
        cpu, gloo = said[f"{mode} cpu"], said[f"{mode} gloo"]
        assert "a model on cpu has none" in cpu and cpu.endswith(f"use mode={nearest!r}")
        assert "gloo exchanges on the host, which a graph cannot record" in gloo
        assert gloo.endswith(f"use mode={nearest!r}")
        assert "not of ucc" in said[f"{mode} cpu:gloo,cuda:ucc None"]
        for config in ("cpu:gloo,cuda:nccl", "cuda:nccl"):
            assert said[f"{mode} {config} None"] == "nothing was refused"
            assert "dynamic=False" in said[f"{mode} {config} True"]
