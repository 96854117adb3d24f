"""Models beside the loader: images of any resolution, tensor parallelism, a pipeline.

Losses and gradients are those of one process that takes the samples one by one, in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from bascule.data.loader import BalancedLoader
from bascule.data.packs import Pack, collate_padded, unpack
from tests.helpers.inference_cases import Gradients, in_float64, worst
from tests.helpers.loader_cases import COST, FAST, loader_with
from tests.helpers.ranks import on_ranks
from tests.helpers.trainer_runs import make_model as make_llama
from tests.helpers.vlm_models import IMAGE, TEXT

pytest.importorskip("transformers")

F64 = torch.float64
Sample = dict[str, Any]


def num_labels(sample: Sample) -> int:
    """Labels that the loss is the mean over; a causal model predicts no first one."""
    return int((sample["labels"][1:] != -100).sum())


def loader_of(samples: list[list[Sample]], **settings: Any) -> BalancedLoader:
    """One that moves whatever helps, whose loss is the mean over the labels of all ranks."""
    given = {"cost": COST, "min_gain": 0.0, "bytes_per_s": FAST, "weight_fn": num_labels}
    return loader_with(samples, **given | settings)


def alone(
    model: nn.Module, samples: list[Sample], loss_of: Callable[[Sample], Tensor]
) -> tuple[float, Gradients]:
    """The mean loss over all labels of the samples, taken one by one, and its gradients."""
    total = sum(map(num_labels, samples))
    loss = torch.zeros((), dtype=F64)
    for sample in samples:
        part = loss_of(sample) * num_labels(sample) / total
        part.backward()
        loss += part.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), grads


# --- images of any resolution ---------------------------------------------------------------------


def llava_onevision() -> Any:
    """Tiles of 8 x 8 pixels, at most 2 x 2 of them, and the whole image as one more."""
    import transformers as tf

    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = tf.LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
        text_config={"model_type": "qwen2", **TEXT},
        image_token_index=IMAGE,
        video_token_index=IMAGE + 1,
        image_grid_pinpoints=[[8, 8], [8, 16], [16, 8], [16, 16]],
    )
    torch.manual_seed(0)
    model = tf.LlavaOnevisionForConditionalGeneration(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


# Of each sample, height and width of its images, and how many tiles those have; many texts.
ANY_RES = [[(16, 16, 5)], [(8, 16, 3)], [], [(7, 7, 2)], [(8, 8, 1), (16, 9, 1)], [(16, 8, 3)]]


def any_res_samples(model: Any) -> list[Sample]:
    samples: list[Sample] = []
    for seed, images in enumerate(ANY_RES):
        draw = torch.Generator().manual_seed(seed)
        text = torch.randint(0, 50, (3 + 5 * (seed % 2),), generator=draw)
        sample: Sample = {"input_ids": text, "labels": text.clone()}
        if images:
            num = max(tiles for *_, tiles in images)
            shape = (len(images), num, 3, 8, 8)
            visual = {
                "pixel_values": torch.randn(shape, generator=draw, dtype=F64),
                "image_sizes": torch.tensor([size for *size, _ in images]),
                "batch_num_images": torch.tensor([len(images)]),
            }
            features = model.get_image_features(**visual).pooler_output
            ids = torch.cat([torch.full((sum(map(len, features)),), IMAGE), text])
            sample = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **visual}
        samples.append(sample)
    return samples


@on_ranks(2)
@in_float64(F64)
def test_images_of_any_resolution_train_in_padded_batches() -> None:
    rank, model, whole = dist.get_rank(), llava_onevision(), llava_onevision()
    with torch.no_grad():
        samples = any_res_samples(model)

    def loss_of(sample: Sample) -> Tensor:
        visual = {name: x for name, x in sample.items() if name not in ("input_ids", "labels")}
        return whole(
            input_ids=sample["input_ids"][None], labels=sample["labels"][None], **visual
        ).loss

    wanted, grads = alone(whole, samples, loss_of)
    mine = samples[:4] if rank == 0 else samples[4:]
    (batch,) = loader_of([mine], collate_fn=collate_padded)
    loss = model(**batch.data).loss * batch.loss_scale
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    assert abs(mean_over(dist.group.WORLD, loss) - wanted) < 1e-12
    assert worst(model, grads) <= 1.0 and batch.verdict.applied


# --- tensor parallelism ---------------------------------------------------------------------------

TENSOR_PLAN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()),
    **dict.fromkeys(("gate_proj", "up_proj"), ColwiseParallel()),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel()),
}


def texts(index: int, num_steps: int) -> list[list[Sample]]:
    """Of each step, what a data-parallel rank loads: the first one has the long texts."""
    draw = torch.Generator().manual_seed(index)
    made: list[list[Sample]] = []
    for step in range(num_steps):
        lens = [30 + 7 * (step % 4), 40, 25] if index == 0 else [5 + step % 9, 3]
        ids = [torch.randint(0, 32, (length,), generator=draw) for length in lens]
        made.append([{"input_ids": one, "labels": one.clone()} for one in ids])
    return made


@on_ranks(4)
@in_float64(F64)
def test_a_model_split_by_tensor_parallelism() -> None:
    """Llama, of which pairs of ranks share layers and FSDP2 shards over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, whole = make_llama("llama").double(), make_llama("llama").double()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            plan = {key: one for key, one in TENSOR_PLAN.items() if hasattr(part, key)}
            parallelize_module(part, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])

    def loss_of(sample: Sample) -> Tensor:
        return whole(**{name: x[None] for name, x in sample.items()}).loss

    steps = [[*one, *two] for one, two in zip(texts(0, 3), texts(1, 3), strict=True)]
    mine = texts(mesh.get_local_rank("data"), 3)
    loader = loader_of(mine, mesh_or_group=mesh, axis="data", collate_fn=collate_padded)
    for batch, samples in zip(loader, steps, strict=True):
        model.zero_grad()
        whole.zero_grad()
        wanted, grads = alone(whole, samples, loss_of)
        loss = model(**batch.data).loss * batch.loss_scale
        loss.backward()
        assert batch.verdict.applied and worst(model, grads) <= 1.0
        assert abs(mean_over(mesh["data"].get_group(), loss) - wanted) < 1e-12


