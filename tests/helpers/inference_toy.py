"""A small model with joint attention of text and image, and a cross attention to other tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bascule.diffusers import Cut, Mask, SplitTable

WIDTH, CHANNELS = 24, 4
TABLE = SplitTable(
    segments=("text", "image"),
    inputs={"": {"text": Cut("text"), "text_mask": Mask("text"), "image": Cut("image")}},
    gathers={"head": Cut("image")},
    blocks={"blocks.*": ("text", "image")},
    replicated=("context", "time"),
    attends={"blocks.*.cross": ()},
)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, WIDTH // heads
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        kv = self.kv(context).view(*context.shape[:2], 2 * self.kv_heads, -1).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        enable_gqa = self.heads != self.kv_heads
        out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.joint, self.cross = Attention(heads, kv_heads), Attention(heads, kv_heads)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(
        self, text: Tensor, image: Tensor, context: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = torch.cat([text, image], dim=1)
        normed = self.norm(x)
        x = x + self.joint(normed, normed, mask)
        x = x + self.cross(x, context)
        x = x + self.mlp(self.norm2(x))
        num_text = text.shape[1]
        return x[:, :num_text], x[:, num_text:]


def direct(block: nn.Module, *args: Any) -> Any:
    """How a toy runs its blocks, if not with checkpointing."""
    return block(*args)


class Toy(nn.Module):
    """With `text_mask`, masked text is not attended to."""

    def __init__(self, heads: int = 6, kv_heads: int = 6, num_blocks: int = 2) -> None:
        super().__init__()
        self.text_in, self.image_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(CHANNELS, WIDTH)
        self.context_in, self.time_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, kv_heads) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CHANNELS)
        self.run: Callable[..., Any] = direct

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        context: Tensor,
        time: Tensor,
        text_mask: Tensor | None = None,
        extra: Any = None,
    ) -> Tensor:
        mask = None
        if text_mask is not None:
            seen = text_mask.new_ones(image.shape[:2])
            mask = torch.cat([text_mask, seen], dim=1).bool()[:, None, None, :]
        text, image = self.text_in(text), self.image_in(image) + self.time_in(time)[:, None]
        context = self.context_in(context)
        for block in self.blocks:
            text, image = self.run(block, text, image, context, mask)
        return self.head(image)


class Adapted(nn.Module):
    """What adapters put in the place of a layer, calling it as `base_layer`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CHANNELS, bias=False)
        self.double()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.base_layer(x, *args, **kwargs) + self.up(self.down(x))


def make_toy(seed: int = 0, **sizes: int) -> Toy:
    torch.manual_seed(seed)
    return Toy(**sizes).double()


def toy_inputs(
    text: int = 5, image: int = 9, batch: int = 2, seed: int = 1, masked: bool = False
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "text": draw(batch, text, CHANNELS),
        "image": draw(batch, image, CHANNELS),
        "context": draw(batch, 3, CHANNELS),
        "time": draw(batch, 1),
    }
    if masked:
        inputs["text_mask"] = (draw(batch, text) < 0.5).long()
    return inputs


def toy_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of `loss_of` it."""
    model.zero_grad()
    output = model(**inputs)
    loss_of(output).backward()
    return output.detach(), grads_of(model)


def loss_of(output: Tensor) -> Tensor:
    """A loss in which no token weighs as another."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return (output * weights + output.square()).mean()


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
