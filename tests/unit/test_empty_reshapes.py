"""Reshapes on a rank without tokens: what they give with tokens, with a 0 in the place of these."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.comm.mesh import AttentionMesh
from bascule.sdpa import SequenceParallelMode

TOKENS = 7
Act = Callable[[Tensor, int], Tensor]

# A shape whose tokens are in the place of None, and a reshape of it, given the number of tokens.
CASES: list[tuple[tuple[int | None, ...], Act]] = [
    ((2, None, 12), lambda x, t: x.view(2, t, -1, 3)),
    ((2, None, 12), lambda x, t: x.view((2, t, 4, -1))),
    ((2, None, 12), lambda x, t: x.reshape(2, t, 2, -1, 3)),
    ((2, None, 12), lambda x, t: torch.reshape(x, (-1, t, 12))),
    ((2, None, 12), lambda x, t: torch.reshape(input=x, shape=(2, t, -1))),
    ((2, None, 4, 3), lambda x, t: x.reshape(2, t, -1)),
    ((2, 4, None, 3), lambda x, t: x.reshape(-1, t, 3)),
    ((2, None, 12), lambda x, t: x.reshape([2, t, 12])),
    ((2, None, 12), lambda x, t: x.flatten().reshape(-1)),
    ((2, None, 12), lambda x, t: torch.unflatten(x, 2, (3, -1))),
    ((2, None, 12), lambda x, t: torch.unflatten(x, dim=-1, sizes=(-1, 6))),
    ((2, None, 12), lambda x, t: torch.unflatten(x, 0, (-1, 2))),
    ((2, None, 12), lambda x, t: torch.unflatten(x, 1, (t, 1))),
    ((1, None, 12), lambda x, t: torch.unflatten(x.flatten(0, 1), 0, (-1, t))),
    ((2, None, 12), lambda x, t: x.view(torch.int32)),
    ((2, None, 12), lambda x, t: x.view(dtype=torch.int32)),
]


def mode() -> SequenceParallelMode:
    return SequenceParallelMode(AttentionMesh(None, None, None))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_as_with_tokens(number: int) -> None:
    shape, act = CASES[number]
    with_tokens, without = (
        torch.empty([count if size is None else size for size in shape]) for count in (TOKENS, 0)
    )
    wanted = act(with_tokens, TOKENS)
    with mode():
        found = act(without, 0)
    assert found.dtype == wanted.dtype
    assert tuple(found.shape) == tuple(0 if n % TOKENS == 0 else n for n in wanted.shape)


def test_times_of_tokens_broadcast_over_a_batch_that_is_not_known() -> None:
    """The times (B, 0) of Wan 2.2, flattened: their batch can be any."""
    with mode():
        found = torch.unflatten(torch.empty(2, 0).flatten().view(0, 1).expand(0, 5), 0, (-1, 0))
    assert tuple(found.shape) == (1, 0, 5)


@pytest.mark.parametrize(
    ("shape", "given"),
    [((2, 0, 12), (0, -1, 0)), ((2, 0, 12), (2, 0, -1, 5)), ((2, 0, 12), (2, 0, -1, 0))],
)
def test_what_nothing_tells_is_left_to_torch(shape: Any, given: Any) -> None:
    with mode(), pytest.raises(RuntimeError, match="can be any value"):
        torch.reshape(torch.empty(shape), given)


def test_any_split_of_channels() -> None:
    for sizes in itertools.permutations((2, 3, 4)):
        for place in range(3):
            given = tuple(-1 if at == place else size for at, size in enumerate(sizes))
            with mode():
                found = torch.empty(5, 0, 24).view((5, 0, *given))
            assert tuple(found.shape) == (5, 0, *sizes)


def branching(x: Tensor) -> Tensor:
    """Break the graph within the mode, and ask for several attributes after it."""
    with mode():
        y = x + 1
        if torch.all(x == 0):
            y = y * 2
        return y + torch.zeros((x.shape[0], 3), dtype=y.dtype, device=y.device)


def test_a_function_compiled_in_parts_within_the_mode() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(branching, backend="eager")(x), branching(x))
