"""Encoders and VLMs in balance, beside the same without: features, losses, gradients."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bascule
from bascule.comm.items import leaves_of
from bascule.costs import PolynomialCost
from bascule.encoders import BalancedEncoder, EncoderOptions
from tests.helpers.ranks import raised_by
from tests.helpers.tile_cases import tiny_vae
from tests.helpers.vlm_models import (
    IMAGE,
    PATCH_VALUES,
    QWENS,
    VIDEO,
    make_model,
    make_sample,
    with_video,
)

COST = bascule.TransformerCost(16)
TEXTS = ("t5", "umt5", "clip")


@dataclass
class Both:
    """An output that is nested."""

    first: Tensor
    rest: tuple[Tensor, dict[str, Tensor | None]]


class Toy(nn.Module):
    """Items (1, L, 4) of unlike L; an output that is nested."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor, ids: Tensor, scale: float = 1.0) -> Both:
        if bool((ids == 13).any()):
            raise ValueError("item 13 cannot be encoded")
        hidden = torch.tanh(self.inner(x) * scale).cumsum(1)
        return Both(self.outer(hidden), (hidden.mean(1), {"ids": ids, "none": None}))


def batch_of(name: str, rank: int, sizes: list[tuple[int, int]], has_video: bool) -> dict[str, Any]:
    """One sample of `make_sample`, perhaps with a video, as a batch."""
    sample = make_sample(name, 100 + rank, sizes, 4)
    if has_video:
        sample = with_video(name, sample, 200 + rank)
    del sample["labels"]
    rows = {key: x[None] for key, x in sample.items() if key in ("input_ids", "mm_token_type_ids")}
    return sample | rows


def loss_of(model: Any, batch: dict[str, Any], rank: int) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    weights = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).sin()
    return (torch.tanh(logits) * weights).sum() * (1 + rank)


def gradients_of(model: Any, is_averaged: bool = False) -> dict[str, Tensor]:
    """Summed over ranks."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(grad, DTensor):
            found[name] = grad.full_tensor() * dist.get_world_size()
        elif is_averaged:
            found[name] = grad * dist.get_world_size()
        else:
            found[name] = grad.clone()
            dist.all_reduce(found[name])
    return found


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each is that of one process, to 1e-10 of itself and 1e-13 of all."""
    everything = sum(float((grad**2).sum()) for grad in expected.values()) ** 0.5
    assert everything > 0
    for key, grad in expected.items():
        error = float((found[key] - grad).norm())
        assert error <= 1e-10 * float(grad.norm()) + 1e-13 * everything, (key, error)


def shard(model: Any) -> None:
    """Blocks of the tower, the tower, the blocks of the language model, and the rest."""
    tower = tower_of(model)
    encoder = getattr(tower, "encoder", None)
    layers = tower.blocks if encoder is None else getattr(encoder, "layer", None) or encoder.layers
    for block in (*layers, tower, *model.model.language_model.layers, model):
        fully_shard(block)


def tower_of(model: Any) -> Any:
    inner = model.model
    return inner.visual if hasattr(inner, "visual") else inner.vision_tower


def text_encoder(name: str) -> Any:
    """Tiny, with random weights."""
    import transformers

    tf: Any = transformers
    torch.manual_seed(0)
    if name == "clip":
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "eos_token_id": 2}
        return tf.CLIPTextModel(tf.CLIPTextConfig(**sizes)).double().eval()
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    sizes |= {"num_heads": 2, "dropout_rate": 0.0}
    if name == "t5":
        return tf.T5EncoderModel(tf.T5Config(**sizes)).double().eval()
    return tf.UMT5EncoderModel(tf.UMT5Config(**sizes)).double().eval()


