"""Cases of block-sparse kernels, and the same with dense masks."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import Attended, AttentionKernel, merge
from bascule.attention.mask import AttentionMask, BlockRows
from tests.helpers.oracle import dense_attention

SCALE = 0.4

DIM = 16


@dataclass(frozen=True, eq=False)
class Case:
    """Lengths of query and key blocks, and which of them meet."""

    q_lens: npt.NDArray[np.int64]
    k_lens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]

    @property
    def rows(self) -> BlockRows:
        columns = np.concatenate([np.flatnonzero(row) for row in self.mask])
        row_bounds = bounds(self.mask.sum(axis=1))
        return BlockRows(bounds(self.q_lens), bounds(self.k_lens), row_bounds, columns)

    @property
    def bias(self) -> Tensor:
        """(1, 1, Sq, Sk) 0 where a key is seen, else -inf."""
        seen = np.repeat(np.repeat(self.mask, self.q_lens, axis=0), self.k_lens, axis=1)
        return torch.from_numpy(np.where(seen, 0.0, -math.inf))[None, None]

    def inputs(self, dtype: torch.dtype, dim: int = DIM) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        lens = (self.q_lens.sum(), self.k_lens.sum(), self.k_lens.sum())
        return [torch.randn(1, 1, int(n), dim, generator=generator).to(dtype) for n in lens]


def bounds(lens: Any) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)


def random_case(
    seed: int, num_q: int, num_k: int, block: int, density: float, least: int = 1
) -> Case:
    rng = np.random.default_rng(seed)
    q_lens, k_lens = (rng.integers(least, block + 1, n) for n in (num_q, num_k))
    return Case(q_lens, k_lens, rng.random((num_q, num_k)) < density)


def make_case(name: str, block: int) -> Case:
    """Named masks, of blocks of at most `block` tokens."""
    case = random_case(1, 7, 9, block, 0.5)
    mask = case.mask.copy()
    if name == "clustered":  # three heads of a band each: neighbours see the same, runs of keys
        mask = np.zeros((9, 9), dtype=np.bool_)
        for head, row in itertools.product(range(3), range(3)):
            mask[3 * head + row, 3 * head : 3 * head + 2 + (row == 2)] = True
        return Case(np.full(9, block), np.full(9, block), mask)
    if name == "empty rows":
        mask[[0, 3, 6]] = False
        mask[:, 4] = False
    if name == "nothing":
        mask[:] = False
    if name == "one row sees all":
        mask[:] = False
        mask[2] = True
    if name == "single block":
        return Case(np.array([block]), np.array([block]), np.ones((1, 1), dtype=np.bool_))
    if name == "short blocks in the middle":
        lens = np.array([block, 1, block, block // 2, block, 3, block])
        return Case(lens, np.roll(np.concatenate([lens, lens[:2]]), 2), mask)
    if name == "grouped heads":  # four query heads of two key heads
        one = random_case(2, 3, 3, block, 0.6)
        heads = [random_case(3 + head, 3, 3, block, 0.6).mask for head in range(4)]
        mask = np.zeros((12, 6), dtype=np.bool_)
        for head, part in enumerate(heads):
            at = 3 * (head // 2)
            mask[3 * head : 3 * head + 3, at : at + 3] = part
        return Case(np.tile(one.q_lens, 4), np.tile(one.k_lens, 2), mask)
    return Case(case.q_lens, case.k_lens, mask)


NAMES = (
    "random",
    "clustered",
    "empty rows",
    "nothing",
    "one row sees all",
    "single block",
    "short blocks in the middle",
    "grouped heads",
)


def reference(case: Case, tensors: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Dense masked attention in float64: out, LSE, gradients of q, k and v, and that of out."""
    q, k, v = (x.detach().double().cpu().requires_grad_() for x in tensors)
    out, lse = dense_attention(q, k, v, case.bias, scale=SCALE)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grad = grad.to(tensors[0].dtype)
    grads = torch.autograd.grad(out, (q, k, v), grad.double())
    return out.detach(), lse.detach(), list(grads), grad


def attend(
    kernel: AttentionKernel, case: Case, tensors: list[Tensor], grad: Tensor
) -> list[Tensor]:
    """Out, LSE and gradients of q, k and v."""
    (q, k, v), seen = tensors, AttentionMask(blocks=case.rows)
    out, lse = kernel.forward(q, k, v, seen, SCALE)
    return [out, lse, *kernel.backward(grad, Attended(q, k, v, out, lse, seen, SCALE))]


def attend_in_halves(
    kernel: AttentionKernel, case: Case, tensors: list[Tensor], grad: Tensor
) -> list[Tensor]:
    """The same of two halves of the keys, merged, each with the LSE of all in backward."""
    q, k, v = tensors
    middle = case.k_lens.size // 2
    cut = int(case.k_lens[:middle].sum())
    halves = [
        (slice(0, cut), Case(case.q_lens, case.k_lens[:middle], case.mask[:, :middle])),
        (slice(cut, None), Case(case.q_lens, case.k_lens[middle:], case.mask[:, middle:])),
    ]
    parts = [(k[:, :, at], v[:, :, at], AttentionMask(blocks=half.rows)) for at, half in halves]
    (out, lse), (more, more_lse) = (kernel.forward(q, *part, SCALE) for part in parts)
    out, lse = merge(out.to(lse.dtype), lse, more.to(lse.dtype), more_lse)
    out = out.to(q.dtype)
    first, second = (
        kernel.backward(grad, Attended(q, *part[:2], out, lse, part[2], SCALE)) for part in parts
    )
    keys = (torch.cat((first[i], second[i]), dim=2) for i in (1, 2))
    return [out, lse, first[0] + second[0], *keys]


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.detach().double().cpu() - want).norm() / max(float(want.norm()), 1e-30))
