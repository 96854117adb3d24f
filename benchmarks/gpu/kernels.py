"""Memory-bound parts of a block: shares of the measured bandwidth of a copy.

Forward passes on 32,768 tokens of FLUX's width, and the backward of the modulated norm. Counted are
the bytes that must be read and written once: tensors of all tokens, in the dtype of the model, and
tables of angles and slots; not what stays in caches, as the modulations of samples. Of each part
there is a row for plain calls and one for torch.compile; the target is for the faster way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bascule.models.layout import apply_rotary, permute_rows, scale_rows
from bascule.models.mmdit import NORM_EPS, modulated_norm
from gpu.measuring import Case, Row, Setting, Target, timed
from gpu.shapes import config_of

NUM_TOKENS, NUM_SAMPLES = 32_768, 32
SHARE = Target(0.75)


@dataclass(frozen=True, slots=True)
class Part:
    """A memory-bound part.

    Attributes:
        what: For tables.
        formula: The bytes in words; T tokens, C width, e bytes of a number.
        num_bytes: That it must read and write.
        call: Of the inputs.
        inputs: Tensors on the device.
        backward: Whether gradients are timed, and not the call.
    """

    what: str
    formula: str
    num_bytes: int
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    backward: bool = False


def cases(setting: Setting) -> Iterator[Case]:
    """A case a part."""
    for make in (norm, norm_backward, residual, head_norm, rotary, activation, order):
        yield Case(make.__name__, partial(measured, setting, make))


def measured(setting: Setting, make: Callable[[Setting], Part]) -> list[Row]:
    """A row a way."""
    part = make(setting)
    ways = {"plain": part.call, "compiled": setting.compile(part.call)}
    found = timed(setting, {name: called(part, call) for name, call in ways.items()}, queued=True)
    best, rows = found.fastest(ways), list[Row]()
    for name, seconds in found.seconds.items():
        shares = [part.num_bytes / each / setting.best.copy_bytes_per_s for each in seconds]
        target = SHARE if name == best else None
        details = {"seconds": found.median(name), "bytes": part.num_bytes, "formula": part.formula}
        rows.append(Row.of(f"{part.what}, {name}", "of copy bandwidth", shares, target, **details))
    return [*rows, *found.reasons(part.what)]


def called(part: Part, call: Callable[..., Tensor]) -> Callable[[], object]:
    """The forward without gradients, or the backward alone of a graph that is kept."""
    if not part.backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*part.inputs)

        return forward
    state: dict[str, Any] = {}

    def backward() -> object:
        if not state:
            leaves = [
                x.detach().requires_grad_() if x.is_floating_point() else x for x in part.inputs
            ]
            state["leaves"] = [x for x in leaves if x.requires_grad]
            state["out"] = call(*leaves)
            state["grad"] = torch.ones_like(state["out"])
        return torch.autograd.grad(state["out"], state["leaves"], state["grad"], retain_graph=True)

    return backward


def norm(setting: Setting) -> Part:
    """The modulated norm before attention and before the MLP."""
    (x,), slot, tables = _tokens(setting, 1), _slots(setting), _tables(setting, 2)
    num_bytes = 2 * _bytes(x) + _bytes(slot)
    return Part("modulated norm", "2 T C e + 8 T", num_bytes, modulated_norm, (x, *tables, slot))


def norm_backward(setting: Setting) -> Part:
    """Its gradients: of the tokens, and of the modulations."""
    part = norm(setting)
    num_bytes = 3 * _bytes(part.inputs[0]) + _bytes(part.inputs[-1])
    what = "modulated norm, backward"
    return Part(what, "3 T C e + 8 T", num_bytes, part.call, part.inputs, backward=True)


def residual(setting: Setting) -> Part:
    """A gated branch added to the residual stream."""
    (x, y), slot, (gate,) = _tokens(setting, 2), _slots(setting), _tables(setting, 1)

    def gated(x: Tensor, y: Tensor, gate: Tensor, slot: Tensor) -> Tensor:
        return x + scale_rows(y, gate, slot)

    num_bytes = 3 * _bytes(x) + _bytes(slot)
    return Part("gated residual", "3 T C e + 8 T", num_bytes, gated, (x, y, gate, slot))


def head_norm(setting: Setting) -> Part:
    """The norm of queries, of each head."""
    config = config_of(setting, 1, 1)
    (x,) = _tokens(setting, 1)
    x = x.unflatten(-1, (config.num_heads, config.head_dim))
    weight = torch.ones(config.head_dim, device=setting.device, dtype=setting.dtype)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, NORM_EPS)

    return Part("norm of heads", "2 T C e", 2 * _bytes(x), normed, (x, weight))


def rotary(setting: Setting) -> Part:
    """Positions put into queries."""
    config = config_of(setting, 1, 1)
    (x,) = _tokens(setting, 1)
    x = x.unflatten(-1, (config.num_heads, config.head_dim))
    angles = torch.rand(x.shape[0], config.head_dim // 2, device=setting.device)
    cos, sin = angles.cos(), angles.sin()
    num_bytes = 2 * _bytes(x) + _bytes(cos) + _bytes(sin)
    return Part("rotary positions", "2 T C e + 4 T D", num_bytes, apply_rotary, (x, cos, sin))


def activation(setting: Setting) -> Part:
    """GELU on the hidden width of an MLP."""
    (x,) = _tokens(setting, 1)
    wide = x.repeat(1, 4)

    def gelu(x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    return Part("GELU of an MLP", "8 T C e", 2 * _bytes(wide), gelu, (wide,))


def order(setting: Setting) -> Part:
    """Text and image rows parted, as in a double block."""
    (x,) = _tokens(setting, 1)
    is_image = torch.arange(x.shape[0], device=setting.device) % 8 > 0
    rows = is_image.to(torch.uint8).argsort(stable=True)
    num_bytes = 2 * _bytes(x) + _bytes(rows)
    inputs = (x, rows, rows.argsort())
    return Part("rows in another order", "2 T C e + 8 T", num_bytes, permute_rows, inputs)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _tokens(setting: Setting, num: int) -> list[Tensor]:
    shape = (setting.pick(NUM_TOKENS, 64), config_of(setting, 1, 1).d_model)
    kind = {"device": setting.device, "dtype": setting.dtype}
    return [torch.randn(shape, **kind) for _ in range(num)]


def _tables(setting: Setting, num: int) -> list[Tensor]:
    """Modulations: a row a sample."""
    shape = (setting.pick(NUM_SAMPLES, 2), config_of(setting, 1, 1).d_model)
    kind = {"device": setting.device, "dtype": setting.dtype}
    return [torch.randn(shape, **kind) for _ in range(num)]


def _slots(setting: Setting) -> Tensor:
    """The sample of each token; all samples are as long."""
    num_tokens, num_samples = setting.pick(NUM_TOKENS, 64), setting.pick(NUM_SAMPLES, 2)
    samples = torch.arange(num_samples, device=setting.device)
    return samples.repeat_interleave(num_tokens // num_samples)
