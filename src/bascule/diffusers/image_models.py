"""Split tables of models that make images."""

from collections.abc import Mapping

from bascule.diffusers.split_table import Cut, Mask, SplitTable

_TEXT_IMAGE = "text", "image"
_LATENTS = "hidden_states", "encoder_hidden_states", "timestep"
_TWO_TEXTS = "encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2"
_NO_KV_CACHE = (
    "a cache of keys would be of a rank's own tokens: leave it out, so that reference tokens are "
    "attended to in every step"
)

FLUX = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
            "img_ids": Cut("image", dim=-2),
            "txt_ids": Cut("text", dim=-2),
            "controlnet_block_samples": Cut("image"),
            "controlnet_single_block_samples": Cut("image"),
        }
    },
    gathers={"proj_out": Cut("image")},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _TEXT_IMAGE),
    whole=("pooled_projections", "timestep", "guidance"),
    unbatched=("img_ids", "txt_ids"),
)

QWEN_IMAGE = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states_mask": Mask("text"),
            "controlnet_block_samples": Cut("image"),
        },
        "transformer_blocks.0": {"encoder_hidden_states": Cut("text")},
        "transformer_blocks.*": {"modulate_index": Cut("image")},
    },
    outputs={"pos_embed": {0: Cut("image", dim=0), 1: Cut("text", dim=0)}},
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": _TEXT_IMAGE},
    whole=("encoder_hidden_states", "timestep", "guidance", "additional_t_cond"),
)

FLUX2 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
            "img_ids": Cut("image", dim=-2),
            "txt_ids": Cut("text", dim=-2),
        }
    },
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": _TEXT_IMAGE, "single_transformer_blocks.*": (_TEXT_IMAGE,)},
    whole=("timestep", "guidance"),
    refused=dict.fromkeys(("kv_cache", "kv_cache_mode"), _NO_KV_CACHE),
)

SD3 = SplitTable(
    segments=("image", "text"),
    inputs={
        "": {"encoder_hidden_states": Cut("text"), "block_controlnet_hidden_states": Cut("image")}
    },
    outputs={"pos_embed": {0: Cut("image")}},
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": ("text", "image")},
    whole=("hidden_states", "pooled_projections", "timestep"),
    attends={"transformer_blocks.*.attn2": ("image",)},
)

Z_IMAGE = SplitTable(
    segments=("all",),
    inputs={
        "": {"controlnet_block_samples": Cut("all")},
        "noise_refiner.*": dict.fromkeys(("x", "freqs_cis", "noise_mask"), Cut("image")),
        "layers.0": {"x": Cut("all")},
        "layers.*": dict.fromkeys(("freqs_cis", "noise_mask"), Cut("all")),
        "all_final_layer.*": {"noise_mask": Cut("all")},
    },
    gathers={"noise_refiner.*": Cut("image"), "all_final_layer.*": Cut("all")},
    blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
    whole=("x", "t", "cap_feats", "siglip_feats"),
    attends={"noise_refiner.*": ("image",), "context_refiner.*": (), "siglip_refiner.*": ()},
)

CHROMA = SplitTable(
    segments=_TEXT_IMAGE,
    inputs=FLUX.inputs,
    gathers=FLUX.gathers,
    blocks={"transformer_blocks.*": _TEXT_IMAGE, "single_transformer_blocks.*": (_TEXT_IMAGE,)},
    whole=("timestep", "attention_mask"),
    unbatched=FLUX.unbatched,
)

AURA_FLOW = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"joint_transformer_blocks.0": {"encoder_hidden_states": Cut("text")}},
    outputs={"pos_embed": {0: Cut("image")}},
    gathers={"proj_out": Cut("image")},
    blocks={
        "joint_transformer_blocks.*": _TEXT_IMAGE,
        "single_transformer_blocks.*": (_TEXT_IMAGE,),
    },
    whole=("hidden_states", "encoder_hidden_states", "timestep"),
)

