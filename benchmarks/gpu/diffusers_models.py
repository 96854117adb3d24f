"""The FLUX transformer of diffusers with the sizes of ours, and its inputs."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bascule.models import MMDiTConfig
from bascule.workload.codes import SampleShape
from gpu.measuring import Setting
from gpu.shapes import made_on


def no_diffusers() -> str | None:
    """Why nothing of diffusers can be measured; None if it can."""
    return None if find_spec("diffusers") else "diffusers is not installed: left out"


def flux_of(config: MMDiTConfig, setting: Setting) -> Any:
    """Random weights, as torch's layers draw them."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    frames, rows, columns = config.axes_dim
    with made_on(setting):
        return FluxTransformer2DModel(
            in_channels=config.in_channels,
            num_layers=config.num_double,
            num_single_layers=config.num_single,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.num_heads,
            joint_attention_dim=config.text_dim,
            pooled_projection_dim=config.vec_dim,
            axes_dims_rope=(frames, rows, columns),
        )


def flux_inputs(
    sample: SampleShape, num_samples: int, config: MMDiTConfig, setting: Setting
) -> dict[str, Any]:
    """Random inputs for samples of one shape."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=setting.device, dtype=setting.dtype)

    index = torch.arange(sample.image_tokens, device=setting.device)
    in_frame = sample.image_tokens // sample.frames
    rest = index % in_frame
    places = (index // in_frame, rest // sample.grid_width, rest % sample.grid_width)
    return {
        "hidden_states": draw(num_samples, sample.image_tokens, config.in_channels),
        "encoder_hidden_states": draw(num_samples, sample.text_tokens, config.text_dim),
        "pooled_projections": draw(num_samples, config.vec_dim),
        # Theirs multiplies it by 1,000 in the dtype of the model, in which 500 is a number.
        "timestep": torch.full((num_samples,), 0.5, device=setting.device, dtype=setting.dtype),
        "img_ids": torch.stack(places, dim=-1).float(),
        "txt_ids": torch.zeros(sample.text_tokens, 3, device=setting.device),
        "return_dict": False,
    }
