"""Tiny models that make videos or sound, with random weights, and their inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import wan_cases
from tests.helpers.model_case import CHANNELS, TEXT_DIM, Case, Draw, Inputs, Makes, built, key_mask

NUM_FRAMES, NUM_AUDIO, NUM_MEMORY, IMAGE_DIM = 3, 7, 3, 16

# Odd lengths, fewer tokens than ranks, heads that do not divide, padded texts.
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
    Case("helios", 4, 1, 3, (1, 1), ("amplified",)),
    Case("helios", 5, 2, 7, (3, 5), ("history",)),
    Case("helios", 4, 1, 3, (2, 3), ("history", "amplified", "one time")),
    Case("mochi", 4, 1, 3, (1, 1)),
    Case("mochi", 5, 2, 7, (3, 5), ("mask",)),
    Case("cosmos", 5, 2, 7, (3, 5), ("learned", "mask")),
    Case("cosmos", 4, 1, 3, (1, 1), ("frame_times", "image", "controlnet", "fps")),
    Case("cosmos3", 4, 1, 3, (1, 1)),
    Case("cosmos3", 4, 2, 7, (3, 5), ("sound",)),
    Case("framepack", 4, 1, 3, (1, 1), ("guidance",)),
    Case("framepack", 5, 2, 7, (3, 5)),
    Case("allegro", 4, 1, 3, (2, 2)),
    Case("allegro", 5, 2, 7, (3, 5), ("mask",)),
    Case("stable_audio", 4, 1, 3, (1, 1), ("plain",)),
    Case("stable_audio", 5, 2, 7, (3, 5), ("mask", "inpaint")),
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


def _helios(case: Case) -> nn.Module:
    return built(
        "HeliosTransformer3DModel",
        case,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=48,
        rope_dim=(4, 6, 6),
        guidance_cross_attn="one time" not in case.options,
        zero_history_timestep="one time" not in case.options,
        is_amplify_history="amplified" in case.options,
    )


def _mochi(case: Case) -> nn.Module:
    return built(
        "MochiTransformer3DModel",
        case,
        pooled_projection_dim=24,
        text_embed_dim=TEXT_DIM,
        time_embed_dim=16,
    )


def _cosmos(case: Case) -> nn.Module:
    return built(
        "CosmosTransformer3DModel",
        case,
        text_embed_dim=TEXT_DIM,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        concat_padding_mask=False,  # which torchvision would resize
        extra_pos_embed_type="learnable" if "learned" in case.options else None,
        controlnet_block_every_n=1,
        img_context_dim_in=IMAGE_DIM if "image" in case.options else None,
        img_context_dim_out=16 * case.heads,
    )


def _cosmos3(case: Case) -> nn.Module:
    return built(
        "Cosmos3OmniTransformer",
        case,
        head_dim=16,
        hidden_size=24,
        intermediate_size=32,
        latent_channel=CHANNELS,
        patch_latent_dim=4 * CHANNELS,
        num_hidden_layers=2,
        num_key_value_heads=2,
        sound_dim=CHANNELS,
        sound_gen="sound" in case.options,
        vocab_size=50,
        rope_axes_dim=(4, 2, 2),
    )


def _framepack(case: Case) -> nn.Module:
    return built(
        "HunyuanVideoFramepackTransformer3DModel",
        case,
        num_single_layers=2,
        num_refiner_layers=1,
        guidance_embeds="guidance" in case.options,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=IMAGE_DIM,
        has_clean_x_embedder=True,
    )


def _allegro(case: Case) -> nn.Module:
    return built(
        "AllegroTransformer3DModel",
        case,
        attention_head_dim=12,
        cross_attention_dim=12 * case.heads,
        caption_channels=TEXT_DIM,
    )


def _stable_audio(case: Case) -> nn.Module:
    return built(
        "StableAudio3DiTModel",
        case,
        io_channels=CHANNELS,
        embed_dim=16 * case.heads,
        depth=2,
        num_heads=case.heads,
        cond_token_dim=TEXT_DIM,
        global_cond_dim=24,
        local_add_cond_dim=4,
        timestep_features_dim=16,
        num_memory_tokens=NUM_MEMORY,
        use_differential_attention="plain" not in case.options,
    )


def _latents(case: Case, draw: Draw) -> Inputs:
    return {
        "hidden_states": _frames(case, draw, NUM_FRAMES),
        "timestep": draw(case.batch).abs() * 100,
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
    }


def _frames(case: Case, draw: Draw, num: int) -> Tensor:
    return draw(case.batch, CHANNELS, num, 2 * case.grid[0], 2 * case.grid[1])


def _helios_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw)
    inputs["indices_hidden_states"] = torch.arange(7, 7 + NUM_FRAMES).expand(case.batch, -1)
    if "history" in case.options:
        first = 0
        for name, num in (("long", 4), ("mid", 2), ("short", 1)):
            inputs[f"latents_history_{name}"] = _frames(case, draw, num)
            places = torch.arange(first, first + num)
            inputs[f"indices_latents_history_{name}"] = places.expand(case.batch, -1)
            first += num
    return inputs


def _mochi_inputs(case: Case, draw: Draw) -> Inputs:
    mask = torch.ones(case.batch, case.text, dtype=torch.bool)
    if "mask" in case.options:
        mask = key_mask(case, draw)
    return {**_latents(case, draw), "encoder_attention_mask": mask}


def _cosmos_inputs(case: Case, draw: Draw) -> Inputs:
    inputs, (rows, columns) = _latents(case, draw), case.grid
    if "mask" in case.options:
        inputs["attention_mask"] = key_mask(case, draw)
    if "frame_times" in case.options:
        inputs["timestep"] = draw(case.batch, 1, NUM_FRAMES, 1, 1).abs() * 100
    if "image" in case.options:
        text, images = inputs["encoder_hidden_states"], draw(case.batch, 4, IMAGE_DIM)
        inputs["encoder_hidden_states"] = text, images
    if "controlnet" in case.options:
        shape = case.batch, NUM_FRAMES * rows * columns, 16 * case.heads
        inputs["block_controlnet_hidden_states"] = [draw(*shape), draw(*shape)]
    if "fps" in case.options:
        inputs["fps"] = 16
    return inputs


def _cosmos3_inputs(case: Case, draw: Draw) -> Inputs:
    """One sequence of a text, as many videos as the batch has, and perhaps a sound."""
    (rows, columns), num_sound = case.grid, 5 if "sound" in case.options else 0
    size, start = rows * columns, case.text
    video, length = case.batch * NUM_FRAMES * size, case.text + num_sound
    places = torch.arange(start, start + video)
    noisy = [torch.arange(1, NUM_FRAMES)] * case.batch  # after a frame that is there
    inputs: Inputs = {
        "input_ids": torch.arange(case.text),
        "text_indexes": torch.arange(case.text),
        "position_ids": torch.arange(length + video).expand(3, -1),
        "und_len": case.text,
        "sequence_length": length + video,
        "vision_tokens": [
            draw(1, CHANNELS, NUM_FRAMES, 2 * rows, 2 * columns) for _ in range(case.batch)
        ],
        "vision_token_shapes": [(NUM_FRAMES, rows, columns)] * case.batch,
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places.view(case.batch, NUM_FRAMES, size)[:, 1:].flatten(),
        "vision_timesteps": draw(case.batch * (NUM_FRAMES - 1) * size).abs() * 1000,
        "vision_noisy_frame_indexes": noisy,
    }
    if num_sound:
        inputs |= {
            "sound_tokens": [draw(CHANNELS, num_sound)],
            "sound_token_shapes": [(num_sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(start + video, length + video),
            "sound_mse_loss_indexes": torch.arange(start + video, length + video),
            "sound_timesteps": draw(num_sound).abs() * 1000,
            "sound_noisy_frame_indexes": [torch.arange(num_sound)],
        }
    return inputs


def _framepack_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _latents(case, draw)
    inputs |= {
        "encoder_attention_mask": torch.ones(case.batch, case.text, dtype=torch.long),
        "pooled_projections": draw(case.batch, TEXT_DIM),
        "image_embeds": draw(case.batch, 4, IMAGE_DIM),
        "indices_latents": torch.arange(7, 7 + NUM_FRAMES),
        "latents_clean": _frames(case, draw, 2),
        "indices_latents_clean": torch.tensor([0, 6]),
    }
    inputs["encoder_attention_mask"][0, case.text // 2 :] = 0  # padded at the end
    for name, num in (("4x", 4), ("2x", 2)):
        inputs[f"latents_history_{name}"] = _frames(case, draw, num)
        inputs[f"indices_latents_history_{name}"] = torch.arange(num)
    if "guidance" in case.options:
        inputs["guidance"] = draw(case.batch).abs() * 1000
    return inputs


def _allegro_inputs(case: Case, draw: Draw) -> Inputs:
    inputs, sizes = _latents(case, draw), (NUM_FRAMES, *case.grid)
    angles = [draw(size, 4) for size in sizes]  # of each axis, and the places of the tokens
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T[:, None]
    inputs["image_rotary_emb"] = tuple((x.cos(), x.sin()) for x in angles), tuple(places)
    if "mask" in case.options:
        inputs["encoder_attention_mask"] = key_mask(case, draw)
    return inputs


def _stable_audio_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, tokens),
        "timestep": draw(case.batch).sigmoid(),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "global_hidden_states": draw(case.batch, 24),
    }
    if "mask" in case.options:
        inputs["encoder_attention_mask"] = key_mask(case, draw)
    if "inpaint" in case.options:
        inputs["local_add_cond"] = draw(case.batch, 4, tokens)
    return inputs


MODELS: Makes = {
    **wan_cases.MODELS,
    "allegro": (_allegro, _allegro_inputs),
    "cogvideox": (_cogvideox, _cogvideox_inputs),
    "cosmos": (_cosmos, _cosmos_inputs),
    "cosmos3": (_cosmos3, _cosmos3_inputs),
    "framepack": (_framepack, _framepack_inputs),
    "helios": (_helios, _helios_inputs),
    "hunyuan": (_hunyuan, _hunyuan_inputs),
    "hunyuan1.5": (_hunyuan15, _hunyuan15_inputs),
    "ltx": (_ltx, _ltx_inputs),
    "ltx2": (_ltx2, _ltx2_inputs),
    "minimax": (_minimax, _minimax_inputs),
    "mochi": (_mochi, _mochi_inputs),
    "stable_audio": (_stable_audio, _stable_audio_inputs),
}