COG_VIEW4 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"": {"image_rotary_emb": Cut("image", dim=0)}},
    outputs={
        "rope": {0: Cut("image", dim=0), 1: Cut("image", dim=0)},
        "patch_embed": {0: Cut("image"), 1: Cut("text")},
    },
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": ("image", "text")},
    whole=(*_LATENTS, "original_size", "target_size", "crop_coords"),
    unbatched=("image_rotary_emb",),
    refused={
        "attention_mask": "the model adds it to the scores, which hides nothing: leave it out"
    },
)

HUNYUAN_IMAGE = SplitTable(
    segments=("image", "text"),
    inputs={
        "transformer_blocks.0": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
        }
    },
    outputs={"rope": {0: Cut("image", dim=0), 1: Cut("image", dim=0)}},
    gathers={"proj_out": Cut("image")},
    blocks=dict.fromkeys(
        ("transformer_blocks.*", "single_transformer_blocks.*"), ("image", "text")
    ),
    whole=(*_LATENTS, *_TWO_TEXTS, "timestep_r", "guidance"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

LUMINA2 = SplitTable(
    segments=("all",),
    inputs={
        "noise_refiner.*": dict.fromkeys(("hidden_states", "image_rotary_emb"), Cut("image")),
        "layers.0": {"hidden_states": Cut("all")},
        "layers.*": {"image_rotary_emb": Cut("all")},
    },
    gathers={"noise_refiner.*": Cut("image"), "norm_out": Cut("all")},
    blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
    whole=(*_LATENTS, "encoder_attention_mask"),
    attends={"noise_refiner.*": ("image",), "context_refiner.*": ()},
)

KREA2 = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
            "encoder_attention_mask": Mask("text"),
        }
    },
    outputs={"rotary_emb": dict.fromkeys((0, 1), Cut(_TEXT_IMAGE, dim=0))},
    gathers={"final_layer": Cut("image")},
    blocks={"text_fusion.refiner_blocks.*": ("text",), "transformer_blocks.*": (_TEXT_IMAGE,)},
    whole=("timestep", "position_ids"),
    attends={"text_fusion.layerwise_blocks.*": (), "text_fusion.refiner_blocks.*": ("text",)},
    unbatched=("position_ids",),
)

IDEOGRAM4 = SplitTable(
    segments=("all",),
    inputs={
        "": {
            **dict.fromkeys(("hidden_states", "encoder_hidden_states"), Cut("all")),
            **dict.fromkeys(("position_ids", "indicator"), Cut("all")),
            "timestep": Cut("all", ndim=2),
        }
    },
    gathers={"final_layer": Cut("all")},
    blocks={"layers.*": ("all",)},
    whole=("segment_ids",),
)

PIXART = SplitTable(
    segments=("image",),
    inputs={},
    outputs={"pos_embed": {0: Cut("image")}},
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": ("image",)},
    whole=(*_LATENTS, "added_cond_kwargs", "encoder_attention_mask"),
    attends={"transformer_blocks.*.attn2": ()},
    refused={"attention_mask": "the model pads it to a rank's own tokens: leave it out"},
)

TABLES: Mapping[str, SplitTable] = {
    "auraflow_transformer_2d.AuraFlowTransformer2DModel": AURA_FLOW,
    "pixart_transformer_2d.PixArtTransformer2DModel": PIXART,
    "transformer_chroma.ChromaTransformer2DModel": CHROMA,
    "transformer_cogview4.CogView4Transformer2DModel": COG_VIEW4,
    "transformer_flux.FluxTransformer2DModel": FLUX,
    "transformer_flux2.Flux2Transformer2DModel": FLUX2,
    "transformer_hunyuanimage.HunyuanImageTransformer2DModel": HUNYUAN_IMAGE,
    "transformer_ideogram4.Ideogram4Transformer2DModel": IDEOGRAM4,
    "transformer_krea2.Krea2Transformer2DModel": KREA2,
    "transformer_lumina2.Lumina2Transformer2DModel": LUMINA2,
    "transformer_qwenimage.QwenImageTransformer2DModel": QWEN_IMAGE,
    "transformer_sd3.SD3Transformer2DModel": SD3,
    "transformer_z_image.ZImageTransformer2DModel": Z_IMAGE,
}
"""By class, within `diffusers.models.transformers`."""