def items_of(kind: str, sizes: list[Any]) -> list[dict[str, Any]]:
    """Items of sizes: rows of a toy, words, patches of frames x height x width, or as many pixels.

    AutoencoderKL takes images, of one frame.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    items = list[dict[str, Any]]()
    for place, size in enumerate(sizes):
        if kind in TEXTS:
            items.append({"input_ids": torch.randint(3, 60, (1, size), generator=generator)})
            continue
        if kind == "toy":
            shape: tuple[int, ...] = (1, size, 4)
        elif kind in QWENS:
            shape = (math.prod(size), PATCH_VALUES)
        else:
            shape = (1, 3, *(size[1:] if kind == "kl" else size))
        x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        if kind == "toy":
            ids = torch.tensor([[100 * dist.get_rank() + place]])
            items.append({"x": x, "ids": ids, "scale": 0.5})
        elif kind in QWENS:
            items.append({"hidden_states": x, "grid_thw": torch.tensor([size])})
        else:
            items.append({"x": x})
    return items


def joined_leaves(outputs: Any) -> Tensor:
    """All numbers of all outputs."""
    parts = [leaf.flatten() for leaf in leaves_of(list(outputs)) if leaf.is_floating_point()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def weighed(numbers: Tensor) -> Tensor:
    return (numbers * torch.arange(len(numbers), dtype=numbers.dtype).sin()).sum()


def encoder_of(kind: str) -> Any:
    if kind == "toy":
        return Toy()
    if kind in QWENS:
        return tower_of(make_model(kind))
    return text_encoder(kind) if kind in TEXTS else tiny_vae(kind).double()


def balanced(kind: str, module: nn.Module, **options: Any) -> BalancedEncoder:
    if kind != "toy":
        return BalancedEncoder(module, cost=COST, options=EncoderOptions(**options))
    return BalancedEncoder(
        module,
        length_fn=lambda item: item["x"].shape[1],
        cost=PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0),
        options=EncoderOptions(**options),
    )


def shard_encoder(kind: str, module: Any) -> None:
    root = module.encoder if kind == "kl" else module  # FSDP cannot see what is in a distribution
    inner = ("encoder.block", "encoder.layers", "down_blocks", "blocks")
    blocks = [part for path, part in root.named_modules() if path.endswith(inner)]
    for block in [root.inner] if kind == "toy" else [one for part in blocks for one in part]:
        fully_shard(block)
    fully_shard(root)


def check_items(kind: str, per_rank: list[list[Any]], way: str = "plain", **options: Any) -> str:
    """Items have the features and gradients of any rank; return what the encoder says at its end.

    Of a step that is "recomputed", nothing but features leads to the encoder.
    """
    weight, plain, module = 1 + dist.get_rank(), encoder_of(kind), encoder_of(kind)
    items = items_of(kind, per_rank[dist.get_rank()])
    encode: Any = getattr(plain, "encode", plain)
    expected = [encode(**item) for item in items]
    everything = [p for p in plain.parameters() if p.requires_grad]
    loss = weight * weighed(joined_leaves(expected)) + 0.0 * sum(p.sum() for p in everything)
    loss.backward()
    inputs = [x for item in items for x in item.values() if getattr(x, "requires_grad", False)]
    input_grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
        x.requires_grad_(way != "frozen inputs")
    if way == "fsdp":
        shard_encoder(kind, module)
    wrapped = DistributedDataParallel(module) if way == "ddp" else module
    encoder, kept = balanced(kind, wrapped, **options), list[Any]()

    def balanced_loss(marker: Tensor) -> Tensor:
        features = encoder(items)
        kept[:] = features
        loss = weight * weighed(joined_leaves(features)) + 0.0 * marker
        return loss if way == "recomputed" else features.attach(loss)

    marker = torch.zeros((), requires_grad=True)
    if way in ("checkpoint", "recomputed"):
        found: Any = checkpoint(balanced_loss, marker, use_reentrant=False)
    else:
        found = balanced_loss(marker)
    assert list(map(type, kept)) == list(map(type, expected))
    for one, wanted in zip(leaves_of(kept), leaves_of(expected), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-10)
    found.backward()
    for x, grad in zip(inputs, input_grads, strict=True):
        if way != "frozen inputs":
            torch.testing.assert_close(x.grad, grad, rtol=1e-10, atol=1e-12)
    check_gradients(gradients_of(module, way == "ddp"), gradients_of(plain))
    return str(encoder.last)


def check_padded_texts(kind: str) -> str:
    """A call with a padded batch gives what the module gives; some ranks have no text."""
    rank = dist.get_rank()
    module, count = text_encoder(kind), [0, 5, 1, 0][rank]
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 60, (count, 7), generator=generator)
    mask = (torch.arange(7) < torch.randint(2, 8, (count, 1), generator=generator)).long()
    encoder = BalancedEncoder(module, cost=COST)
    found = encoder.call(ids, attention_mask=mask)
    assert found.last_hidden_state.shape == (count, 7, 16)
    assert not found.last_hidden_state.requires_grad
    if count:
        expected = module(ids, attention_mask=mask)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.to_tuple(), expected.to_tuple(), rtol=1e-10, atol=1e-10)
    return str(encoder.last)


def llava_batch(rank: int, sizes: list[tuple[int, int]], has_video: bool) -> dict[str, Any]:
    """One sample: images of rows x columns tiles and one of the whole; a video of 3 frames."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids, batch = [torch.randint(0, 50, (4,), generator=generator)], dict[str, Any]()
    for rows, columns in sizes:
        num = 4 + (2 * rows) * (2 * columns + 1)  # the whole, and rows of tiles with line ends
        ids += [torch.full((num,), IMAGE), torch.randint(0, 50, (1,), generator=generator)]
    if sizes:
        most = max(1 + rows * columns for rows, columns in sizes)
        shape = (len(sizes), most, 3, 8, 8)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
        shapes = torch.tensor([(8 * rows, 8 * columns) for rows, columns in sizes])
        batch |= {"pixel_values": pixels, "image_sizes": shapes}
    if has_video:
        shape = (1, 3, 3, 8, 8)
        video = torch.randn(shape, generator=generator, dtype=torch.float64)
        batch["pixel_values_videos"] = video
        ids += [torch.full((3 * 1 + 1,), VIDEO), torch.randint(0, 50, (1,), generator=generator)]
    return {"input_ids": torch.cat(ids)[None], **batch}


