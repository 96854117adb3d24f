"""verify() and explain(): their results on every rank alike, and the bytes on the wire."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bascule.diffusers import ParallelHandle, Verification, parallelize
from bascule.diffusers.explain import count_work
from bascule.errors import ConfigError
from bascule.machine.cluster import HardwareProfile
from tests.helpers.calls_made import calls_made
from tests.helpers.inference_cases import make_mesh
from tests.helpers.inference_toy import TABLE, Toy, make_toy, toy_inputs
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks

Hook = Callable[[nn.Module, Any, tuple[Tensor, Tensor]], Any]


@contextmanager
def split_toy(ring: int, ulysses: int, num_blocks: int = 3) -> Iterator[tuple[Toy, ParallelHandle]]:
    model = make_toy(num_blocks=num_blocks)
    with parallelize(model, mesh=make_mesh(ring, ulysses), table=TABLE) as handle:
        yield model, handle


def minus_mean(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    """Looks at all tokens without attention: right on one process, wrong on shares."""
    return output[0], output[1] - output[1].mean(dim=1, keepdim=True)


def times(text: float, image: float) -> Hook:
    return lambda module, args, output: (output[0] * text, output[1] * image)


@contextmanager
def hooked(model: Toy, block: int, hook: Hook, applies: bool) -> Iterator[None]:
    handle = model.blocks[block].register_forward_hook(hook) if applies else None
    yield
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(2, 1), (2, 2), pytest.param(1, 4, marks=pytest.mark.stress)]
)
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_verify_names_the_first_block_that_differs(ring: int, ulysses: int) -> None:
    inputs, own = toy_inputs(text=5, image=9, masked=True), dist.get_rank()

    def verified() -> Verification:
        found = handle.verify(**inputs)
        assert str(found) == by_one_rank(str, found)
        return found

    with split_toy(ring, ulysses) as (model, handle):
        whole = verified()
        assert whole.ok and len(whole.blocks) == 6 and len(whole.outputs) == 1, str(whole)
        assert not dataclasses.replace(whole, tolerance=0.0).ok
        for rank in range(dist.get_world_size()):
            with hooked(model, 1, times(1.0, 1.001), own == rank):
                result = verified()
            assert result.first_difference == "blocks.1 (image)", str(result)
            assert max(list(result.blocks.values())[:3]) < 1e-12
        with hooked(model, 2, minus_mean, True):
            assert verified().first_difference == "blocks.2 (image)"
        with hooked(model, 0, times(float("nan"), 1.0), own == 1):
            assert verified().first_difference == "blocks.0 (text)"
        with torch.no_grad():
            model.head.weight[0, 0] += 0.1 * own
        weights = verified()
        assert weights.first_difference == "output 0" and "first in output 0" in str(weights)


def in_low_precision() -> None:
    """A model of 16 bits: sums in another order pass, an error of a tenth does not."""
    for dtype, factor in ((torch.bfloat16, 1.1), (torch.float16, 1.01), (torch.float32, 1.01)):
        inputs: dict[str, Any] = {name: x.to(dtype) for name, x in toy_inputs().items()}
        with split_toy(1, 2) as (model, handle):
            model.to(dtype)
            whole = handle.verify(**inputs)
            with hooked(model, 1, times(1.0, factor), dist.get_rank() == 1):
                changed = handle.verify(**inputs)
        assert whole.ok and not changed.ok, (str(whole), str(changed))
        worst = max(whole.blocks.values())
        assert whole.tolerance / 30 < worst or dtype == torch.float32, str(whole)


@dataclasses.dataclass
class Several:
    """An output as some models return it."""

    image: Tensor
    others: tuple[Tensor, dict[str, Tensor]]
    name: str = "several"


def of_any_output() -> None:
    def verified(change: Callable[[Tensor], Any]) -> Verification:
        with split_toy(1, 2) as (model, handle):
            model.register_forward_hook(lambda *args: change(args[2]))
            return handle.verify(**toy_inputs())

    nested = verified(lambda y: Several(y, (y * 2, {"three": y * 3})))
    assert list(nested.outputs) == ["output 0", "output 1", "output 2"]
    assert "returns torch.int64" in raised_by(verified, lambda y: (y * 100).long())[1]
    assert "returns no tensors" in raised_by(verified, lambda y: "no tensor")[1]


def different_inputs() -> None:
    rank = dist.get_rank()
    unlike: tuple[tuple[dict[str, Any], str], ...] = (
        (toy_inputs(seed=rank), "the values of context differ between ranks"),
        (toy_inputs(image=9 + rank), "image (2, 9, 4) torch.float64"),
        (toy_inputs(masked=rank == 1), "disagree on names, shapes, dtypes and numbers"),
        (toy_inputs() | {"extra": rank}, "disagree on names, shapes, dtypes and numbers"),
    )
    with split_toy(1, 2) as (_, handle):
        for inputs, reason in unlike:
            kinds, text = raised_by(handle.verify, **inputs)
            assert kinds[0] == "CommError" and reason in text, text
        assert handle.verify(**toy_inputs()).ok


def with_eight_bits() -> None:
    model, inputs = make_toy(heads=6, kv_heads=6), toy_inputs(text=5, image=12)
    with torch.no_grad():
        expected = model(**inputs)
        with parallelize(model, make_mesh(1, 2), table=TABLE, comm_dtype="int8") as handle:
            error = float((model(**inputs) - expected).norm() / expected.norm())
            result = handle.verify(**inputs)
    assert 1e-6 < error < 0.02 and not result.ok
    assert error == pytest.approx(result.outputs["output 0"], rel=1e-3)


@pytest.mark.parametrize(
    "run", [in_low_precision, of_any_output, different_inputs, with_eight_bits]
)
def test_verify_on_two_ranks(run: Callable[[], None]) -> None:
    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [
        *[(1, 2), (2, 1), (2, 2)],
        *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in ((1, 4), (4, 1))),
    ],
)
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_explain_counts_the_bytes_on_the_wire(ring: int, ulysses: int) -> None:
    rows: tuple[Any, ...] = None, None, "int8", "e4m3"
    for kv_heads, comm_dtype in zip((6, 2, 2, 2), rows, strict=True):
        model, mesh = make_toy(heads=6, kv_heads=kv_heads), make_mesh(ring, ulysses)
        with parallelize(model, mesh, table=TABLE, comm_dtype=comm_dtype) as handle:
            handle.verify(**toy_inputs(text=2, image=3))  # else the first call is compared
            with calls_made() as sent, torch.no_grad():
                model(**toy_inputs(text=5, image=12))
            explanation = handle.explain()
        cost = explanation.chosen
        assert sent.moved_bytes == cost.traffic[dist.get_rank()].total > 0
        assert sum(cost.tokens) == 17
        for words in (f"ring {ring} x Ulysses {ulysses}", "tokens: 5 of text, 12 of image"):
            assert words in str(explanation)
        lines = [line for line in str(explanation).splitlines() if "would send" in line]
        for line, other in zip(lines, explanation.others, strict=True):
            is_near = abs(other.busiest_bytes / cost.busiest_bytes - 1.0) < 0.0195
            assert line.endswith("about as much" if is_near else "B") and "x)" not in line


@on_ranks(2)
def test_explain_predicts_seconds_and_gains() -> None:
    """FLOPs of products against torch's own count, and predictions for three machines."""
    model, inputs = make_toy(heads=6, kv_heads=6), toy_inputs(text=9, image=13)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**inputs)  # no share is as long as the context
    products = torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm
    expected = sum(counter.get_flop_counts()["Global"].get(one, 0) for one in products)
    rates = "matmul_flops_per_s", "attention_flops_per_s", "intra_bytes_per_s"
    fast: dict[str, Any] = dict.fromkeys(rates, 1e24) | {"launch_s": 0.0}
    with torch.no_grad(), parallelize(model, make_mesh(1, 2), table=TABLE) as handle:
        model(**inputs)
        plain, split = handle.explain(), handle.parts[0]
        work = count_work(split, partial(model, **inputs))
        flops = sum(layers.token_flops + layers.other_flops for layers in work.values())
        assert flops == pytest.approx(expected, rel=1e-9)
        calls = {kind: sum(layers.shapes.values()) for kind, layers in work.items()}
        assert calls == {"": 0, "blocks.*": 2}
        assert plain.chosen.seconds == {} and plain.advice == ()
        empty = HardwareProfile(device="empty")
        refusal = "the hardware profile of empty has no matmul_flops_per_s"
        assert refusal in raised_by(handle.explain, profile=empty, **inputs)[1]
        assert "give its inputs" in raised_by(handle.explain, profile=empty)[1]
        assert "need a profile to predict time" in raised_by(handle.explain, **inputs)[1]

        def on(**numbers: Any) -> Any:
            profile = HardwareProfile(device="one", **fast | numbers)
            return handle.explain(profile=profile, **inputs)  # pyright: ignore[reportArgumentType]

        launches, wires = on(launch_s=1.0), on(intra_bytes_per_s=1.0)
        compute = on(matmul_flops_per_s=1.0)
    assert "handle.compile()" in launches.advice[0] and len(launches.others) == 1
    # All bytes of the busiest rank, a byte a second.
    assert wires.chosen.total_s == pytest.approx(plain.chosen.busiest_bytes)
    assert any("int8" in one for one in wires.advice)
    assert compute.advice == ("compute-bound: no compilation, 8-bit rows or other mesh gains 2 %",)
    for words in ("predicted: ", "  blocks.*: ", " and take "):
        assert words in str(launches)


