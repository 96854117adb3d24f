"""A mode that is entered by what is compiled in parts."""

from typing import Any

import torch
from torch import Tensor

from bascule.sdpa.call_mode import CallMode


class Passing(CallMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def branching(x: Tensor) -> Tensor:
    """Compilers cannot trace its branch, and what follows asks for several attributes."""
    mode = Passing()
    mode.enter()
    try:
        y = x + 1
        if torch.all(x == 0):
            y = y * 2
        return y + torch.zeros((x.shape[0], 3), dtype=y.dtype, device=y.device)
    finally:
        mode.leave()


def test_what_is_compiled_in_parts_gives_what_eager_mode_gives() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(branching, backend="eager")(x), branching(x))