def check_vlm(name: str, shapes: list[list[tuple[int, int]]], videos: list[bool], way: str) -> str:
    """A step with a balanced encoder is the same as without; what the encoder said at its end."""
    rank = dist.get_rank()
    make = llava_batch if name == "llava_onevision" else partial(batch_of, name)
    batch = make(rank, shapes[rank], videos[rank])
    plain, model = make_model(name), make_model(name)
    expected = loss_of(plain, batch, rank)
    expected.backward()
    if way == "frozen":
        tower_of(model).requires_grad_(False)
    if way == "checkpoint":
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
    if way == "fsdp":
        shard(model)
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    tower = tower_of(model)
    encoder = BalancedEncoder(tower, cost=COST)
    installed = encoder.install(wrapped)
    loss = loss_of(wrapped, batch, rank)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    assert tower_of(model) is tower
    grads, expected_grads = gradients_of(model, way == "ddp"), gradients_of(plain)
    towers = {key for key in expected_grads if key.startswith(("model.vis",))}
    if way == "frozen":
        assert not any(grads[key].any() for key in towers)
        expected_grads = {key: grad for key, grad in expected_grads.items() if key not in towers}
    elif any(shapes) or any(videos):
        assert any(expected_grads[key].any() for key in towers)
    check_gradients(grads, expected_grads)
    installed.undo()
    before, said = encoder.last, str([*map(str, installed.encodings)])
    if way != "fsdp":
        loss_of(model, batch, rank)
    assert encoder.last is before
    return said


def check_failing_image() -> tuple[list[str], str]:
    """An image of a rank is wrong; the model is as before, and all go on."""
    rank = dist.get_rank()
    model = make_model("qwen2_5_vl")
    tower = tower_of(model)
    encoder = BalancedEncoder(tower, cost=COST)
    installed = encoder.install(model)
    good = batch_of("qwen2_5_vl", rank, [(2, 2)] if rank else [], False)
    bad = dict(good)
    if rank == 1:
        bad["pixel_values"] = bad["pixel_values"][:-1]
    said = raised_by(loss_of, model, bad, rank)
    assert tower_of(model) is tower
    loss_of(model, good, rank).backward()
    assert all(p.grad is not None for p in tower.parameters())
    images, videos = installed.encodings
    assert encoder.last is images is not None and videos is None  # though these come last
    return said
