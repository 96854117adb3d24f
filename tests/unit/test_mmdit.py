"""The packed MM-DiT on one process. What ranks add is tested in `tests/distributed`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bascule.models import LocalExchange, MMDiT, MMDiTConfig, PackedBatch
from bascule.models.layout import look_up, permute_rows, scale_rows, sum_rows, sum_rows_by_matmul
from bascule.models.mmdit import sinusoid

SIZES: dict[str, Any] = {"in_channels": 6, "text_dim": 10, "vec_dim": 5, "num_heads": 2}
CONFIG = MMDiTConfig(**SIZES, d_model=24, num_double=2, num_single=2, axes_dim=(4, 4, 4))
Sample = tuple[int, int]  # text tokens, image tokens


def make_model(dtype: torch.dtype = torch.float64, config: MMDiTConfig = CONFIG) -> MMDiT:
    model = MMDiT(config).to(dtype)
    model.init_weights(0)
    return model


def random_sample(
    index: int, sizes: Sample, dtype: torch.dtype, config: MMDiTConfig
) -> dict[str, Tensor]:
    """One sample with text and image tokens shuffled among each other."""
    generator = torch.Generator().manual_seed(1000 + index)
    num_text, num_image = sizes
    total = num_text + num_image

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    sample = {"image_tokens": draw(num_image, config.in_channels)}
    sample |= {"text_tokens": draw(num_text, config.text_dim)}
    sample |= {"is_image": torch.randperm(total, generator=generator) < num_image}
    sample |= {"pos": torch.randint(0, 64, (total, 3), generator=generator)}
    sample |= {"timestep": torch.rand(1, generator=generator), "pooled": draw(1, config.vec_dim)}
    return sample | ({"guidance": torch.full((1,), 3.5)} if config.guidance else {})


def pack(
    samples: Sequence[Sample],
    dtype: torch.dtype = torch.float64,
    config: MMDiTConfig = CONFIG,
    first: int = 0,
) -> tuple[PackedBatch, LocalExchange]:
    """A batch of random samples, the same whether packed together or one by one."""
    empty = random_sample(0, (0, 0), dtype, config)
    parts = [random_sample(first + i, sizes, dtype, config) for i, sizes in enumerate(samples)]
    fields = {name: torch.cat([empty[name][:0], *(p[name] for p in parts)]) for name in empty}
    return PackedBatch(**fields), LocalExchange([sum(sizes) for sizes in samples])


def image_loss(model: MMDiT, batch: PackedBatch, exchange: LocalExchange) -> Tensor:
    return model(batch, exchange)[batch.is_image].square().sum()


def gradients(model: MMDiT, batch: PackedBatch, exchange: LocalExchange) -> dict[str, Tensor]:
    model.zero_grad()
    image_loss(model, batch, exchange).backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in named.items() if grad is None] == []
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


CONFIGS = {
    "flux": CONFIG,
    "gqa": replace(CONFIG, d_model=48, num_heads=4, num_kv_heads=2),
    "guidance": replace(CONFIG, guidance=True),
    "double only": replace(CONFIG, num_single=0),
    "single only": replace(CONFIG, num_double=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_batch_equals_its_sequences_one_by_one(name: str) -> None:
    config = CONFIGS[name]
    samples = [(3, 5), (0, 7), (4, 0), (1, 1), (6, 20)]
    model = make_model(config=config)
    together = model(*pack(samples, config=config))
    alone = [model(*pack([s], config=config, first=i)) for i, s in enumerate(samples)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_gradients_of_a_packed_batch_are_the_sum_over_its_sequences() -> None:
    samples = [(3, 5), (0, 7), (4, 0), (2, 9)]
    model = make_model()
    together = gradients(model, *pack(samples))
    alone = [gradients(model, *pack([s], first=i)) for i, s in enumerate(samples)]
    for name, grad in together.items():
        total = torch.stack([grads[name] for grads in alone]).sum(0)
        assert (grad - total).norm() <= 1e-12 * total.norm() + 1e-15, name


@pytest.mark.parametrize("name", ["flux", "gqa", "guidance", "single only"])
def test_every_parameter_gets_a_gradient_at_the_first_step(name: str) -> None:
    config = CONFIGS[name]
    grads = gradients(make_model(config=config), *pack([(3, 5), (2, 9)], config=config))
    assert [name for name, grad in grads.items() if not grad.abs().max() > 1e-6] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "samples", [[], [(0, 0)], [(4, 0)], [(0, 6)], [(4, 0), (0, 0), (3, 0)], [(0, 6), (0, 2)]]
)
def test_missing_modalities_take_the_same_path(samples: list[Sample], dtype: torch.dtype) -> None:
    model = make_model(dtype)
    called: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    batch, exchange = pack(samples, dtype)
    grads = gradients(model, batch, exchange)
    for hook in hooks:
        hook.remove()
    never_called = {"double_blocks", "single_blocks"}
    never_called |= {f"double_blocks.{i}.{s}" for i in range(2) for s in ("text", "image")}
    assert set(called) == {name for name, _ in model.named_modules()} - never_called
    no_image, no_text = not batch.is_image.any(), not (~batch.is_image).any()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        of_text = name.startswith("text_in") or ".text." in name
        of_image = name.startswith("image_in") or ".image." in name
        if no_image or (no_text and of_text):
            assert not grad.any(), name
        elif of_image or name.startswith("single_blocks"):
            assert grad.any(), name


def test_timesteps_and_rotations_keep_their_precision_in_a_bf16_model() -> None:
    model = make_model(torch.bfloat16)
    pooled = torch.zeros(2, CONFIG.vec_dim, dtype=torch.bfloat16)
    vec = model.condition(torch.tensor([0.999, 1.0]), pooled)
    assert not torch.equal(vec[0], vec[1])
    layout = model.layout(torch.ones(3).bool(), torch.zeros(3, 3), torch.zeros(3).long())
    assert layout.cos.dtype == layout.sin.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scalars_are_embedded_by_their_own_value(dtype: torch.dtype) -> None:
    """A thousand times 100 is beyond float16, and bfloat16 has no 3500."""
    scalars = torch.tensor([0.0, 0.3, 0.999, 1.0, 3.5, 7.3, 100.0], dtype=dtype)
    frequencies = (-math.log(10_000.0) / 128 * torch.arange(128.0)).exp()
    angles = 1000.0 * scalars.double()[:, None] * frequencies.double()
    wanted = torch.cat([angles.cos(), angles.sin()], dim=1)
    found = sinusoid(scalars)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=0.0, atol=5e-3)


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_row_gathers_have_right_first_and_second_gradients(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slot = torch.randint(0, 3, (num_tokens,), generator=generator)
    order = torch.randperm(num_tokens, generator=generator)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, table = leaf(num_tokens, 2), leaf(4, 2)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda t: look_up(t, slot), (table,)),
        (lambda a, t: scale_rows(a, t, slot), (x, table)),
        (lambda a: permute_rows(a, order, order.argsort()), (x,)),
    ]
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 5, 4096])
def test_both_row_sums_are_right_to_the_last_rounding(num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(num_tokens, 16, generator=generator).to(dtype)
    slot = torch.randint(0, 3, (num_tokens,), generator=generator)
    expected = torch.zeros(4, 16, dtype=torch.float64).index_add(0, slot, values.double())
    for row_sum in (sum_rows, sum_rows_by_matmul):
        error = (row_sum(values, slot, 4).double() - expected).norm()
        assert error <= torch.finfo(dtype).eps * expected.norm()


def test_scale_rows_keeps_no_gathered_rows() -> None:
    saved: list[torch.Size] = []

    def record(x: Tensor) -> Tensor:
        saved.append(x.shape)
        return x

    x, table = torch.randn(50, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        scale_rows(x, table, torch.arange(50) // 25)
    assert saved == [(50, 8), (2, 8), (50,)]


def test_init_is_the_same_for_a_seed_and_dtype() -> None:
    torch.manual_seed(1)
    first, second = make_model(), make_model(torch.bfloat16)
    kinds = {type(m) for m in first.modules() if list(m.parameters(recurse=False))}
    assert kinds == {nn.Linear, nn.RMSNorm}, "init_weights reaches these alone"
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    first.init_weights(1)
    assert not torch.equal(first.image_in.weight.bfloat16(), second.image_in.weight)


def test_flux_has_its_twelve_billion_parameters() -> None:
    with torch.device("meta"):
        model = MMDiT(MMDiTConfig.flux())
    assert 11.8e9 < sum(p.numel() for p in model.parameters()) < 12.0e9
