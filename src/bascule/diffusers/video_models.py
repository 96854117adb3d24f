"""Split tables of models that make videos."""

from collections.abc import Mapping

from bascule.diffusers.split_table import Cut, Keys, Mask, SplitTable

_VIDEO, _VIDEO_TEXT = Cut("video"), ("video", "text")
_PROMPT = "encoder_hidden_states", "encoder_attention_mask"
_PROMPT_2 = "encoder_hidden_states_2", "encoder_attention_mask_2"
_LTX2_WHOLE = (
    "audio_encoder_hidden_states",
    "audio_encoder_attention_mask",
    "sigma",
    "audio_sigma",
    "video_coords",
    "audio_coords",
    "perturbation_mask",
    "video_self_attention_mask",
)
_LTX2_ANGLES: Mapping[str, Mapping[int, Cut]] = {  # of all heads together, or of each
    "rope": {0: Cut("video", dim=-2), 1: Cut("video", dim=-2)},
    "cross_attn_rope": {0: Cut("video", dim=-2), 1: Cut("video", dim=-2)},
    "audio_rope": {0: Cut("audio", dim=-2), 1: Cut("audio", dim=-2)},
    "cross_attn_audio_rope": {0: Cut("audio", dim=-2), 1: Cut("audio", dim=-2)},
}
_LTX2_ATTENDS: Mapping[str, tuple[str, ...] | Keys] = {
    "transformer_blocks.*.attn1": ("video",),
    "transformer_blocks.*.attn2": (),
    "transformer_blocks.*.audio_attn1": ("audio",),
    "transformer_blocks.*.audio_attn2": (),
    "transformer_blocks.*.audio_to_video_attn": Keys("audio"),
    "transformer_blocks.*.video_to_audio_attn": Keys("video"),
}
_PACKED = (
    "timestep",
    "timestep_indices",
    "token_tags",
    "position_ids",
    "video_indices",
    "audio_indices",
    "text_indices",
)