def mean_over(group: Any, loss: Tensor) -> float:
    number = loss.detach().clone()
    dist.all_reduce(number, group=group)
    return float(number) / dist.get_world_size(group)


# --- a pipeline -----------------------------------------------------------------------------------

WIDTH, VOCAB, NUM_TOKENS, NUM_PACKS = 8, 32, 64, 3


class Stage(nn.Module):
    """The first or the last half of a causal model; tokens attend within their sample."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if index == 0 else nn.Identity()
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Identity() if index == 0 else nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(1, T) tokens or (1, T, width), and each token's place in its sample."""
        x = self.embed(x)
        sample = positions.eq(0).cumsum(1)
        seen = (sample[:, :, None] == sample[:, None]).tril()
        q, k, v = self.qkv(x + positions.sin()[..., None]).chunk(3, dim=-1)
        return self.head(x + self.mix(scaled_dot_product_attention(q, k, v, attn_mask=seen)).tanh())


def stages() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Stage(index) for index in range(2))


@on_ranks(4)
def test_a_model_split_into_the_stages_of_a_pipeline() -> None:
    """Packs of a fixed size are the microbatches of torch's schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    index, data = mesh.get_local_rank("stage"), mesh["data"].get_group()
    whole, own = stages(), stages()[index]
    place = PipelineStage(own, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        labels, weights = target[:, 0].long(), target[:, 1]
        return (cross_entropy(logits.mT, labels, reduction="none") * weights).sum()

    def loss_of(sample: Sample) -> Tensor:
        places = torch.arange(len(sample["input_ids"]))[None]
        logits = whole[1](whole[0](sample["input_ids"][None], places), places)
        return cross_entropy(logits[0, :-1], sample["labels"][1:])

    schedule = ScheduleGPipe(place, NUM_PACKS, loss_fn)
    rank = mesh.get_local_rank("data")
    mine = [sample for step in texts(rank, 40 if rank else 8) for sample in step]
    pack = Pack(tokens=NUM_TOKENS, fixed=True)
    options = {"mesh_or_group": mesh, "axis": "data", "accumulate": NUM_PACKS, "pack": pack}
    num_steps = num_moved = 0
    batches: list[Any] = []
    for batch in loader_of(mine, **options):  # pyright: ignore[reportArgumentType]
        batches.append(batch)
        if len(batches) < NUM_PACKS:
            continue
        ids, places, labels = (
            torch.stack([one.data[name] for one in batches])
            for name in ("input_ids", "positions", "shift_labels")
        )
        scales = torch.tensor([one.loss_scale for one in batches], dtype=F64)[:, None]
        counts = labels.ne(-100).sum(1, keepdim=True).clamp(min=1)  # a pack's loss is a mean
        weights = (scales / counts).expand_as(labels)
        target, losses = torch.stack([labels, weights], dim=1), list[Tensor]()
        inputs, targets = ((ids,), {}) if index == 0 else ((), {"target": target, "losses": losses})
        schedule.step(*inputs, positions=places, **targets)
        samples: list[Any] = [None] * 2
        dist.all_gather_object(samples, [x for one in batches for x in unpack(one.data)], data)
        wanted, grads = alone(whole, [*samples[0], *samples[1]], loss_of)
        prefix = f"{index}."
        of_stage = {n.removeprefix(prefix): g for n, g in grads.items() if n.startswith(prefix)}
        for parameter in own.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=data)
            parameter.grad /= 2
        assert worst(own, of_stage) <= 1.0
        if index:
            assert abs(mean_over(data, torch.stack(losses).mean()) - wanted) < 1e-12
        num_steps, num_moved = num_steps + 1, num_moved + batches[0].verdict.applied
        batches = []
        own.zero_grad()
        whole.zero_grad()
    assert num_steps > 1 and num_moved
