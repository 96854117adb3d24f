"""Tiny models that make images, with random weights, and their inputs."""

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

# Odd lengths, fewer tokens than ranks, heads that do not divide.
CASES = [
    Case("flux", 4, 1, 16, (4, 4)),
    Case("flux", 5, 2, 7, (3, 5)),
    Case("flux", 5, 1, 1, (5, 7), ("guidance", "controlnet")),
    Case("flux", 4, 2, 3, (1, 1)),
    Case("flux", 4, 1, 1, (1, 2)),
    Case("flux", 4, 1, 7, (3, 5), ("no single",)),
    Case("flux", 5, 1, 7, (3, 5), ("kontext",)),
    Case("flux", 4, 1, 7, (3, 5), ("no double",)),
    Case("qwen", 4, 2, 16, (4, 4), ("mask",)),
    Case("qwen", 5, 2, 7, (3, 5), ("mask",)),
    Case("qwen", 5, 1, 13, (5, 3)),
    Case("qwen", 4, 2, 3, (3, 3), ("mask", "zero_cond")),
    Case("qwen", 4, 1, 1, (1, 3), ("mask", "controlnet")),
    Case("qwen", 5, 2, 7, (5, 3), ("mask", "edit")),
    Case("qwen", 4, 1, 5, (5, 3), ("layers",)),
    Case("flux_controlnet", 5, 2, 7, (3, 5), ("guidance",)),
    Case("flux_controlnet", 4, 1, 3, (1, 3), ("hint",)),
    Case("qwen_controlnet", 5, 2, 7, (3, 5), ("mask",)),
    Case("sd3_controlnet", 5, 2, 7, (3, 5)),
    Case("flux2", 4, 2, 7, (3, 5), ("guidance",)),
    Case("flux2", 5, 1, 3, (1, 3)),
    Case("flux2", 5, 2, 1, (2, 1), ("no double",)),
    Case("z_image", 5, 1, 7, (3, 5)),
    Case("z_image", 4, 2, 5, (3, 3), ("controlnet",)),
    Case("z_image", 4, 3, 37, (5, 7), ("unlike",)),
    Case("z_image", 4, 1, 5, (3, 3), ("omni",)),
    Case("sd3", 5, 2, 7, (3, 5)),
    Case("sd3", 4, 1, 3, (1, 3), ("dual", "qk norm", "controlnet")),
    Case("sd3", 5, 2, 1, (3, 3), ("dual", "skip")),
]


def _flux(case: Case) -> nn.Module:
    return built(
        "FluxTransformer2DModel",
        case,
        num_layers=0 if "no double" in case.options else 2,
        num_single_layers=0 if "no single" in case.options else 2,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        guidance_embeds="guidance" in case.options,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen(case: Case) -> nn.Module:
    return built(
        "QwenImageTransformer2DModel",
        case,
        patch_size=1,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t="zero_cond" in case.options,
        use_layer3d_rope="layers" in case.options,
        use_additional_t_cond="layers" in case.options,
    )


def _sd3(case: Case) -> nn.Module:
    return built(
        "SD3Transformer2DModel",
        case,
        sample_size=8,
        patch_size=2,
        num_layers=3,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=16 * case.heads,
        pooled_projection_dim=TEXT_DIM,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1) if "dual" in case.options else (),
        qk_norm="rms_norm" if "qk norm" in case.options else None,
    )


def _flux2(case: Case) -> nn.Module:
    return built(
        "Flux2Transformer2DModel",
        case,
        num_layers=0 if "no double" in case.options else 2,
        num_single_layers=2,
        joint_attention_dim=TEXT_DIM,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds="guidance" in case.options,
    )


def _z_image(case: Case) -> nn.Module:
    return built(
        "ZImageTransformer2DModel",
        case,
        dim=16 * case.heads,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=case.heads,
        n_kv_heads=case.heads,
        cap_feat_dim=TEXT_DIM,
        siglip_feat_dim=24 if "omni" in case.options else None,
        axes_dims=[4, 6, 6],
        axes_lens=[96, 16, 16],
    )


def _flux_controlnet(case: Case) -> nn.Module:
    return built(
        "FluxControlNetModel",
        case,
        num_single_layers=1,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        guidance_embeds="guidance" in case.options,
        axes_dims_rope=[4, 6, 6],
        **({"conditioning_embedding_channels": CHANNELS} if "hint" in case.options else {}),
    )


def _qwen_controlnet(case: Case) -> nn.Module:
    return built(
        "QwenImageControlNetModel",
        case,
        patch_size=1,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )


def _sd3_controlnet(case: Case) -> nn.Module:
    return built(
        "SD3ControlNetModel",
        case,
        sample_size=8,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=16 * case.heads,
        pooled_projection_dim=TEXT_DIM,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
    )


