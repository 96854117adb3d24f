"""Measure what balance is worth to the models of diffusers that people train now."""

import os
from typing import Any

import torch
from measuring import on_ranks
from torch import Tensor, nn
from training import (
    CHANNELS,
    HEAD_DIM,
    HEADS,
    TEXT,
    TEXT_DIM,
    WIDTH,
    Loads,
    Sample,
    gains,
    train_models,
)

from bascule.comm.items import leaves_of

GRIDS = {
    "uneven": ([(24, 32), (32, 24), (28, 28), (32, 32)], [(12, 14), (14, 12), (16, 16), (14, 14)])
}
TIMED_GRIDS = (8, 14, 22, 32)
AUDIO = 8  # tokens, of which every video has as many


def models(*, rounds: int = 8, quick: bool = False) -> dict[str, Any]:
    """Measure the gain of BalancedModel in MiniMax-H3, LTX-2, HunyuanVideo 1.5, Flux2 and others.

    Five minutes. Tiny configurations of diffusers' classes (width 128), float32, in DDP on two
    ranks of one thread. One rank loads four large samples of unlike shapes, the other four small
    ones; with balance they change ranks (g1n2). Predicted is what a plan says by a cost that was
    fitted to the seconds of single samples.
    """
    load_before = os.getloadavg()
    loads = Loads(GRIDS, ("g1n2",), TIMED_GRIDS)
    cases = on_ranks(train_models, 2 if quick else rounds, MODELS, loads)
    return {"load_before": load_before} | gains(cases)


def _loss(output: Any, batch: Sample) -> Tensor:
    """Return (batch,): each output's own square, as much work as any target's."""
    if isinstance(output, list):  # of Z-Image, one for each sample
        return torch.stack(output).square().flatten(1).mean(1)
    return torch.stack([x.square().flatten(1).mean(1) for x in leaves_of(output)]).sum(0)


def _made(name: str, **sizes: Any) -> nn.Module:
    import diffusers

    usual = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "num_layers": 4}
    return getattr(diffusers, name)(**usual | {"in_channels": CHANNELS} | sizes)


def _text(width: int = TEXT_DIM) -> Tensor:
    return torch.randn(1, TEXT, width)


def _minimax() -> nn.Module:
    return _made(
        "MiniMaxH3Transformer3DModel",
        hidden_size=WIDTH,
        num_refiner_layers=1,
        ffn_dim=4 * WIDTH,
        audio_in_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=32,
        time_embed_hidden_dim=WIDTH,
        time_embed_dim=WIDTH,
        rope_freq_dim=4,
    )


def _minimax_sample(rows: int, columns: int) -> Sample:
    """Return a packed row: text, video, audio."""
    counts = [TEXT, rows * columns, AUDIO]
    text, video, audio = torch.arange(sum(counts)).split(counts)
    return {
        "hidden_states": torch.randn(1, len(video), 4 * CHANNELS),
        "audio_hidden_states": torch.randn(1, AUDIO, CHANNELS),
        "encoder_hidden_states": _text(),
        "timestep": torch.rand(2),
        "timestep_indices": torch.zeros(sum(counts), dtype=torch.long),
        "token_tags": torch.tensor([1, 0, 2]).repeat_interleave(torch.tensor(counts)),
        "position_ids": torch.rand(sum(counts), 3),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
        "num_tokens": sum(counts),
    }


def _ltx2() -> nn.Module:
    return _made(
        "LTX2VideoTransformer3DModel",
        out_channels=CHANNELS,
        cross_attention_dim=WIDTH,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=HEAD_DIM // 2,
        audio_cross_attention_dim=WIDTH // 2,
        caption_channels=TEXT_DIM,
    )


def _ltx2_sample(rows: int, columns: int) -> Sample:
    return {
        "hidden_states": torch.randn(1, rows * columns, CHANNELS),
        "audio_hidden_states": torch.randn(1, AUDIO, CHANNELS),
        "encoder_hidden_states": _text(),
        "audio_encoder_hidden_states": _text(),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "audio_encoder_attention_mask": torch.ones(1, TEXT),
        "timestep": torch.rand(1) * 1000,
        "audio_timestep": torch.rand(1) * 1000,
        "num_frames": 1,
        "height": rows,
        "width": columns,
        "audio_num_frames": AUDIO,
        "num_tokens": rows * columns + AUDIO,
    }


def _hunyuan() -> nn.Module:
    return _made(
        "HunyuanVideo15Transformer3DModel",
        out_channels=CHANNELS,
        num_refiner_layers=1,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=TEXT_DIM,
        image_embed_dim=TEXT_DIM,
        rope_axes_dim=(8, 12, 12),
    )


def _hunyuan_sample(rows: int, columns: int) -> Sample:
    return {
        "hidden_states": torch.randn(1, CHANNELS, 1, rows, columns),
        "timestep": torch.rand(1) * 1000,
        "encoder_hidden_states": _text(),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "encoder_hidden_states_2": _text(),
        "encoder_attention_mask_2": torch.ones(1, TEXT),
        "image_embeds": torch.zeros(1, 4, TEXT_DIM),
        "num_tokens": rows * columns + 2 * TEXT,
    }


def _flux2() -> nn.Module:
    return _made(
        "Flux2Transformer2DModel",
        num_layers=2,
        num_single_layers=4,
        joint_attention_dim=TEXT_DIM,
        timestep_guidance_channels=32,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )


def _flux2_sample(rows: int, columns: int) -> Sample:
    ids = torch.zeros(1, rows * columns, 4)
    ids[0, :, 1:3] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return {
        "hidden_states": torch.randn(1, rows * columns, CHANNELS),
        "encoder_hidden_states": _text(),
        "timestep": torch.rand(1),
        "img_ids": ids,
        "txt_ids": torch.zeros(1, TEXT, 4),
        "num_tokens": rows * columns + TEXT,
    }


def _z_image() -> nn.Module:
    from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=WIDTH,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[8, 12, 12],
        axes_lens=[96, 64, 64],
    )


def _z_image_sample(rows: int, columns: int) -> Sample:
    """Return an image of which a token is two by two; tokens are padded to a multiple of 32."""
    return {
        "x": [torch.randn(CHANNELS, 1, 2 * rows, 2 * columns)],
        "t": torch.rand(1),
        "cap_feats": [_text()[0]],
        "num_tokens": 32 * (-(-rows * columns // 32) + -(-TEXT // 32)),
    }


def _sd3() -> nn.Module:
    return _made(
        "SD3Transformer2DModel",
        sample_size=64,
        patch_size=2,
        out_channels=CHANNELS,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=TEXT_DIM,
        pos_embed_max_size=64,
    )


def _sd3_sample(rows: int, columns: int) -> Sample:
    return {
        "hidden_states": torch.randn(1, CHANNELS, 2 * rows, 2 * columns),
        "encoder_hidden_states": _text(),
        "pooled_projections": torch.randn(1, TEXT_DIM),
        "timestep": torch.rand(1) * 1000,
        "num_tokens": rows * columns + TEXT,
    }


MODELS = {
    "MiniMax-H3": (_minimax, _minimax_sample, _loss),
    "LTX-2": (_ltx2, _ltx2_sample, _loss),
    "HunyuanVideo 1.5": (_hunyuan, _hunyuan_sample, _loss),
    "Flux2": (_flux2, _flux2_sample, _loss),
    "Z-Image": (_z_image, _z_image_sample, _loss),
    "SD3": (_sd3, _sd3_sample, _loss),
}
