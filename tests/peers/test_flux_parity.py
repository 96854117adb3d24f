"""Our packed model against diffusers' `FluxTransformer2DModel`, with its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.diffusers import config_from_diffusers, weights_from_diffusers, weights_to_diffusers
from bascule.errors import ConfigError
from bascule.models import LocalExchange, MMDiT, MMDiTConfig, PackedBatch

pytest.importorskip("diffusers")

TEXT_DIM, VEC_DIM, CHANNELS = 32, 32, 12
SIZES = [(7, (4, 6)), (3, (5, 2)), (12, (1, 9))]  # text tokens, image height and width


def make_theirs(guidance: bool) -> Any:
    """A tiny FLUX, with no parameter left at zero or one that could hide a missing term."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=VEC_DIM,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
            draw = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(draw + 1 if ".norm_" in name and parameter.ndim == 1 else draw)
    return model.eval()


def make_ours(theirs: Any) -> MMDiT:
    config = config_from_diffusers(theirs.config)
    model = MMDiT(config)
    model.load_state_dict(weights_from_diffusers(theirs.state_dict(), config))
    return model


def make_sample(index: int, guidance: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    num_text, (height, width) = SIZES[index]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    is_image = torch.randperm(num_text + height * width, generator=generator) >= num_text
    pos = torch.zeros(len(is_image), 3)
    pos[is_image, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    return {
        "image_tokens": draw(height * width, CHANNELS),
        "text_tokens": draw(num_text, TEXT_DIM),
        "is_image": is_image,
        "pos": pos,
        "timestep": torch.rand(1, generator=generator).to(dtype),
        "pooled": draw(1, VEC_DIM),
    } | ({"guidance": torch.tensor([3.5 + index], dtype=dtype)} if guidance else {})


def run_theirs(model: Any, sample: dict[str, Tensor]) -> Tensor:
    is_image = sample["is_image"]
    return model(
        hidden_states=sample["image_tokens"][None],
        encoder_hidden_states=sample["text_tokens"][None],
        pooled_projections=sample["pooled"],
        timestep=sample["timestep"],
        guidance=sample.get("guidance"),
        img_ids=sample["pos"][is_image],
        txt_ids=sample["pos"][~is_image],
        return_dict=False,
    )[0][0]


def run_ours(model: MMDiT, samples: list[dict[str, Tensor]]) -> Tensor:
    fields = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    exchange = LocalExchange([len(sample["pos"]) for sample in samples])
    return model(PackedBatch(**fields), exchange)[fields["is_image"]]


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize("indices", [[0], [1], [0, 1], [0, 1, 2]])
def test_packed_output_equals_diffusers_one_by_one(indices: list[int], guidance: bool) -> None:
    theirs = make_theirs(guidance)
    samples = [make_sample(i, guidance, torch.float32) for i in indices]
    with torch.no_grad():
        expected = torch.cat([run_theirs(theirs, sample) for sample in samples])
        out = run_ours(make_ours(theirs), samples)
    assert expected.std() > 0.1
    assert (out - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("guidance", [False, True])
def test_output_and_gradients_equal_diffusers_in_float64(
    guidance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs computes angles and rotations in float32: here its `.float()` means float64."""
    theirs = make_theirs(guidance).double()
    ours = make_ours(theirs).double()
    samples = [make_sample(i, guidance, torch.float64) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected = torch.cat([run_theirs(theirs, sample) for sample in samples])
        expected.square().sum().backward()
    out = run_ours(ours, samples)
    out.square().sum().backward()
    assert (out - expected).norm() <= 1e-10 * expected.norm()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, grad in weights_from_diffusers(wanted, ours.config).items():
        ours_grad = ours.get_parameter(name).grad
        assert ours_grad is not None and grad.norm() > 0
        assert (ours_grad - grad).norm() <= 1e-10 * grad.norm(), name


@pytest.mark.parametrize("guidance", [False, True])
def test_weights_come_back_bit_for_bit(guidance: bool) -> None:
    theirs = make_theirs(guidance)
    ours = make_ours(theirs)
    back = weights_to_diffusers(ours.state_dict(), ours.config)
    wanted = theirs.state_dict()
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
    theirs.load_state_dict(back)


def test_config_of_flux_is_that_of_diffusers() -> None:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    with torch.device("meta"):
        config = FluxTransformer2DModel(guidance_embeds=True).config
    assert config_from_diffusers(config) == MMDiTConfig.flux()


def test_other_weights_are_refused() -> None:
    theirs = make_theirs(False)
    config, state = config_from_diffusers(theirs.config), theirs.state_dict()
    ours = weights_from_diffusers(state, config)
    one_less = {name: x for name, x in state.items() if name != "proj_out.bias"}
    with pytest.raises(ConfigError, match=r"1 are missing \['proj_out.bias'\], and 0"):
        weights_from_diffusers(one_less, config)
    with pytest.raises(ConfigError, match=r"0 are missing \[\], and 1 are unknown \['lora'\]"):
        weights_from_diffusers(state | {"lora": torch.ones(1)}, config)
    with pytest.raises(ConfigError, match="1 are missing"):
        weights_to_diffusers({k: x for k, x in ours.items() if k != "final.linear.bias"}, config)
    with pytest.raises(ConfigError, match=r"no config of a FluxTransformer2DModel.*in_channels"):
        config_from_diffusers({"num_attention_heads": 2, "attention_head_dim": 4})
    with pytest.raises(ConfigError, match="out_channels=5"):
        config_from_diffusers(dict(theirs.config) | {"out_channels": 5})