def _flux_inputs(case: Case, draw: Draw) -> Inputs:
    ids = grid_ids(case.grid)
    if "kontext" in case.options:  # an image to edit follows
        ids = torch.cat([ids, ids + torch.tensor([1.0, 0.0, 0.0])])
    tokens = len(ids)
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "pooled_projections": draw(case.batch, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_ids": ids,
        "txt_ids": torch.zeros(case.text, 3),
    }
    if "guidance" in case.options:
        inputs["guidance"] = draw(case.batch).abs()
    if "controlnet" in case.options:
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            inputs[name] = [draw(case.batch, tokens, 16 * case.heads) for _ in range(2)]
    return inputs


def _qwen_inputs(case: Case, draw: Draw) -> Inputs:
    tokens = case.grid[0] * case.grid[1]
    shapes = [(1, *case.grid)]
    if "zero_cond" in case.options:  # the last row is a reference image
        shapes = [(1, case.grid[0] - 1, case.grid[1]), (1, 1, case.grid[1])]
    inputs: Inputs = {
        "hidden_states": draw(case.batch, tokens, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs(),
        "img_shapes": [shapes] * case.batch,
    }
    if "edit" in case.options:  # an image, and two to edit it by
        rows, columns = case.grid
        inputs["img_shapes"] = [[(1, rows - 2, columns), (1, 1, columns), (1, columns, 1)]]
        inputs["img_shapes"] *= case.batch
    if "layers" in case.options:  # two layers and the image that they are of
        inputs["img_shapes"] = [[(1, 2, 3), (1, 2, 3), (1, 1, 3)]] * case.batch
        inputs["additional_t_cond"] = torch.ones(case.batch, dtype=torch.long)
    if "mask" in case.options:
        inputs["encoder_hidden_states_mask"] = key_mask(case, draw).long()
    if "controlnet" in case.options:
        inputs["controlnet_block_samples"] = [draw(case.batch, tokens, 16 * case.heads)]
    return inputs


def _flux2_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _flux_inputs(case, draw)
    del inputs["pooled_projections"]
    for name in ("img_ids", "txt_ids"):  # one for all samples, and one more axis
        inputs[name] = nn.functional.pad(inputs[name], (0, 1))[None].expand(case.batch, -1, -1)
    return inputs


def _z_image_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = (2 * size for size in case.grid)
    images = [draw(CHANNELS, 1, rows, columns) for _ in range(case.batch)]
    texts = [draw(case.text, TEXT_DIM) for _ in range(case.batch)]
    if "unlike" in case.options:  # padded to the longest, which is masked
        images[0], texts[-1] = images[0][:, :, :2], texts[-1][:1]
    inputs: Inputs = {"x": images, "t": draw(case.batch).abs(), "cap_feats": texts}
    if "controlnet" in case.options:  # each is padded to a multiple of 32 tokens
        inputs["controlnet_block_samples"] = {1: draw(case.batch, 64, 16 * case.heads)}
    if "omni" in case.options:  # a reference image, that is not noisy, and the image to make
        inputs["x"] = [[draw(CHANNELS, 1, 2, 4), images[0]]]
        inputs["cap_feats"] = [[texts[0], draw(3, TEXT_DIM)]]
        inputs["siglip_feats"] = [[draw(2, 3, 24), None]]
        inputs["image_noise_mask"] = [[0, 1]]
    return inputs


def _flux_controlnet_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _flux_inputs(case, draw)
    condition = draw(*inputs["hidden_states"].shape)
    if "hint" in case.options:  # a picture, of which 8 x 8 pixels make a token
        condition = draw(case.batch, 3, *(8 * size for size in case.grid))
    return {**inputs, "controlnet_cond": condition, "conditioning_scale": 0.7}


def _qwen_controlnet_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _qwen_inputs(case, draw)
    return {**inputs, "controlnet_cond": draw(*inputs["hidden_states"].shape)}


def _sd3_controlnet_inputs(case: Case, draw: Draw) -> Inputs:
    inputs = _sd3_inputs(case, draw)
    return {**inputs, "controlnet_cond": draw(*inputs["hidden_states"].shape)}


def _sd3_inputs(case: Case, draw: Draw) -> Inputs:
    rows, columns = case.grid
    inputs: Inputs = {
        "hidden_states": draw(case.batch, CHANNELS, 2 * rows, 2 * columns),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "pooled_projections": draw(case.batch, TEXT_DIM),
        "timestep": draw(case.batch).abs() * 100,
    }
    if "skip" in case.options:
        inputs["skip_layers"] = [0]
    if "controlnet" in case.options:
        inputs["block_controlnet_hidden_states"] = [
            draw(case.batch, rows * columns, 16 * case.heads)
        ]
    return inputs


MODELS: Makes = {
    "flux": (_flux, _flux_inputs),
    "flux2": (_flux2, _flux2_inputs),
    "flux_controlnet": (_flux_controlnet, _flux_controlnet_inputs),
    "qwen": (_qwen, _qwen_inputs),
    "qwen_controlnet": (_qwen_controlnet, _qwen_controlnet_inputs),
    "sd3_controlnet": (_sd3_controlnet, _sd3_controlnet_inputs),
    "sd3": (_sd3, _sd3_inputs),
    "z_image": (_z_image, _z_image_inputs),
}
