"""VLMs whose encoders are balanced, beside the same without: features, losses, gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import bascule
from bascule.encoders import BalancedEncoder
from tests.helpers.vlm_models import IMAGE, PATCH_VALUES, VIDEO, make_model

COST = bascule.TransformerCost(16)


def images_of(name: str, seed: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Pixels of images of rows x columns merged patches; of InternVL as many tiles."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(rows * columns for rows, columns in sizes)
    if name == "internvl":
        shape: tuple[int, ...] = (num, 3, 8, 8)
    else:
        shape = (4 * num, PATCH_VALUES)
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "internvl":
        return {"pixel_values": pixels}
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in sizes])
    return {"pixel_values": pixels, "image_grid_thw": grids}


def batch_of(name: str, rank: int, sizes: list[tuple[int, int]], has_video: bool) -> dict[str, Any]:
    """One sample: text, its images, and a video of two frames of 2 x 2 merged patches."""
    generator = torch.Generator().manual_seed(100 + rank)
    tiles = 4 if name == "internvl" else 1
    ids = [torch.randint(0, 50, (4,), generator=generator)]
    for rows, columns in sizes:
        ids += [torch.full((rows * columns * tiles,), IMAGE)]
        ids += [torch.randint(0, 50, (2,), generator=generator)]
    batch = images_of(name, rank, sizes) if sizes else {}
    if has_video:
        video = torch.randn(32, PATCH_VALUES, generator=generator, dtype=torch.float64)
        batch |= {"pixel_values_videos": video, "video_grid_thw": torch.tensor([(2, 4, 4)])}
        frames = [4, 4] if name == "qwen3_vl" else [8]  # Qwen3-VL has times between frames
        for num in frames:
            ids += [torch.full((num,), VIDEO), torch.randint(0, 50, (1,), generator=generator)]
    input_ids = torch.cat(ids).clamp_max(VIDEO)
    types = (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO)
    return {
        "input_ids": input_ids[None],
        **({} if name == "internvl" else {"mm_token_type_ids": types[None]}),
        **batch,
    }


def loss_of(model: Any, batch: dict[str, Any], rank: int) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    weights = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).sin()
    return (torch.tanh(logits) * weights).sum() * (1 + rank)


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Summed over ranks."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(grad, "full_tensor"):
            found[name] = grad.full_tensor() * dist.get_world_size()
        else:
            found[name] = grad.clone()
            dist.all_reduce(found[name])
    return found


def shard(model: Any) -> None:
    """Blocks of the tower, the tower, the blocks of the language model, and the rest."""
    tower = tower_of(model)
    layers = tower.encoder.layer if hasattr(tower, "encoder") else tower.blocks
    for block in (*layers, tower, *model.model.language_model.layers, model):
        fully_shard(block)


def tower_of(model: Any) -> Any:
    inner = model.model
    return inner.visual if hasattr(inner, "visual") else inner.vision_tower


def check_vlm(name: str, shapes: list[list[tuple[int, int]]], videos: list[bool], way: str) -> str:
    """A step with a balanced encoder is the same as without; what the encoder said at its end."""
    rank = dist.get_rank()
    batch = batch_of(name, rank, shapes[rank], videos[rank])
    plain, model = make_model(name), make_model(name)
    expected = loss_of(plain, batch, rank)
    expected.backward()
    if way == "frozen":
        tower_of(model).requires_grad_(False)
    if way == "checkpoint":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "fsdp":
        shard(model)
    tower = tower_of(model)
    encoder = BalancedEncoder(tower, cost=COST)
    installed = encoder.install(model)
    loss = loss_of(model, batch, rank)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    assert tower_of(model) is tower
    grads, expected_grads = gradients_of(model), gradients_of(plain)
    everything = sum(float((grad**2).sum()) for grad in expected_grads.values()) ** 0.5
    is_seen = False
    for key, grad in expected_grads.items():
        if way == "frozen" and key.startswith(("model.visual", "model.vision_tower")):
            assert not grads[key].any()
            continue
        is_seen |= "vis" in key and bool(grad.any())
        error = float((grads[key] - grad).norm())
        assert error <= 1e-10 * float(grad.norm()) + 1e-13 * everything, (key, error)
    assert is_seen or way == "frozen" or not (any(shapes) or any(videos))
    installed.undo()
    before = encoder.last
    if way != "fsdp":
        loss_of(model, batch, rank)
    assert encoder.last is before
    return str(encoder.last)
