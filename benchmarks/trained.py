"""Block-sparse attention of a video model that was trained here: its masks, and plans for them."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from measuring import on_ranks, say
from sparse import qualities, sweeps
from torch import Tensor
from torch.nn import functional

from bascule import SparseConfig, parallelize
from bascule.arrays import Bools
from bascule.attention.sparse import spatial_or_temporal
from bascule.plan.sparse import block_lens
from bascule.workload import load_masks
from bascule.workload.masks import WAN21, synthetic_masks

FRAMES, SIDE, PATCH = 16, 16, 2  # of clips, and the side of a token in pixels
GRID = FRAMES, SIDE // PATCH, SIDE // PATCH
NUM_LAYERS, NUM_HEADS, HEAD_DIM, TEXT_DIM, BLOCK = 5, 8, 16, 16, 8
BATCH, LEARNING_RATE, NUM_STEPS = 2, 1e-3, 10
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
RULES = {
    "keep 0.3": {"keep": 0.3},
    "mass 0.9": {"mass": 0.9},
    "spatial or temporal": {"rule": spatial_or_temporal(GRID, width=SIDE // PATCH)},
}


def sparse_trained(*, quick: bool = False) -> dict[str, Any]:
    """Train a small video model, and plan the masks that rules make of its attention.

    Ten minutes. A Wan of diffusers, 5 layers of 8 heads of width 16, learns to denoise clips of two
    shapes that move and bounce: 16 frames of 16 x 16 pixels, 1,024 tokens, blocks of 8. Then it
    makes a clip in 10 steps; masks are what its layers saw. "40 heads" are those of all layers of
    a step together, as one layer. "untrained" has the first weights, and "synthetic" is drawn by
    `bascule.workload.masks` at the grid and density of "mass 0.9".
    """
    models = {"untrained": _model(), "trained": _model()}
    losses = _train(models["trained"], 20 if quick else 600)
    say(f"loss of the last tenth of the training: {losses[-1]:.3f}, of the first {losses[0]:.3f}")
    rows, structure = list[dict[str, Any]](), list[dict[str, Any]]()
    swept: dict[str, list[dict[str, Any]]] = {"kept": [], "rewards": []}
    for source, model in models.items():
        for rule in RULES:
            masks = on_ranks(_masks_of, model.state_dict(), rule, num_ranks=1)
            structure += [_structure(source, rule, masks)]
            if source == "trained":
                rows += _plans(f"{source}, {rule}", masks)
                lens, layers = block_lens((math.prod(GRID),), BLOCK), masks.swapaxes(0, 1)
                for key, values in sweeps(f"{source}, {rule}", lens, layers).items():
                    swept[key] += values
    density = next(one["density"] for one in structure[::-1] if one["rule"] == "mass 0.9")
    drawn = replace(WAN21, grid=GRID, num_heads=NUM_HEADS, density=density, block=BLOCK)
    masks = np.stack(
        [[synthetic_masks(drawn, layer=layer, step=step) for layer in range(NUM_LAYERS)]
         for step in range(NUM_STEPS)]
    )  # fmt: skip
    structure += [_structure("synthetic", "-", masks)]
    rows += _plans("synthetic", masks)
    return {"losses": losses, "structure": structure, "quality": rows} | swept


# --- the model ----------------------------------------------------------------------------------


def _model() -> Any:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, PATCH, PATCH),
        num_attention_heads=NUM_HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=3,
        out_channels=3,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=3 * NUM_HEADS * HEAD_DIM,
        num_layers=NUM_LAYERS,
        rope_max_seq_len=64,
    )


def _clips(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw (B, 3, F, S, S) clips of two shapes each, and (B, 4, D) the text that names them."""

    def draw(*sizes: int) -> Tensor:
        return torch.rand(BATCH, *sizes, generator=generator)

    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    clips = (draw(3, 1, 1, 1) - 1).expand(-1, -1, FRAMES, SIDE, SIDE).clone()
    kinds = torch.randint(3, (BATCH, 2), generator=generator)
    colours, starts, speeds = 2 * draw(2, 3) - 1, SIDE * draw(2, 2), 3 * draw(2, 2) - 1.5
    sizes = SIDE * (0.1 + 0.1 * draw(2))
    for place in np.ndindex(BATCH, 2):
        path = starts[place][:, None] + speeds[place][:, None] * torch.arange(FRAMES)
        path = SIDE - (path % (2 * SIDE) - SIDE).abs()  # off the walls
        x, y = (
            (at - to[:, None, None]).abs() for at, to in zip((columns, rows), path, strict=True)
        )
        size, wide, thin = sizes[place], torch.maximum(x, y), torch.minimum(x, y)
        inside = [wide < size, x**2 + y**2 < size**2, (wide < 1.3 * size) & (thin < size / 3)]
        shown, colour = inside[int(kinds[place])], colours[place][:, None, None, None]
        clips[place[0]] = torch.where(shown, colour, clips[place[0]])
    table = torch.randn(9, 4, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    return clips, table[3 * kinds[:, 0] + kinds[:, 1]]


def _train(model: Any, num_steps: int) -> list[float]:
    """Train by flow matching; return the mean loss of each tenth."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = list[float]()
    for step in range(num_steps):
        share = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        optimizer.param_groups[0]["lr"] = share * LEARNING_RATE
        clips, text = _clips(generator)
        times = torch.randn(BATCH, generator=generator).sigmoid()
        noise, at = torch.randn(clips.shape, generator=generator), times[:, None, None, None, None]
        output = model(torch.lerp(clips, noise, at), 1000 * times, text, return_dict=False)[0]
        loss = functional.mse_loss(output, noise - clips)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            say(f"step {step + 1}: loss {np.mean(losses[-50:]):.3f}")
    return [float(np.mean(part)) for part in np.array_split(losses, 10)]


def _masks_of(weights: dict[str, Tensor], rule: str) -> Bools:
    """Make a clip with block-sparse attention; return (steps, layers, heads, blocks, blocks)."""
    model = _model()
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(3)
    _, text = _clips(generator)
    clip = torch.randn(1, 3, FRAMES, SIDE, SIDE, generator=generator)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "masks.npz"
        with parallelize(model, sparse=SparseConfig(block=BLOCK, **RULES[rule])) as handle:
            with handle.save_masks(path):
                for step in range(NUM_STEPS):
                    time = torch.tensor([1000.0 * (1 - step / NUM_STEPS)])
                    clip -= model(clip, time, text[:1], return_dict=False)[0] / NUM_STEPS
        return load_masks(path)


# --- what the masks are like --------------------------------------------------------------------


def _structure(source: str, rule: str, masks: Bools) -> dict[str, Any]:
    """Return densities, and how much masks change from step to step."""
    densities = masks.mean((-2, -1))
    changed = (masks[1:] != masks[:-1]).mean() / max(2 * masks.mean() * (1 - masks.mean()), 1e-9)
    row = {
        "source": source,
        "rule": rule,
        "density": float(masks.mean()),
        "density_of_heads": [float(densities.min()), float(densities.max())],
        "changed_by_a_step": float(changed),  # 1: as much as unrelated masks
    }
    say(
        f"{source}, {rule}: density {row['density']:.3f}, of heads "
        f"{densities.min():.2f} to {densities.max():.2f}; {changed:.1%} of what unrelated masks "
        "change by a step"
    )
    return row


def _plans(name: str, masks: Bools) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to plan a step in the middle, 8 heads and 40."""
    lens = block_lens((math.prod(GRID),), BLOCK)
    layers = list(masks[NUM_STEPS // 2])
    for mesh in MESHES:
        for heads, of_layers in ((NUM_HEADS, layers), (40, [np.concatenate(layers)])):
            for row in qualities(f"{name}, {heads} heads", lens, of_layers, mesh):
                yield row | {"source": name, "heads": heads}
