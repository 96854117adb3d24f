"""Tiny models of the Wan family, with random weights, and their inputs."""

from typing import Any

from torch import nn

from tests.helpers.model_case import CHANNELS, TEXT_DIM, Case, Draw, Inputs, Makes, built

IMAGE_DIM, FACE_SIZE = 16, 8
NUM_KEYS = 512  # of text: models with keys of an image take the last so many for text

# Odd lengths, fewer tokens than ranks, heads that do not divide.
CASES = [
    Case("wan", 4, 1, 8, (4, 4)),
    Case("wan", 5, 2, 7, (3, 5), ("3 frames",)),
    Case("wan", 5, 2, 9, (3, 3), ("token_times",)),
    Case("wan", 4, 2, 3, (1, 1), ("token_times",)),
    Case("wan", 4, 1, 3, (1, 3), ("image",)),
    Case("wan", 4, 1, 3, (3, 3), ("image", "last image")),
    Case("vace", 5, 2, 7, (3, 5), ("3 frames",)),
    Case("vace", 4, 1, 3, (1, 1), ("image", "scales")),
    Case("animate", 5, 1, 7, (3, 5)),
    Case("animate", 4, 2, 3, (1, 1), ("image",)),
    Case("skyreels", 5, 2, 7, (3, 3), ("3 frames",)),
    Case("skyreels", 4, 1, 3, (3, 3), ("frame_times", "4 frames", "causal", "fps")),
    Case("skyreels", 4, 2, 3, (1, 1), ("frame_times",)),
    Case("chronoedit", 5, 1, 7, (3, 5), ("image",)),
    Case("chronoedit", 4, 2, 3, (1, 3), ("token_times", "3 frames")),
]


def _frames(case: Case) -> int:
    return next((int(one[0]) for one in case.options if one.endswith(" frames")), 2)


def _made(name: str, case: Case, **sizes: Any) -> Any:
    images = {"image_dim": IMAGE_DIM, "added_kv_proj_dim": 12 * case.heads}
    usual = {
        "patch_size": (1, 2, 2),
        "attention_head_dim": 12,
        "text_dim": TEXT_DIM,
        "freq_dim": 16,
        "ffn_dim": 48,
        "rope_max_seq_len": 16,
        **(images if "image" in case.options else dict.fromkeys(images)),
    }
    return built(name, case, **usual | sizes)


def _wan(case: Case) -> nn.Module:
    images = 2 * case.text if "last image" in case.options else None
    return _made("WanTransformer3DModel", case, pos_embed_seq_len=images)


def _vace(case: Case) -> nn.Module:
    sizes = {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": CHANNELS}
    return _made("WanVACETransformer3DModel", case, **sizes)


def _animate(case: Case) -> nn.Module:
    return _made(
        "WanAnimateTransformer3DModel",
        case,
        in_channels=2 * CHANNELS + 4,
        latent_channels=CHANNELS,
        num_layers=4,
        motion_encoder_channel_sizes={"4": 4, "8": 4},
        motion_encoder_size=FACE_SIZE,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def _skyreels(case: Case) -> nn.Module:
    name = "SkyReelsV2Transformer3DModel"
    model = _made(name, case, inject_sample_info="fps" in case.options)
    if "causal" in case.options:
        model._set_ar_attention(2)
    return model


def _chronoedit(case: Case) -> nn.Module:
    return _made("ChronoEditTransformer3DModel", case)


def _wan_inputs(case: Case, draw: Draw) -> Inputs:
    frames, (rows, columns) = _frames(case), case.grid
    times = draw(case.batch)
    if "token_times" in case.options:
        times = draw(case.batch, frames * rows * columns)
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, frames, 2 * rows, 2 * columns),
        "timestep": times.abs() * 100,
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
    }
    if "image" in case.options:
        images = case.batch * (2 if "last image" in case.options else 1)
        inputs["encoder_hidden_states"] = draw(case.batch, NUM_KEYS, TEXT_DIM)
        inputs["encoder_hidden_states_image"] = draw(images, case.text, IMAGE_DIM)
    return inputs


def _vace_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _wan_inputs(case, draw)
    control: Inputs = {"control_hidden_states": draw(*inputs["hidden_states"].shape)}
    if "scales" in case.options:
        control["control_hidden_states_scale"] = draw(2)
    return {**inputs, **control}


def _animate_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    size = 2 * rows, 2 * columns
    return {
        **_wan_inputs(case, draw),
        "hidden_states": draw(case.batch, 2 * CHANNELS + 4, 3, *size),
        "pose_hidden_states": draw(case.batch, CHANNELS, 2, *size),
        "face_pixel_values": draw(case.batch, 3, 5, FACE_SIZE, FACE_SIZE),
    }


def _skyreels_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _wan_inputs(case, draw)
    if "frame_times" in case.options:
        inputs["timestep"] = draw(case.batch, _frames(case)).abs() * 100
        inputs["enable_diffusion_forcing"] = True
    if "fps" in case.options:
        inputs["fps"] = [1] * case.batch
    return inputs


MODELS: Makes = {
    "wan": (_wan, _wan_inputs),
    "vace": (_vace, _vace_inputs),
    "animate": (_animate, _animate_inputs),
    "skyreels": (_skyreels, _skyreels_inputs),
    "chronoedit": (_chronoedit, _wan_inputs),
}