class Mixing(nn.Module):
    """Adds the mean of all tokens to each: right in one process, wrong on shares."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


class Fixed(nn.Module):
    """Has one number a token, of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.stress)])
@on_ranks(2)
def test_a_table_that_does_not_fit_is_refused_at_the_first_call(compiled: bool) -> None:
    inputs, mesh = toy_inputs(text=5, image=9), make_mesh(1, 2)

    def error_of(model: nn.Module, **options: Any) -> str:
        """Return that of the first call of a model; "" for none."""
        with torch.no_grad(), parallelize(model, mesh, table=TABLE, **options) as handle:
            if compiled:
                handle.compile()
            texts = list[str]()
            for _ in range(2):  # what was refused once stays refused
                try:
                    model(**inputs)
                    texts.append("")
                except ConfigError as error:
                    texts.append(str(error))
            assert texts[0] == texts[1], texts
            return texts[0]

    mixing: Any = make_toy()
    fixed: Any = make_toy()
    mixing.blocks[1].mlp = nn.Sequential(mixing.blocks[1].mlp, Mixing())
    fixed.head = nn.Sequential(Fixed(), fixed.head)
    assert not error_of(make_toy()) and not error_of(make_toy(), comm_dtype="int8")
    first = "the table of Toy does not fit: over ranks blocks.1 (text) differs"
    assert first in error_of(mixing)
    if compiled:
        return
    assert "over ranks head.0 raised RuntimeError" in error_of(fixed)
    # Over ranks, alone, over ranks, a call; without the first three, a few tokens were compared.
    for verifies, wanted in ((False, [2, 2, 2, 2, 1, 2, 1]), (True, [2, 1, 2, 1])):
        model, passes = make_toy(), list[int]()
        with torch.no_grad(), parallelize(model, mesh, table=TABLE) as handle:
            if verifies:
                handle.verify(**toy_inputs(text=2, image=3))
            model.register_forward_hook(lambda *_, seen=passes: seen.append(1))
            model.blocks[0].register_forward_hook(lambda *_, seen=passes: seen.append(2))
            model(**inputs)
            model(**inputs)
        assert passes == wanted
