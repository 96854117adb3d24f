"""Reshapes of tensors without elements, as a rank without tokens meets them.

Torch cannot infer a -1 from no elements. Models split heads and channels by (..., tokens, -1, 2),
and times of tokens by (-1, tokens): the dims before or after the tokens say what is meant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RESHAPES = (torch.reshape, Tensor.reshape, Tensor.view, torch.unflatten)


def reshape_empty(
    func: Callable[..., Tensor], x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Reshape a tensor without elements by one of RESHAPES; the arguments are those after it."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "self")}
    if func is torch.unflatten:
        dim = args[0] if args else kwargs["dim"]
        sizes = args[1] if len(args) > 1 else kwargs["sizes"]
        if -1 not in sizes or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
            return func(x, *args, **kwargs)
        dim %= x.dim()
        return x.view(_inferred(x.shape, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])))
    if len(args) > 1:
        return func(x, _inferred(x.shape, args))
    sizes = args[0] if args else kwargs.get("shape", kwargs.get("size"))
    if not isinstance(sizes, Sequence):  # one size, or another dtype
        return func(x, *args, **kwargs)
    return func(x, _inferred(x.shape, sizes))


def _inferred(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Infer the -1 that torch cannot, from the dims on its side of those of size 0, the tokens.

    Sizes that do not follow from these dims are left to torch's error.
    """
    sizes = tuple(sizes)
    if -1 not in sizes or 0 not in sizes:
        return sizes
    at, zeros = sizes.index(-1), [place for place, size in enumerate(sizes) if size == 0]
    has = [place for place, size in enumerate(shape) if size == 0]
    if at > zeros[-1]:
        whole, others = shape[has[-1] + 1 :], sizes[zeros[-1] + 1 :]
    elif at < zeros[0]:
        whole, others = shape[: has[0]], sizes[: zeros[0]]
    else:
        return sizes
    elements, known = math.prod(whole), math.prod([size for size in others if size != -1])
    if known == 0 or elements % known:
        return sizes
    return tuple([elements // known if size == -1 else size for size in sizes])
