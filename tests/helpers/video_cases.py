"""Tiny models that make videos, with random weights, and their inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import wan_cases
from tests.helpers.model_case import CHANNELS, TEXT_DIM, Case, Draw, Inputs, Makes, built

NUM_FRAMES, NUM_AUDIO = 3, 7

# Odd lengths, fewer tokens than ranks, heads that do not divide.
CASES = [
    *wan_cases.CASES,
    Case("cogvideox", 4, 1, 8, (4, 4)),
    Case("cogvideox", 5, 2, 7, (3, 5), ("1.5",)),
    Case("cogvideox", 4, 2, 1, (1, 3), ("sincos",)),
    Case("cogvideox", 4, 1, 7, (3, 5), ("image", "learned")),
    Case("hunyuan", 5, 2, 7, (3, 5)),
    Case("hunyuan", 4, 1, 16, (4, 4), ("guidance", "token_replace")),
    Case("hunyuan", 4, 2, 3, (1, 1), ("token_replace",)),
    Case("hunyuan", 4, 1, 1, (1, 2), ("latent_concat",)),
    Case("hunyuan1.5", 5, 2, 7, (3, 5), ("image",)),
    Case("hunyuan1.5", 4, 1, 5, (1, 1), ("meanflow",)),
    Case("ltx", 5, 2, 7, (3, 5), ("token_times",)),
    Case("ltx", 4, 1, 3, (1, 1), ("coordinates",)),
    Case("ltx2", 5, 2, 7, (3, 5), ("token_times", "guided")),
    Case("ltx2", 4, 1, 3, (1, 1), ("2.3", "coordinates")),
    Case("ltx2", 4, 2, 3, (3, 3), ("2.3", "isolated", "references")),
    Case("minimax", 5, 1, 7, (3, 5)),
    Case("minimax", 4, 2, 3, (1, 1)),
]


def _cogvideox(case: Case) -> nn.Module:
    learned: dict[str, Any] = {
        "use_learned_positional_embeddings": True,
        "sample_height": 2 * case.grid[0],
        "sample_width": 2 * case.grid[1],
        "sample_frames": 9,
    }
    return built(
        "CogVideoXTransformer3DModel",
        case,
        in_channels=2 * CHANNELS if "image" in case.options else CHANNELS,
        time_embed_dim=16,
        ofs_embed_dim=16 if "1.5" in case.options else None,
        text_embed_dim=TEXT_DIM,
        patch_size_t=2 if "1.5" in case.options else None,
        max_text_seq_length=case.text,
        use_rotary_positional_embeddings="sincos" not in case.options,
        **(learned if "learned" in case.options else {}),
    )


def _hunyuan(case: Case) -> nn.Module:
    conditions = [one for one in ("token_replace", "latent_concat") if one in case.options]
    return built(
        "HunyuanVideoTransformer3DModel",
        case,
        num_single_layers=2,
        num_refiner_layers=1,
        guidance_embeds="guidance" in case.options,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
        image_condition_type=conditions[0] if conditions else None,
    )


def _hunyuan15(case: Case) -> nn.Module:
    return built(
        "HunyuanVideo15Transformer3DModel",
        case,
        num_refiner_layers=1,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=TEXT_DIM,
        image_embed_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
        use_meanflow="meanflow" in case.options,
    )


def _ltx(case: Case) -> nn.Module:
    return built(
        "LTXVideoTransformer3DModel",
        case,
        attention_head_dim=8,
        cross_attention_dim=8 * case.heads,
        caption_channels=TEXT_DIM,
    )


def _ltx2(case: Case) -> nn.Module:
    newer = "2.3" in case.options
    return built(
        "LTX2VideoTransformer3DModel",
        case,
        attention_head_dim=8,
        cross_attention_dim=8 * case.heads,
        gated_attn=newer,
        cross_attn_mod=newer,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=case.heads,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=4 * case.heads,
        audio_gated_attn=newer,
        audio_cross_attn_mod=newer,
        caption_channels=TEXT_DIM,
        rope_type="split" if newer else "interleaved",
        perturbed_attn="guided" in case.options,
        use_keyframes_abs_pos_embedding=newer,
    )


def _minimax(case: Case) -> nn.Module:
    return built(
        "MiniMaxH3Transformer3DModel",
        case,
        hidden_size=24,
        num_refiner_layers=1,
        ffn_dim=32,
        audio_in_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def _cogvideox_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    frames = NUM_FRAMES if "learned" in case.options else 2
    depth = 2 if "1.5" in case.options else 1  # frames of a token
    channels = 2 * CHANNELS if "image" in case.options else CHANNELS
    inputs: Inputs = {
        "hidden_states": draw(case.batch, frames * depth, channels, 2 * rows, 2 * columns),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs() * 100,
    }
    if "sincos" not in case.options:
        angles = draw(frames * rows * columns, 16)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    if "1.5" in case.options:
        inputs["ofs"] = draw(1).abs()
    return inputs


def _mask(case: Case, draw: Draw, length: int) -> Tensor:
    """(B, length), each row with another number of ones first, at least one."""
    counts = 1 + torch.arange(case.batch) * 2 % length
    return (torch.arange(length) < counts.clamp(max=length)[:, None]).to(draw.dtype)


def _hunyuan_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, NUM_FRAMES, 2 * rows, 2 * columns),
        "timestep": draw(case.batch).abs() * 100,
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "encoder_attention_mask": _mask(case, draw, case.text).long(),
        "pooled_projections": draw(case.batch, TEXT_DIM),
    }
    if "guidance" in case.options:
        inputs["guidance"] = draw(case.batch).abs() * 1000
    return inputs


def _hunyuan15_inputs(case: Case, draw: Draw) -> Inputs:
    images = draw(case.batch, 3, TEXT_DIM)
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, NUM_FRAMES, *case.grid),
        "timestep": draw(case.batch).abs() * 100,
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "encoder_attention_mask": _mask(case, draw, case.text),
        "encoder_hidden_states_2": draw(case.batch, 3, TEXT_DIM),
        "encoder_attention_mask_2": _mask(case, draw, 3),
        "image_embeds": images if "image" in case.options else torch.zeros_like(images),
    }
    if "meanflow" in case.options:
        inputs["timestep_r"] = draw(case.batch).abs() * 100
    return inputs


def _ltx_inputs(case: Case, draw: Draw) -> Inputs:
    (rows, columns), times = case.grid, (case.batch,)
    tokens = NUM_FRAMES * rows * columns
    if "token_times" in case.options:
        times = case.batch, tokens
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(*times).abs() * 100,
        "encoder_attention_mask": _mask(case, draw, case.text),
    }
    if "coordinates" in case.options:
        inputs["video_coords"] = draw(case.batch, 3, tokens).abs() * 9
    else:
        sizes = {"num_frames": NUM_FRAMES, "height": rows, "width": columns}
        inputs |= {**sizes, "rope_interpolation_scale": (0.3, 32, 32)}
    return inputs


def _ltx2_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _ltx_inputs(case, draw)
    tokens = inputs["hidden_states"].shape[1]
    newer = "2.3" in case.options
    inputs |= {
        "audio_hidden_states": draw(case.batch, NUM_AUDIO, CHANNELS),
        "audio_encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "audio_encoder_attention_mask": inputs["encoder_attention_mask"],
        "audio_timestep": draw(case.batch, *([NUM_AUDIO] if newer else [])).abs() * 100,
        "isolate_modalities": "isolated" in case.options,
        "use_cross_timestep": newer,
    }
    if "coordinates" in case.options:
        inputs["video_coords"] = draw(case.batch, 3, tokens, 2).abs() * 9
        inputs["audio_coords"] = draw(case.batch, 1, NUM_AUDIO, 2).abs() * 9
    else:
        inputs["audio_num_frames"] = NUM_AUDIO
        del inputs["rope_interpolation_scale"]
    if newer:
        inputs["sigma"] = draw(case.batch).abs() * 100
        inputs["video_keyframes_mask"] = draw(case.batch, tokens, 1)
    if "guided" in case.options:  # the second sample without attention in the first block
        inputs["spatio_temporal_guidance_blocks"] = [0]
        inputs["perturbation_mask"] = torch.arange(case.batch).eq(0).to(draw.dtype)
    if "references" in case.options:
        inputs["video_self_attention_mask"] = 1 - draw(case.batch, tokens, tokens).abs() / 10_000
    return inputs


def _minimax_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    counts = {1: case.text, 0: NUM_FRAMES * rows * columns, 2: NUM_AUDIO}  # by tag
    order = torch.randperm(sum(counts.values()), generator=draw.generator)
    places = dict(zip(counts, order.split(list(counts.values())), strict=True))
    tags = torch.empty_like(order)
    for tag, where in places.items():
        tags[where] = tag
    return {
        "hidden_states": draw(case.batch, counts[0], 4 * CHANNELS),
        "audio_hidden_states": draw(case.batch, counts[2], CHANNELS),
        "encoder_hidden_states": draw(case.batch, counts[1], TEXT_DIM),
        "timestep": draw(2).sigmoid(),
        "timestep_indices": torch.arange(len(order)) % 2,
        "token_tags": tags,
        "position_ids": draw(len(order), 3),
        "video_indices": places[0],
        "audio_indices": places[2],
        "text_indices": places[1],
    }


MODELS: Makes = {
    **wan_cases.MODELS,
    "cogvideox": (_cogvideox, _cogvideox_inputs),
    "hunyuan": (_hunyuan, _hunyuan_inputs),
    "hunyuan1.5": (_hunyuan15, _hunyuan15_inputs),
    "ltx": (_ltx, _ltx_inputs),
    "ltx2": (_ltx2, _ltx2_inputs),
    "minimax": (_minimax, _minimax_inputs),
}