WAN = SplitTable(
    segments=("video",),
    inputs={
        "": {"timestep": Cut("video", ndim=2)},
        "blocks.0": {"hidden_states": _VIDEO},
    },
    outputs={"rope": {0: _VIDEO, 1: _VIDEO}},
    gathers={"proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
    attends={"blocks.*.attn2": ()},
)

WAN_VACE = SplitTable(
    segments=("video",),
    inputs={
        "vace_blocks.0": dict.fromkeys(("hidden_states", "control_hidden_states"), _VIDEO),
        "blocks.0": {"hidden_states": _VIDEO},
    },
    outputs={"rope": {0: _VIDEO, 1: _VIDEO}},
    gathers={"proj_out": _VIDEO},
    blocks={"vace_blocks.*": ("video", "video"), "blocks.*": ("video",)},
    whole=(*WAN.whole, "timestep", "control_hidden_states", "control_hidden_states_scale"),
    attends={"vace_blocks.*.attn2": (), "blocks.*.attn2": ()},
    unbatched=("control_hidden_states_scale",),
)

WAN_ANIMATE = SplitTable(
    segments=("video",),
    inputs={
        "blocks.0": {"hidden_states": _VIDEO},
        "face_adapter.*.to_out": {"input": _VIDEO},
    },
    outputs={"rope": {0: _VIDEO, 1: _VIDEO}},
    # A frame attends to its own face, so the queries of the faces are whole on every rank.
    gathers={"face_adapter.*.pre_norm_q": _VIDEO, "proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    whole=(*WAN.whole, "timestep", "pose_hidden_states", "face_pixel_values"),
    attends={"blocks.*.attn2": (), "face_adapter.*": ()},
)

SKYREELS_V2 = SplitTable(
    segments=("video",),
    inputs={
        "blocks.0": {"hidden_states": _VIDEO},
        "blocks.*": {"temb": Cut("video", dim=2, ndim=4)},
        "proj_out": {"input": _VIDEO},
    },
    outputs={"rope": {0: _VIDEO, 1: _VIDEO}},
    # What follows the last norm is modulated frame by frame, by times that the model has whole.
    gathers={"norm_out": _VIDEO, "proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    whole=(*WAN.whole, "timestep", "fps"),
    attends={"blocks.*.attn2": ()},
)

COGVIDEOX = SplitTable(
    segments=("text", "video"),
    inputs={
        "": {"image_rotary_emb": Cut("video", dim=0)},
        "transformer_blocks.0": {
            "hidden_states": _VIDEO,
            "encoder_hidden_states": Cut("text"),
        },
    },
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": ("video", "text")},
    whole=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
    unbatched=("image_rotary_emb",),
)

HUNYUAN_VIDEO = SplitTable(
    segments=("video", "text"),
    inputs={
        "transformer_blocks.0": {"hidden_states": _VIDEO, "encoder_hidden_states": Cut("text")},
        "transformer_blocks.*": {"num_tokens": Cut("video", ndim=0)},
        "single_transformer_blocks.*": {"num_tokens": Cut("video", ndim=0)},
    },
    outputs={"rope": {0: Cut("video", dim=0), 1: Cut("video", dim=0)}},
    gathers={"proj_out": _VIDEO},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _VIDEO_TEXT),
    whole=("hidden_states", *_PROMPT, "timestep", "pooled_projections", "guidance"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

HUNYUAN_VIDEO_15 = SplitTable(
    segments=("video", "text"),
    inputs={
        "transformer_blocks.0": {"hidden_states": _VIDEO, "encoder_hidden_states": Cut("text")},
        "transformer_blocks.*": {"attention_mask": Mask("text", of_pairs=True)},
    },
    outputs={"rope": {0: Cut("video", dim=0), 1: Cut("video", dim=0)}},
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": _VIDEO_TEXT},
    whole=("hidden_states", *_PROMPT, *_PROMPT_2, "image_embeds", "timestep", "timestep_r"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)

LTX = SplitTable(
    segments=("video",),
    inputs={"": {"hidden_states": _VIDEO, "timestep": Cut("video", ndim=2)}},
    outputs={"rope": {0: _VIDEO, 1: _VIDEO}},
    gathers={"proj_out": _VIDEO},
    blocks={"transformer_blocks.*": ("video",)},
    whole=(*_PROMPT, "rope_interpolation_scale", "video_coords"),
    attends={"transformer_blocks.*.attn2": ()},
)

LTX2 = SplitTable(
    segments=("video", "audio"),
    inputs={
        "": {
            **dict.fromkeys(("hidden_states", "video_keyframes_mask"), _VIDEO),
            "timestep": Cut("video", ndim=2),
            "audio_hidden_states": Cut("audio"),
            "audio_timestep": Cut("audio", ndim=2),
        },
        "transformer_blocks.*.attn1": {"attention_mask": Mask("video")},
    },
    outputs=_LTX2_ANGLES,
    gathers={"proj_out": _VIDEO, "audio_proj_out": Cut("audio")},
    blocks={"transformer_blocks.*": ("video", "audio")},
    whole=(*_PROMPT, *_LTX2_WHOLE),
    attends=_LTX2_ATTENDS,
)

MINIMAX_H3 = SplitTable(
    segments=("packed",),  # text, video and audio, in the order that their indices say
    inputs={
        "transformer_blocks.0": {"hidden_states": Cut("packed")},
        "transformer_blocks.*": {"adaln_indices": Cut("packed", dim=0)},
        "norm_out": {"timestep_indices": Cut("packed", dim=0)},
    },
    outputs={"rope": {0: Cut("packed", dim=0), 1: Cut("packed", dim=0)}},
    gathers={"proj_out": Cut("packed"), "audio_proj_out": Cut("packed")},
    blocks={"transformer_blocks.*": ("packed",)},
    whole=("hidden_states", "audio_hidden_states", "encoder_hidden_states", *_PACKED),
    attends={"token_refiner": ()},
    unbatched=_PACKED,
)

TABLES: Mapping[str, SplitTable] = {
    "transformer_wan.WanTransformer3DModel": WAN,
    "transformer_wan_vace.WanVACETransformer3DModel": WAN_VACE,
    "transformer_wan_animate.WanAnimateTransformer3DModel": WAN_ANIMATE,
    "transformer_skyreels_v2.SkyReelsV2Transformer3DModel": SKYREELS_V2,
    "transformer_chronoedit.ChronoEditTransformer3DModel": WAN,
    "cogvideox_transformer_3d.CogVideoXTransformer3DModel": COGVIDEOX,
    "transformer_hunyuan_video.HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "transformer_hunyuan_video15.HunyuanVideo15Transformer3DModel": HUNYUAN_VIDEO_15,
    "transformer_ltx.LTXVideoTransformer3DModel": LTX,
    "transformer_ltx2.LTX2VideoTransformer3DModel": LTX2,
    "transformer_minimax_h3.MiniMaxH3Transformer3DModel": MINIMAX_H3,
}
"""By class, within `diffusers.models.transformers`."""
