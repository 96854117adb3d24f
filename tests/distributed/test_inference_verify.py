"""verify() and explain(): what they find, on every rank alike, and the bytes on the wire."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bascule.comm.quantized import Quantized
from bascule.diffusers import ParallelHandle, parallelize
from bascule.errors import CommError, ConfigError
from bascule.plan.machine import HardwareProfile
from tests.helpers.calls_made import calls_made
from tests.helpers.inference_cases import make_mesh
from tests.helpers.inference_toy import TABLE, Toy, make_toy, toy_inputs
from tests.helpers.ranks import raised_by, run_ranks

MESHES = [(2, 1), (2, 2), (1, 4)]  # ring, Ulysses
Hook = Callable[[nn.Module, Any, tuple[Tensor, Tensor]], Any]


@contextmanager
def split_toy(ring: int, ulysses: int, num_blocks: int = 3) -> Iterator[tuple[Toy, ParallelHandle]]:
    model = make_toy(num_blocks=num_blocks)
    with parallelize(model, mesh=make_mesh(ring, ulysses), table=TABLE) as handle:
        yield model, handle


def perturbed(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    return output[0], output[1] * 1.001


def minus_mean(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    """What looks at all tokens without attention: right on one process, wrong on shares."""
    return output[0], output[1] - output[1].mean(dim=1, keepdim=True)


def not_a_number(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    return output[0] * float("nan"), output[1]


def verdicts(ring: int, ulysses: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    inputs = toy_inputs(text=5, image=9, masked=True)
    with split_toy(ring, ulysses) as (model, handle):
        found["whole"] = handle.verify(**inputs)
        for rank in range(dist.get_world_size()):
            with hooked(model, 1, perturbed, dist.get_rank() == rank):
                found[f"perturbed on {rank}"] = handle.verify(**inputs)
        with hooked(model, 2, minus_mean, True):
            found["mean"] = handle.verify(**inputs)
        with hooked(model, 0, not_a_number, dist.get_rank() == 1):
            found["nan"] = handle.verify(**inputs)
        found["strict"] = dataclasses.replace(found["whole"], tolerance=0.0)
        with torch.no_grad():
            model.head.weight[0, 0] += 0.1 * dist.get_rank()
        found["weights"] = handle.verify(**inputs)
        found["after"] = str(found["weights"])
    return found


@contextmanager
def hooked(model: Toy, block: int, hook: Hook, applies: bool) -> Iterator[None]:
    handle = model.blocks[block].register_forward_hook(hook) if applies else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_verify_names_the_first_block_that_differs(ring: int, ulysses: int) -> None:
    by_rank = run_ranks(verdicts, ring * ulysses, ring, ulysses)
    for found in by_rank:
        assert found["whole"].ok, str(found["whole"])
        assert len(found["whole"].blocks) == 6 and len(found["whole"].outputs) == 1
        for rank in range(ring * ulysses):
            verdict = found[f"perturbed on {rank}"]
            assert verdict.first_difference == "blocks.1 (image)", str(verdict)
            assert max(list(verdict.blocks.values())[:3]) < 1e-12
        assert found["mean"].first_difference == "blocks.2 (image)"
        assert found["nan"].first_difference == "blocks.0 (text)"
        assert not found["strict"].ok
        assert found["weights"].first_difference == "output 0"
        assert "first in output 0" in found["after"]
        assert {name: str(one) for name, one in found.items()} == {
            name: str(one) for name, one in by_rank[0].items()
        }


def in_low_precision() -> dict[str, Any]:
    """A model of 16 bits: sums in another order pass, an error of a tenth does not."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs: dict[str, Any] = {name: x.to(dtype) for name, x in toy_inputs().items()}
        with split_toy(1, 2) as (model, handle):
            model.to(dtype)
            found[f"{dtype}"] = handle.verify(**inputs)
            factor = 1.1 if dtype == torch.bfloat16 else 1.01

            def change(module: nn.Module, args: Any, output: Any, factor: float = factor) -> Any:
                return output[0], output[1] * factor

            with hooked(model, 1, change, dist.get_rank() == 1):
                found[f"{dtype} changed"] = handle.verify(**inputs)
    return found


def test_low_precision_is_told_from_errors() -> None:
    for found in run_ranks(in_low_precision, 2):
        for name, verdict in found.items():
            assert verdict.ok != ("changed" in name), (name, str(verdict))
            worst = max(verdict.blocks.values())
            assert verdict.tolerance / 30 < worst or "float32" in name, (name, str(verdict))


@dataclasses.dataclass
class Several:
    """What some models return."""

    image: Tensor
    others: tuple[Tensor, dict[str, Tensor]]
    name: str = "several"


def of_any_output() -> dict[str, Any]:
    found: dict[str, Any] = {}
    inputs = toy_inputs()
    returned: dict[str, Callable[[Tensor], Any]] = {
        "nested": lambda y: Several(y, (y * 2, {"three": y * 3})),
        "integers": lambda y: (y * 100).long(),
        "nothing": lambda y: "no tensor",
    }
    for name, change in returned.items():
        with split_toy(1, 2) as (model, handle):
            hook = model.register_forward_hook(lambda *args, change=change: change(args[2]))
            try:
                found[name] = list(handle.verify(**inputs).outputs)
            except ConfigError as error:
                found[name] = str(error)
            hook.remove()
    return found


def test_outputs_of_any_form() -> None:
    for found in run_ranks(of_any_output, 2):
        assert found["nested"] == ["output 0", "output 1", "output 2"]
        assert "returns torch.int64" in found["integers"]
        assert "returns no tensors" in found["nothing"]


