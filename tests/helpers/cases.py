"""Small models and awkward batches: what the tests of the ranks train on.

A batch is a list of samples for each rank; a sample is (text tokens, image tokens). Everything
random is drawn per sample, so that it is the same on whichever rank the sample is loaded.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bascule.machine.costs import TransformerCost
from bascule.models import Exchange, LocalExchange, MMDiT, MMDiTConfig, PackedBatch
from bascule.parallel import SequenceParallel
from bascule.train import train_step

Sample = tuple[int, int]
Batch = list[list[Sample]]
Gradients = dict[str, Tensor]
COST = TransformerCost(64)
LENGTHS = (0, 1, 2, 3, 5, 8, 13, 21)


def config_of(num_heads: int, num_kv_heads: int, head_dim: int = 4) -> MMDiTConfig:
    """One block of each kind, as narrow as the heads allow."""
    return MMDiTConfig(
        in_channels=3,
        text_dim=5,
        vec_dim=4,
        d_model=num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_double=1,
        num_single=1,
        mlp_ratio=1.0,
        axes_dim=(2,) * (head_dim // 2),
    )


def make_model(config: MMDiTConfig, dtype: torch.dtype = torch.float64) -> MMDiT:
    model = MMDiT(config)
    model.init_weights(0)
    return model.to(dtype)


def edge_batches(num_ranks: int) -> dict[str, Batch]:
    """The batches on which balancers are known to fail."""
    nothing: Batch = [[] for _ in range(num_ranks)]
    first = nothing[1:]
    kinds: list[list[Sample]] = [[(4, 0), (1, 0)], [(0, 6)], [], [(2, 3)]]
    return {
        "no sequence at all": nothing,
        "one rank has everything": [*first, [(3, 9), (1, 1), (0, 5), (2, 30)]],
        "fewer sequences than ranks": [[(2, 5)], *first],
        "only sequences without tokens": [[(0, 0)] * (1 + rank % 2) for rank in range(num_ranks)],
        "sequences without tokens among others": [
            [(0, 0), (2, 4), (0, 0)] if rank % 2 == 0 else [(0, 0)] for rank in range(num_ranks)
        ],
        "one giant": [[(5, 120)], *([(1, 2)] for _ in first)],
        "all equal": [[(2, 6), (2, 6)] for _ in range(num_ranks)],
        "text only": [[(3 + rank, 0)] for rank in range(num_ranks)],
        "images only": [[(0, 3 + rank)] for rank in range(num_ranks)],
        "shorter than the bag": [[(1, 0), (0, 1), (1, 1)] for _ in range(num_ranks)],
        "each rank another kind": [kinds[rank % len(kinds)] for rank in range(num_ranks)],
    }


def random_batch(num_ranks: int, seed: int) -> Batch:
    draw = random.Random(seed)
    return [
        [(draw.choice(LENGTHS), draw.choice(LENGTHS)) for _ in range(draw.choice((0, 1, 1, 2, 4)))]
        for _ in range(num_ranks)
    ]


def all_batches(num_ranks: int, num_random: int) -> dict[str, Batch]:
    """Random batches and every edge case."""
    drawn = {f"random {seed}": random_batch(num_ranks, seed) for seed in range(num_random)}
    return edge_batches(num_ranks) | drawn


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples packed for the model, and what it shall predict for their image tokens."""

    inputs: PackedBatch
    target: Tensor
    seq_lens: list[int]

    @classmethod
    def draw(
        cls,
        sizes: Sequence[Sample],
        config: MMDiTConfig,
        *,
        first_id: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> "Samples":
        """The samples with global ids from `first_id` on; some order of text and image tokens."""
        parts = [_draw(first_id + place, size, config) for place, size in enumerate(sizes)]
        none = _draw(0, (0, 0), config)
        joined = {key: torch.cat([none[key][:0], *(part[key] for part in parts)]) for key in none}
        target = joined.pop("target").to(dtype)
        for key in ("image_tokens", "text_tokens", "pooled"):
            joined[key] = joined[key].to(dtype)
        return cls(PackedBatch(**joined), target, [sum(size) for size in sizes])

    def losses(self, predicted: Tensor) -> Tensor:
        """(i,) of each image token."""
        return (predicted[self.inputs.is_image] - self.target).square().mean(dim=-1)


def _draw(sample_id: int, size: Sample, config: MMDiTConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7000 + sample_id)
    num_text, num_image = size
    num_tokens = num_text + num_image

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "timestep": torch.rand(1, generator=generator, dtype=torch.float64),
        "pooled": normal(1, config.vec_dim),
        "image_tokens": normal(num_image, config.in_channels),
        "text_tokens": normal(num_text, config.text_dim),
        "target": normal(num_image, config.in_channels),
        "is_image": torch.randperm(num_tokens, generator=generator) < num_image,
        "pos": torch.randint(
            0, 50, (num_tokens, len(config.axes_dim)), generator=generator
        ).float(),
    }


