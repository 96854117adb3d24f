"""Make the transformer blocks to time, bascule's or a user's. Shapes: T tokens, C width."""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from bascule.attention import PackedSequences, attend_packed
from bascule.checks import called, shown
from bascule.errors import ConfigError
from bascule.models import LocalExchange, MMDiT, MMDiTConfig

Make = Callable[[int], Any]  # from tokens, a function or module and its input or tuple of inputs


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """A block and its inputs; its backward pass computes gradients of floating inputs, too."""

    run: Callable[..., object]
    inputs: tuple[object, ...]
    weight: float = 1.0  # factor of its seconds in a sum over blocks

    def forward(self) -> object:
        """Run the forward pass without autograd."""
        with torch.no_grad():
            return self.run(*self.inputs)

    def recompute(self) -> list[Tensor]:
        """Run the forward pass with autograd; return the outputs that require gradients."""
        leaves = [
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.inputs
        ]
        outputs = self.run(*leaves)
        listed = cast(list[object], outputs if isinstance(outputs, list | tuple) else [outputs])
        return [x for x in listed if isinstance(x, Tensor) and x.requires_grad]

    def backward(self) -> Callable[[], object]:
        """Run the forward pass; return a function that runs the backward pass."""
        outputs = self.recompute()
        gradients = [torch.ones_like(out) for out in outputs]
        return lambda: torch.autograd.backward(outputs, gradients)


def block_of_each_kind(config: MMDiTConfig, device: torch.device, dtype: torch.dtype) -> MMDiT:
    """Make the model with one block of each kind that it has."""
    small = replace(
        config, num_double=min(1, config.num_double), num_single=min(1, config.num_single)
    )
    model = MMDiT(small).to(device, dtype)
    model.init_weights(0)
    return model


def local_exchange(
    seq_lens: Sequence[int], device: torch.device, kernel: str | None
) -> LocalExchange:
    """Return an exchange for attention with a kernel in one process."""
    seqs = PackedSequences.build(seq_lens, device)

    def attend(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        return attend_packed(q, k, v, seqs, kernel=kernel)

    return LocalExchange(seq_lens, attend=attend, device=device)


def calls_of_model(
    model: MMDiT,
    weights: tuple[float, float, float],
    seq_lens: Sequence[int],
    dtype: torch.dtype,
    kernel: str | None = None,
) -> list[BlockCall]:
    """Make calls of a double block, a single block and the final layer, except with weight 0."""
    device, num_tokens = next(model.parameters()).device, sum(seq_lens)
    exchange = local_exchange(seq_lens, device, kernel)
    attend = exchange.attend
    is_image = torch.arange(num_tokens, device=device) % 8 > 0  # an eighth is text
    pos = torch.zeros(num_tokens, len(model.config.axes_dim), device=device)
    layout = model.layout(is_image, pos, exchange.token_slot)
    x_TC = torch.randn(num_tokens, model.config.d_model, device=device, dtype=dtype)
    vec = torch.randn(len(seq_lens), model.config.d_model, device=device, dtype=dtype)
    kinds = (
        (model.double_blocks, layout.interleaving.split(x_TC), (vec, layout, attend)),
        (model.single_blocks, (x_TC,), (vec, layout, attend)),
        ([model.final], (x_TC,), (vec, layout.slot)),
    )
    return [
        BlockCall(_with(blocks[0], *rest), inputs, weight)
        for (blocks, inputs, rest), weight in zip(kinds, weights, strict=True)
        if weight
    ]


def _with(block: nn.Module, *args: object) -> Callable[..., object]:
    return lambda *tokens: block(*tokens, *args)


def check_name(name: str) -> None:
    """Refuse a name whose package cannot be found by ranks started here; import nothing."""
    first = _parts(name)[0].partition(".")[0]
    if find_spec(first) is None and PathFinder.find_spec(first, [os.getcwd()]) is None:
        wrong = f"--module {name}: there is no {first} on the path of Python"
        raise ConfigError(f"{wrong}; add its folder, as with PYTHONPATH=.")


def _parts(name: str) -> tuple[str, str]:
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise ConfigError(f"--module {shown(name)}: give package.module:function, as my_model:make")
    return module_name, path


def find(name: str) -> Make:
    """Import the function that the user names as `package.module:function`."""
    module_name, path = _parts(name)
    try:
        target: object = importlib.import_module(module_name)
    except Exception as error:  # an import may raise anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        wrong = f"--module {name}: {module_name} cannot be imported: {text}"
        raise ConfigError(
            f"{wrong}; it must be on the path of Python, as with PYTHONPATH=."
        ) from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"--module {name}: {module_name} has no {path}")
        target = getattr(target, part)
    if not callable(target):
        wrong = f"--module {name}: {path} is {shown(target)}"
        raise ConfigError(f"{wrong}; give a function of a number of tokens")
    return target


def calls_of_user(name: str, make: Make, length: int, device: torch.device) -> list[BlockCall]:
    """Call the user's function with a length; run its result forward and backward once."""
    at = f"--module {name} at {length} tokens"
    with device:
        made = called(at, make, length)
    if not (isinstance(made, tuple) and len(cast(tuple[object, ...], made)) == 2):
        needed = "a function or module, and its input or a tuple of inputs"
        raise ConfigError(
            f"{at}: gave {shown(cast(object, made))}; it must return two things: {needed}"
        )
    run, inputs = cast(tuple[object, object], made)
    if not callable(run):
        raise ConfigError(f"{at}: the first thing it returns, {shown(run)}, cannot be called")
    call = BlockCall(run, inputs if isinstance(inputs, tuple) else (inputs,))

    def has_gradient() -> bool:
        call.forward()
        has_outputs = bool(call.recompute())
        if has_outputs:
            call.backward()()
        return has_outputs

    if not called(f"{at}: what it returned", has_gradient):
        raise ConfigError(f"{at}: what it returned gave no tensor with a gradient: return one")
    return [call]
