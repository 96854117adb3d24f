"""Tiny models that make images, of the tables that are not of Flux, Qwen-Image, SD3 or Z-Image."""

from functools import partial

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
    key_mask,
)

# Odd lengths, fewer tokens than ranks, heads that do not divide, padded texts.
CASES = [
    Case("chroma", 5, 2, 7, (3, 5), ("mask",)),
    Case("chroma", 4, 1, 3, (1, 3), ("controlnet",)),
    Case("aura_flow", 5, 2, 7, (3, 5)),
    Case("cogview4", 5, 2, 7, (3, 5)),
    Case("cogview4", 4, 1, 3, (1, 3), ("rotary",)),
    Case("hunyuan_image", 5, 2, 7, (3, 5), ("mask",)),
    Case("hunyuan_image", 4, 1, 5, (1, 3), ("mask", "two texts", "guidance")),
    Case("lumina2", 6, 1, 7, (3, 5)),
    Case("lumina2", 4, 2, 9, (3, 3), ("mask",)),
    Case("krea2", 6, 2, 7, (3, 5), ("mask",)),
    Case("krea2", 4, 1, 3, (1, 3)),
    Case("ideogram4", 5, 2, 7, (3, 5), ("packed",)),
    Case("ideogram4", 4, 1, 2, (1, 1), ("token_times",)),
    Case("pixart", 5, 2, 7, (3, 5), ("mask",)),
    Case("pixart", 4, 1, 3, (1, 2)),
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


def _chroma(case: Case) -> nn.Module:
    return built(
        "ChromaTransformer2DModel",
        case,
        num_single_layers=2,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=24,
        approximator_layers=1,
    )


def _aura_flow(case: Case) -> nn.Module:
    return built(
        "AuraFlowTransformer2DModel",
        case,
        sample_size=16,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=16 * case.heads,
        pos_embed_max_size=64,
    )


def _cogview4(case: Case) -> nn.Module:
    return built(
        "CogView4Transformer2DModel",
        case,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=16,
        condition_dim=8,
    )


def _hunyuan_image(case: Case) -> nn.Module:
    return built(
        "HunyuanImageTransformer2DModel",
        case,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=24 if "two texts" in case.options else None,
        guidance_embeds="guidance" in case.options,
        rope_axes_dim=(8, 8),
    )


def _lumina2(case: Case) -> nn.Module:
    return built(
        "Lumina2Transformer2DModel",
        case,
        sample_size=16,
        hidden_size=16 * case.heads,
        num_refiner_layers=2,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(32, 16, 16),
        cap_feat_dim=TEXT_DIM,
    )


def _krea2(case: Case) -> nn.Module:
    return built(
        "Krea2Transformer2DModel",
        case,
        num_key_value_heads=2,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=TEXT_DIM,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=4,
        text_intermediate_size=48,
        axes_dims_rope=(4, 6, 6),
    )


def _ideogram4(case: Case) -> nn.Module:
    return built(
        "Ideogram4Transformer2DModel",
        case,
        intermediate_size=48,
        adaln_dim=16,
        llm_features_dim=TEXT_DIM,
        mrope_section=(4, 2, 2),
    )


def _pixart(case: Case) -> nn.Module:
    return built(
        "PixArtTransformer2DModel",
        case,
        norm_num_groups=1,
        cross_attention_dim=16 * case.heads,
        sample_size=16,
        caption_channels=TEXT_DIM,
        use_additional_conditions=False,
    )


def _chroma_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_ids": grid_ids(case.grid),
        "txt_ids": torch.zeros(case.text, 3),
    }
    if "mask" in case.options:  # of the whole sequence
        image = torch.ones(case.batch, tokens, dtype=torch.bool)
        inputs["attention_mask"] = torch.cat([key_mask(case, draw), image], dim=1)
    if "controlnet" in case.options:
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            inputs[name] = [draw(case.batch, tokens, 16 * case.heads)]
    return inputs


