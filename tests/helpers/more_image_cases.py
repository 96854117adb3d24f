"""Tiny models that make images, like Flux or with experts, and their inputs."""

import torch
from torch import nn

from tests.helpers.model_case import (
    CHANNELS,
    TEXT_DIM,
    Case,
    Draw,
    Inputs,
    Makes,
    built,
    grid_ids,
)

# Odd lengths, fewer tokens than ranks, heads that do not divide, padded texts.
CASES = [
    Case("longcat", 4, 1, 3, (1, 1)),
    Case("longcat", 5, 2, 7, (3, 5)),
    Case("ovis", 4, 1, 1, (1, 2)),
    Case("ovis", 5, 2, 7, (3, 5)),
    Case("bria", 4, 1, 3, (1, 3)),
    Case("bria", 5, 2, 7, (3, 5), ("controlnet",)),
    Case("ernie", 4, 1, 2, (1, 1)),
    Case("ernie", 5, 2, 7, (3, 5), ("lengths",)),
    Case("hidream", 4, 1, 3, (1, 1)),
    Case("hidream", 5, 1, 5, (3, 3), ("packed",)),
    Case("hidream", 5, 2, 7, (3, 5)),
]


def _like_flux(name: str, case: Case) -> nn.Module:
    return built(
        name,
        case,
        in_channels=CHANNELS,
        num_single_layers=2,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )


def _longcat(case: Case) -> nn.Module:
    return _like_flux("LongCatImageTransformer2DModel", case)


def _ovis(case: Case) -> nn.Module:
    return _like_flux("OvisImageTransformer2DModel", case)


def _bria(case: Case) -> nn.Module:
    return _like_flux("BriaTransformer2DModel", case)


def _ernie(case: Case) -> nn.Module:
    return built(
        "ErnieImageTransformer2DModel",
        case,
        hidden_size=16 * case.heads,
        ffn_hidden_size=48,
        text_in_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
    )


def _hidream(case: Case) -> nn.Module:
    return built(
        "HiDreamImageTransformer2DModel",
        case,
        patch_size=2,
        num_single_layers=1,
        caption_channels=[TEXT_DIM, 24],
        text_emb_dim=16,
        num_routed_experts=3,
        axes_dims_rope=(4, 6, 6),
        max_resolution=(12, 12),
        llama_layers=[0, 2, 1],
    )


def _like_flux_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_ids": grid_ids(case.grid),
        "txt_ids": torch.zeros(case.text, 3),
    }
    if "controlnet" in case.options:
        inputs["controlnet_block_samples"] = [draw(case.batch, tokens, 16 * case.heads)]
    return inputs


def _ernie_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    lengths = torch.full((case.batch,), case.text)
    if "lengths" in case.options:  # padded at the end
        lengths[0] = case.text // 2
    return {
        "hidden_states": draw(case.batch, CHANNELS, rows, columns),
        "timestep": draw(case.batch).abs(),
        "text_bth": draw(case.batch, case.text, TEXT_DIM),
        "text_lens": lengths,
    }


def _hidream_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    tokens = rows * columns
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, 2 * rows, 2 * columns),
        "timesteps": draw(case.batch).abs() * 100,
        "encoder_hidden_states_t5": draw(case.batch, case.text, TEXT_DIM),
        "encoder_hidden_states_llama3": draw(3, case.batch, 4, 24),
        "pooled_embeds": draw(case.batch, 16),
    }
    if "packed" in case.options:
        inputs["hidden_states"] = draw(case.batch, tokens, 4 * CHANNELS)
        inputs["hidden_states_masks"] = (draw(case.batch, tokens) < 0.5).to(draw.dtype)
        inputs["img_ids"] = grid_ids(case.grid).expand(case.batch, -1, -1)
        inputs["img_sizes"] = [case.grid] * case.batch
    return inputs


MODELS: Makes = {
    "bria": (_bria, _like_flux_inputs),
    "ernie": (_ernie, _ernie_inputs),
    "hidream": (_hidream, _hidream_inputs),
    "longcat": (_longcat, _like_flux_inputs),
    "ovis": (_ovis, _like_flux_inputs),
}