def own_samples(
    batch: Batch, config: MMDiTConfig, rank: int, dtype: torch.dtype = torch.float64
) -> Samples:
    """What the loader of this rank gives."""
    first_id = sum(len(sizes) for sizes in batch[:rank])
    return Samples.draw(batch[rank], config, first_id=first_id, dtype=dtype)


def reference_step(
    model: MMDiT, batch: Batch, dtype: torch.dtype = torch.float64
) -> tuple[float, Gradients]:
    """Loss and gradients of one process that has the whole batch; no code of the ranks is used."""
    samples = Samples.draw([size for sizes in batch for size in sizes], model.config, dtype=dtype)
    model.zero_grad()
    losses = samples.losses(model(samples.inputs, LocalExchange(samples.seq_lens)))
    loss = losses.sum() / max(1, losses.numel())
    loss.backward()
    return loss.item(), named_gradients(model)


def rank_step(
    model: MMDiT, batch: Batch, parallel: SequenceParallel, dtype: torch.dtype = torch.float64
) -> tuple[float, Gradients]:
    """The same on this rank of many, with the gradients averaged as DDP does."""
    model.zero_grad()
    loss = train_step(model, [lambda model: rank_loss(model, batch, parallel, dtype)])
    return loss.item(), averaged(named_gradients(model))


def rank_loss(
    model: Callable[[PackedBatch, Exchange], Tensor],
    batch: Batch,
    parallel: SequenceParallel,
    dtype: torch.dtype = torch.float64,
    config: MMDiTConfig | None = None,
) -> Tensor:
    config = model.config if isinstance(model, MMDiT) else config
    assert config is not None
    samples = own_samples(batch, config, parallel.rank, dtype)
    step = parallel.plan(samples.seq_lens)
    return step.mean(samples.losses(model(samples.inputs, step)))


def named_gradients(model: MMDiT) -> Gradients:
    grads: Gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        grads[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad
    return grads


def averaged(grads: Mapping[str, Tensor]) -> Gradients:
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads.values()]
    flat = torch.cat([g.to(w).ravel() for g, w in zip(grads.values(), wide, strict=True)])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([grad.numel() for grad in grads.values()])
    return {
        name: part.view(grad.shape) for (name, grad), part in zip(grads.items(), parts, strict=True)
    }


def assert_same(got: tuple[float, Gradients], want: tuple[float, Gradients], what: str) -> None:
    """‖g − ref‖ ≤ 1e-10 ‖ref‖ + 1e-13 ‖all gradients‖ for every parameter, and the same loss."""
    assert abs(got[0] - want[0]) <= 1e-12 * abs(want[0]), f"{what}: loss {got[0]}, want {want[0]}"
    total = norm_of(want[1])
    assert got[1].keys() == want[1].keys(), what
    for name, ref in want[1].items():
        error = float((got[1][name] - ref).norm())
        allowed = 1e-10 * float(ref.norm()) + 1e-13 * total
        assert error <= allowed, f"{what}: gradient of {name} is off by {error:.2e} > {allowed:.2e}"


def norm_of(grads: Mapping[str, Tensor]) -> float:
    return sum(float(grad.norm()) ** 2 for grad in grads.values()) ** 0.5


def sharded_gradients(model: nn.Module) -> Gradients:
    grads: Gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), f"{name} got no gradient"
        grads[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad.full_tensor()
    return grads