def different_inputs() -> list[str]:
    said = list[str]()
    rank = dist.get_rank()
    with split_toy(1, 2) as (_, handle):
        for inputs in (
            toy_inputs(seed=rank),
            toy_inputs(image=9 + rank),
            toy_inputs(masked=rank == 1),
            toy_inputs() | {"extra": rank},
        ):
            try:
                handle.verify(**inputs)
            except CommError as error:
                said.append(str(error))
        assert handle.verify(**toy_inputs()).ok
    return said


def test_inputs_that_differ_between_ranks_are_an_error_on_all_of_them() -> None:
    for said in run_ranks(different_inputs, 2):
        assert len(said) == 4
        assert "the values of context differ between ranks" in said[0]
        assert "image (2, 9, 4) torch.float64" in said[1] and "image (2, 10, 4)" in said[1]
        assert all("disagree on names, shapes, dtypes and numbers" in one for one in said[1:])


def explained(ring: int, ulysses: int) -> dict[str, Any]:
    found: dict[str, Any] = {"counted": [], "said": [], "tokens": []}
    mesh = make_mesh(ring, ulysses)
    place = dist.get_rank()
    centred = Quantized("int8", centered=True)
    for kv_heads, wire in ((6, None), (2, None), (2, Quantized("int8")), (2, centred)):
        model = make_toy(heads=6, kv_heads=kv_heads)
        with parallelize(model, mesh=mesh, table=TABLE, comm_dtype=wire) as handle:
            with calls_made() as sent, torch.no_grad():
                model(**toy_inputs(text=5, image=12))
            cost = handle.explain().chosen
            found["counted"].append((sent.moved_bytes, cost.traffic[place].total))
            found["tokens"].append(cost.tokens)
            found["said"].append(str(handle.explain()))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
def test_explain_counts_the_bytes_on_the_wire(ring: int, ulysses: int) -> None:
    for found in run_ranks(explained, ring * ulysses, ring, ulysses):
        for sent, computed in found["counted"]:
            assert sent == computed > 0
        for tokens in found["tokens"]:
            assert sum(tokens) == 17
        assert f"ring {ring} x Ulysses {ulysses}" in found["said"][0]
        assert "tokens: 5 of text, 12 of image" in found["said"][0]
        assert "would send" in found["said"][0]


def in_seconds() -> dict[str, Any]:
    """FLOPs of products against torch's own count, and what is predicted of three machines."""
    mesh, model = make_mesh(1, 2), make_toy(heads=6, kv_heads=6)
    inputs = toy_inputs(text=9, image=13)  # no share is as long as the context
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**inputs)
    products = torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm
    wanted = sum(counter.get_flop_counts()["Global"].get(one, 0) for one in products)
    fast: dict[str, Any] = dict.fromkeys(
        ("matmul_flops_per_s", "attention_flops_per_s", "intra_bytes_per_s"), 1e24
    )
    machines: dict[str, dict[str, Any]] = {
        "launch-bound": fast | {"launch_s": 1.0},
        "wire-bound": fast | {"launch_s": 0.0, "intra_bytes_per_s": 1.0},
        "compute-bound": fast | {"launch_s": 0.0, "matmul_flops_per_s": 1.0},
    }
    with torch.no_grad(), parallelize(model, mesh, table=TABLE) as handle:
        model(**inputs)
        plain = handle.explain()
        last = handle.parts[0].last
        assert last is not None
        works = last.work
        found: dict[str, Any] = {
            "flops": (sum(x.token_flops + x.other_flops for x in works.values()), wanted),
            "layers": {kind: (x.num_layers, sum(x.shapes.values())) for kind, x in works.items()},
            "plain": (plain.chosen.seconds, plain.advice),
            "refused": raised_by(handle.explain, profile=HardwareProfile(device="empty"))[1],
            "bytes": plain.chosen.busiest_bytes,
        }
        for name, numbers in machines.items():
            found[name] = handle.explain(profile=HardwareProfile(device=name, **numbers))
    return found


def test_explain_tells_seconds_and_what_would_gain() -> None:
    for found in run_ranks(in_seconds, 2):
        counted, wanted = found["flops"]
        assert counted == pytest.approx(wanted, rel=1e-9)
        assert found["layers"] == {"": (1, 0), "blocks.*": (2, 2)}
        assert found["plain"] == ({}, ())
        assert "the hardware profile of empty has no matmul_flops_per_s" in found["refused"]
        launches, wires, compute = (
            found[f"{name}-bound"] for name in ("launch", "wire", "compute")
        )
        assert "handle.compile()" in launches.advice[0] and len(launches.others) == 1
        # All bytes of the busiest rank, a byte a second.
        assert wires.chosen.total_s == pytest.approx(found["bytes"])
        assert any("int8" in one for one in wires.advice)
        assert compute.advice == (
            "compute-bound: no compilation, 8-bit rows or other mesh gains 2 %",
        )
        said = str(launches)
        assert "predicted: " in said and "  blocks.*: " in said and " and take " in said


def with_wire() -> tuple[float, float, bool]:
    mesh, model = make_mesh(1, 2), make_toy(heads=6, kv_heads=6)
    inputs = toy_inputs(text=5, image=12)
    with torch.no_grad():
        expected = model(**inputs)
        with parallelize(
            model, mesh=mesh, table=TABLE, comm_dtype=Quantized("int8", centered=True)
        ) as one:
            error = float((model(**inputs) - expected).norm() / expected.norm())
            verified = one.verify(**inputs)
    return error, next(iter(verified.outputs.values())), verified.ok


def test_eight_bits_are_used_and_verify_says_what_they_cost() -> None:
    for error, verified, is_ok in run_ranks(with_wire, 2):
        assert 1e-6 < error < 0.02 and not is_ok
        assert error == pytest.approx(verified, rel=1e-3)