def _latents(case: Case, draw: Draw, patch: int = 2) -> Inputs:
    rows, columns = (patch * size for size in case.grid)
    return {
        "hidden_states": draw(case.batch, CHANNELS, rows, columns),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
    }


def _cogview4_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw)
    for name in ("original_size", "target_size", "crop_coords"):
        inputs[name] = draw(case.batch, 2).abs()
    if "rotary" in case.options:
        angles = draw(case.grid[0] * case.grid[1], 16)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return inputs


def _hunyuan_image_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw, patch=1)
    inputs["encoder_attention_mask"] = key_mask(case, draw)
    if "two texts" in case.options:
        inputs["encoder_hidden_states_2"] = draw(case.batch, case.text, 24)
        inputs["encoder_attention_mask_2"] = key_mask(case, draw)
    if "guidance" in case.options:
        inputs["guidance"] = draw(case.batch).abs()
    return inputs


def _lumina2_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw)
    mask = torch.ones(case.batch, case.text, dtype=torch.long)
    if "mask" in case.options:  # padded at the end
        mask[0, case.text // 2 :] = 0
    return {**inputs, "encoder_attention_mask": mask}


def _krea2_inputs(case: Case, draw: Draw) -> Inputs:
    image = grid_ids(case.grid)
    inputs: Inputs = {  # positions first: their length is known from what follows
        "position_ids": torch.cat([torch.zeros(case.text, 3), image]),
        "hidden_states": draw(case.batch, len(image), CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, 3, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
    }
    if "mask" in case.options:
        inputs["encoder_attention_mask"] = key_mask(case, draw)
    return inputs


def _ideogram4_inputs(case: Case, draw: Draw) -> Inputs:
    from diffusers.models.transformers import transformer_ideogram4 as module

    image = case.grid[0] * case.grid[1]
    tokens = case.text + image
    indicator = torch.full((case.batch, tokens), module.OUTPUT_IMAGE_INDICATOR)
    indicator[:, : case.text] = module.LLM_TOKEN_INDICATOR
    segments = torch.zeros(case.batch, tokens, dtype=torch.long)
    if "packed" in case.options:  # two samples in a row
        segments[:, tokens // 3 :] = 1
    times = (case.batch, tokens) if "token_times" in case.options else (case.batch,)
    return {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "timestep": draw(*times).abs(),
        "encoder_hidden_states": draw(case.batch, tokens, TEXT_DIM),
        "position_ids": torch.arange(tokens)[None, :, None].expand(case.batch, -1, 3),
        "segment_ids": segments,
        "indicator": indicator,
    }


def _pixart_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw)
    if "mask" in case.options:
        inputs["encoder_attention_mask"] = key_mask(case, draw).to(draw.dtype)
    return inputs


def _like_flux(name: str, case: Case) -> nn.Module:
    return built(
        name,
        case,
        in_channels=CHANNELS,
        num_single_layers=2,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )


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
    "aura_flow": (_aura_flow, _latents),
    "bria": (partial(_like_flux, "BriaTransformer2DModel"), _like_flux_inputs),
    "chroma": (_chroma, _chroma_inputs),
    "cogview4": (_cogview4, _cogview4_inputs),
    "ernie": (_ernie, _ernie_inputs),
    "hidream": (_hidream, _hidream_inputs),
    "hunyuan_image": (_hunyuan_image, _hunyuan_image_inputs),
    "ideogram4": (_ideogram4, _ideogram4_inputs),
    "krea2": (_krea2, _krea2_inputs),
    "longcat": (partial(_like_flux, "LongCatImageTransformer2DModel"), _like_flux_inputs),
    "lumina2": (_lumina2, _lumina2_inputs),
    "ovis": (partial(_like_flux, "OvisImageTransformer2DModel"), _like_flux_inputs),
    "pixart": (_pixart, _pixart_inputs),
}
