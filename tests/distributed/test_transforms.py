"""Exchanges within programs that torch records, and in compiled ones: right, or refused on all."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bascule import SequenceParallel, Step
from bascule.errors import CommError, ConfigError
from tests.helpers.cases import COST
from tests.helpers.ranks import run_ranks

Use = Callable[[Step, Tensor], Tensor]

USES: dict[str, Use] = {
    "route": lambda step, x: step.route(x=x)["x"],
    "restore": lambda step, x: step.restore(x),
    "attend": lambda step, x: step.attend(x, x, x),
    "gather_samples": lambda step, x: step.gather_samples(x[:1]),
    "mean": lambda step, x: step.mean(x),
}
RECORDERS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "make_fx": lambda f, x: make_fx(f)(x),
    "jit.trace": lambda f, x: torch.jit.trace(f, x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


def planned(spec: str) -> Step:
    return SequenceParallel(None, spec, COST).plan([4])


def of_one_tensor(use: Use, step: Step) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return use(step, x)

    return call


def recorded(is_used_before: bool) -> list[str]:
    taken: list[str] = []
    for name, use in USES.items():
        for recorder, record in RECORDERS.items():
            step, x = planned("g1n2"), torch.ones(4, 2, 4)
            if is_used_before:
                use(step, x)
            try:
                record(of_one_tensor(use, step), x)
            except ConfigError:
                continue
            taken.append(f"{name} within {recorder}")
    return taken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_recorded_program_cannot_lose_an_exchange(is_used_before: bool) -> None:
    assert run_ranks(recorded, 2, is_used_before) == [[], []]


def recorded_on_one_rank() -> str:
    step, x = planned("g1n2"), torch.ones(4, 2, 4)
    try:
        with step:
            if dist.get_rank() == 1:
                torch.jit.trace(lambda x: step.route(x=x)["x"], x)
            step.route(x=x)
    except (ConfigError, CommError) as error:
        return str(error)
    return ""


def test_one_rank_that_records_is_told_to_the_other() -> None:
    other, own = run_ranks(recorded_on_one_rank, 2)
    assert "torch.jit.trace" in own and "torch.jit.trace" in other


def compiled(spec: str) -> None:
    step = planned(spec)
    x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)

    def whole(x: Tensor) -> Tensor:
        moved = step.route(x=x * 2)["x"]
        out = step.restore(step.attend(moved, moved.sin(), moved))
        samples = step.gather_samples(out[:1].sum(0, keepdim=True))
        return step.mean(out) + samples.sum()

    want = whole(x)
    wanted = torch.autograd.grad(want, x)
    found = torch.compile(whole, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(found, x), wanted, rtol=1e-12, atol=1e-14)


def refused_devices() -> list[str]:
    said: list[str] = []
    for device in ("cuda", "foo", 3.5):
        try:
            SequenceParallel(None, "g1n2", COST, device=device)  # pyright: ignore
        except CommError as error:
            said.append(str(error))
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
def test_a_device_that_is_none_is_named() -> None:
    for texts in run_ranks(refused_devices, 2):
        pairs = zip(("cuda", "foo", 3.5), texts, strict=True)
        assert all(repr(name) in text for name, text in pairs), texts
        assert all("AttributeError" not in text for text in texts)
