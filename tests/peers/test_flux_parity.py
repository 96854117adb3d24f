"""Our packed model against diffusers' `FluxTransformer2DModel`, with its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.models import LocalExchange, MMDiT, MMDiTConfig, PackedBatch

pytest.importorskip("diffusers")

TEXT_DIM, VEC_DIM, CHANNELS = 32, 32, 12
SIZES = [(7, (4, 6)), (3, (5, 2)), (12, (1, 9))]  # text tokens, image height and width

# ours -> theirs; a tuple means concatenated rows.
TOP = {
    "image_in": "x_embedder",
    "text_in": "context_embedder",
    "time_in.linear_in": "time_text_embed.timestep_embedder.linear_1",
    "time_in.linear_out": "time_text_embed.timestep_embedder.linear_2",
    "vec_in.linear_in": "time_text_embed.text_embedder.linear_1",
    "vec_in.linear_out": "time_text_embed.text_embedder.linear_2",
    "final.linear": "proj_out",
}
GUIDANCE = {
    "guidance_in.linear_in": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.linear_out": "time_text_embed.guidance_embedder.linear_2",
}
DOUBLE = {
    "image.modulation.linear": "norm1.linear",
    "image.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image.heads.q_norm": "attn.norm_q",
    "image.heads.k_norm": "attn.norm_k",
    "image.out": "attn.to_out.0",
    "image.mlp_in": "ff.net.0.proj",
    "image.mlp_out": "ff.net.2",
    "text.modulation.linear": "norm1_context.linear",
    "text.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text.heads.q_norm": "attn.norm_added_q",
    "text.heads.k_norm": "attn.norm_added_k",
    "text.out": "attn.to_add_out",
    "text.mlp_in": "ff_context.net.0.proj",
    "text.mlp_out": "ff_context.net.2",
}
SINGLE = {
    "modulation.linear": "norm.linear",
    "linear_in": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "heads.q_norm": "attn.norm_q",
    "heads.k_norm": "attn.norm_k",
    "linear_out": "proj_out",
}


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


def make_ours(theirs: Any, guidance: bool) -> MMDiT:
    config = MMDiTConfig(
        in_channels=CHANNELS,
        text_dim=TEXT_DIM,
        vec_dim=VEC_DIM,
        d_model=64,
        num_heads=4,
        num_double=2,
        num_single=2,
        axes_dim=(4, 6, 6),
        guidance=guidance,
    )
    model = MMDiT(config)
    model.load_state_dict(translate(theirs.state_dict(), guidance))
    return model


def translate(theirs: dict[str, Tensor], guidance: bool) -> dict[str, Tensor]:
    """Their state under our names; refuses to leave any of their tensors out."""
    left = dict(theirs)
    names: dict[str, tuple[str, ...]] = {}
    for prefix, their_prefix, table in (
        ("", "", TOP | (GUIDANCE if guidance else {})),
        *((f"double_blocks.{i}.", f"transformer_blocks.{i}.", DOUBLE) for i in range(2)),
        *((f"single_blocks.{i}.", f"single_transformer_blocks.{i}.", SINGLE) for i in range(2)),
    ):
        for ours, sources in table.items():
            sources = (sources,) if isinstance(sources, str) else sources
            names[prefix + ours] = tuple(their_prefix + source for source in sources)
    ours_state: dict[str, Tensor] = {}
    for ours, sources in names.items():
        for kind in ("weight", "bias"):
            if f"{sources[0]}.{kind}" in left:
                parts = [left.pop(f"{source}.{kind}") for source in sources]
                ours_state[f"{ours}.{kind}"] = torch.cat(parts)
    for kind in ("weight", "bias"):  # they store scale before shift, here only
        scale, shift = left.pop(f"norm_out.linear.{kind}").chunk(2)
        ours_state[f"final.modulation.linear.{kind}"] = torch.cat([shift, scale])
    assert not left
    return ours_state


def make_sample(index: int, guidance: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    num_text, (height, width) = SIZES[index]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pos = torch.zeros(num_text + height * width, 3)
    pos[num_text:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return {
        "image_tokens": draw(height * width, CHANNELS),
        "text_tokens": draw(num_text, TEXT_DIM),
        "is_image": torch.arange(num_text + height * width) >= num_text,
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
        out = run_ours(make_ours(theirs, guidance), samples)
    assert expected.std() > 0.1
    assert (out - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("guidance", [False, True])
def test_output_and_gradients_equal_diffusers_in_float64(
    guidance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs computes angles and rotations in float32: here its `.float()` means float64."""
    theirs = make_theirs(guidance).double()
    ours = make_ours(theirs, guidance).double()
    samples = [make_sample(i, guidance, torch.float64) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected = torch.cat([run_theirs(theirs, sample) for sample in samples])
        expected.square().sum().backward()
    out = run_ours(ours, samples)
    out.square().sum().backward()
    assert (out - expected).norm() <= 1e-10 * expected.norm()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, grad in translate(wanted, guidance).items():
        ours_grad = ours.get_parameter(name).grad
        assert ours_grad is not None and grad.norm() > 0
        assert (ours_grad - grad).norm() <= 1e-10 * grad.norm(), name
