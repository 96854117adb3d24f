"""Split tables of diffusers models, by class: tensors to shard, to attend to and to gather."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from inspect import getattr_static
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from bascule.diffusers.cp_plan import table_from_plan
from bascule.diffusers.split_table import Cut, Keys, Mask, SplitTable
from bascule.errors import ConfigError

_IMAGE, _TEXT, _VIDEO, _AUDIO = Cut("image"), Cut("text"), Cut("video"), Cut("audio")
_ALL, _ALL_ROWS = Cut("all"), Cut("all", dim=0)
_PACKED, _PACKED_ROWS = Cut("packed"), Cut("packed", dim=0)
_IMAGE_ROWS, _VIDEO_ROWS = Cut("image", dim=0), Cut("video", dim=0)
_VIDEO_TIMES, _VIDEO_TOKENS = Cut("video", ndim=2), Cut("video", ndim=3)
_TEXT_IMAGE, _IMAGE_TEXT = ("text", "image"), ("image", "text")
_TEXT_VIDEO, _VIDEO_TEXT = ("text", "video"), ("video", "text")
_HISTORY_VIDEO, _MEMORY_AUDIO = ("history", "video"), ("memory", "audio")
_HIDDEN, _PROMPT, _CONTROL = "hidden_states", "encoder_hidden_states", "controlnet_cond"
_LATENTS = _HIDDEN, _PROMPT, "timestep"
_PROMPT_MASK = _PROMPT, "encoder_attention_mask"
_PROMPT_2 = "encoder_hidden_states_2", "encoder_attention_mask_2"
_BLOCKS, _FIRST = "transformer_blocks.*", "transformer_blocks.0"
_BOTH_BLOCKS = _BLOCKS, "single_transformer_blocks.*"
_JOINED = {_BLOCKS: _TEXT_IMAGE, "single_transformer_blocks.*": (_TEXT_IMAGE,)}
_NO_KV_CACHE = "a cache of keys would hold one rank's tokens: leave it out"
_PADDED_MASK = "the model pads it to a rank's own tokens: leave it out"


def _both(cut: Cut) -> Mapping[int, Cut]:
    return {0: cut, 1: cut}


_FLUX_INPUTS = {
    _HIDDEN: _IMAGE,
    _PROMPT: _TEXT,
    "img_ids": Cut("image", dim=-2),
    "txt_ids": Cut("text", dim=-2),
}

_LIKE_FLUX = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={"": _FLUX_INPUTS},
    gathers={"proj_out": _IMAGE},
    blocks=dict.fromkeys(_BOTH_BLOCKS, _TEXT_IMAGE),
    replicated=("timestep",),
    unbatched=("img_ids", "txt_ids"),
)
_RESIDUALS = dict.fromkeys(("controlnet_block_samples", "controlnet_single_block_samples"), _IMAGE)
FLUX = replace(
    _LIKE_FLUX,
    inputs={"": {**_FLUX_INPUTS, **_RESIDUALS}},
    replicated=("pooled_projections", "timestep", "guidance"),
)
_QWEN_IMAGE = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            _HIDDEN: _IMAGE,
            "encoder_hidden_states_mask": Mask("text"),
            "controlnet_block_samples": _IMAGE,
        },
        _FIRST: {_PROMPT: _TEXT},
        _BLOCKS: {"modulate_index": _IMAGE},
    },
    outputs={"pos_embed": {0: _IMAGE_ROWS, 1: Cut("text", dim=0)}},
    gathers={"proj_out": _IMAGE},
    blocks={_BLOCKS: _TEXT_IMAGE},
    replicated=(_PROMPT, "timestep", "guidance", "additional_t_cond"),
)
_SD3 = SplitTable(
    segments=_IMAGE_TEXT,
    inputs={"": {_PROMPT: _TEXT, "block_controlnet_hidden_states": _IMAGE}},
    outputs={"pos_embed": {0: _IMAGE}},
    gathers={"proj_out": _IMAGE},
    blocks={_BLOCKS: _TEXT_IMAGE},
    replicated=(_HIDDEN, "pooled_projections", "timestep"),
    attends={"transformer_blocks.*.attn2": ("image",)},
)
_WAN = SplitTable(
    segments=("video",),
    inputs={"": {"timestep": _VIDEO_TIMES}, "blocks.0": {_HIDDEN: _VIDEO}},
    outputs={"rope": _both(_VIDEO)},
    gathers={"proj_out": _VIDEO},
    blocks={"blocks.*": ("video",)},
    replicated=(_HIDDEN, _PROMPT, "encoder_hidden_states_image"),
    attends={"blocks.*.attn2": ()},
)
_HUNYUAN_VIDEO = SplitTable(
    segments=_VIDEO_TEXT,
    inputs={
        _FIRST: {_HIDDEN: _VIDEO, _PROMPT: _TEXT},
        **{key: {"num_tokens": Cut("video", ndim=0)} for key in _BOTH_BLOCKS},
    },
    outputs={"rope": _both(_VIDEO_ROWS)},
    gathers={"proj_out": _VIDEO},
    blocks=dict.fromkeys(_BOTH_BLOCKS, _VIDEO_TEXT),
    replicated=(_HIDDEN, *_PROMPT_MASK, "timestep", "pooled_projections", "guidance"),
    attends={"context_embedder": ()},
    nonempty=("text",),
)
_COSMOS3_NAMES = "tokens sequence_indexes mse_loss_indexes timesteps noisy_frame_indexes".split()
_COSMOS3_PACKED = (
    *("input_ids", "text_indexes", "position_ids", "action_domain_ids"),
    *(f"{kind}_{name}" for kind in ("vision", "sound", "action") for name in _COSMOS3_NAMES),
)
_VACE_CONTROL = "control_hidden_states", "control_hidden_states_scale"
_HELIOS_LATENTS = "latents_history_short", "latents_history_mid", "latents_history_long"
_HELIOS_INDICES = "indices_hidden_states", *(f"indices_{name}" for name in _HELIOS_LATENTS)
_FRAMEPACK_HISTORY = "latents_clean", "latents_history_2x", "latents_history_4x"
_FRAMEPACK_INDICES = "indices_latents", *(f"indices_{name}" for name in _FRAMEPACK_HISTORY)
_H3_REPLICATED = (
    *("timestep", "timestep_indices", "token_tags", "position_ids"),
    *("video_indices", "audio_indices", "text_indices"),
)

TABLES: Mapping[str, SplitTable] = {  # by name of a class of diffusers
    "AllegroTransformer3DModel": SplitTable(
        segments=("video",),
        inputs={
            "": {"image_rotary_emb": {1: _VIDEO}},  # positions, after the angles of each axis
            _FIRST: {_HIDDEN: _VIDEO},
        },
        gathers={"proj_out": _VIDEO},
        blocks={_BLOCKS: ("video",)},
        replicated=(*_LATENTS, "encoder_attention_mask"),
        attends={"transformer_blocks.*.attn2": ()},
        unbatched=("image_rotary_emb",),
        refused={"attention_mask": _PADDED_MASK},
    ),
    "AuraFlowTransformer2DModel": SplitTable(
        segments=_TEXT_IMAGE,
        inputs={"joint_transformer_blocks.0": {_PROMPT: _TEXT}},
        outputs={"pos_embed": {0: _IMAGE}},
        gathers={"proj_out": _IMAGE},
        blocks={
            "joint_transformer_blocks.*": _TEXT_IMAGE,
            "single_transformer_blocks.*": (_TEXT_IMAGE,),
        },
        replicated=_LATENTS,
    ),
    "BriaTransformer2DModel": replace(
        _LIKE_FLUX,
        inputs={"": {**_FLUX_INPUTS, "controlnet_block_samples": _IMAGE}},
        replicated=FLUX.replicated,
        refused={
            "controlnet_single_block_samples": "the model adds them behind as many tokens of the "
            "image as the text has: leave them out"
        },
    ),
    "ChromaTransformer2DModel": replace(
        FLUX, blocks=_JOINED, replicated=("timestep", "attention_mask")
    ),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": SplitTable(
        segments=_TEXT_VIDEO,
        inputs={"": {"image_rotary_emb": _VIDEO_ROWS}, _FIRST: {_HIDDEN: _VIDEO, _PROMPT: _TEXT}},
        gathers={"proj_out": _VIDEO},
        blocks={_BLOCKS: _VIDEO_TEXT},
        replicated=(*_LATENTS, "timestep_cond", "ofs"),
        unbatched=("image_rotary_emb",),
    ),
    "CogView4Transformer2DModel": SplitTable(
        segments=_TEXT_IMAGE,
        inputs={"": {"image_rotary_emb": _IMAGE_ROWS}},
        outputs={"rope": _both(_IMAGE_ROWS), "patch_embed": {0: _IMAGE, 1: _TEXT}},
        gathers={"proj_out": _IMAGE},
        blocks={_BLOCKS: _IMAGE_TEXT},
        replicated=(*_LATENTS, "original_size", "target_size", "crop_coords"),
        unbatched=("image_rotary_emb",),
        refused={
            "attention_mask": "the model adds it to the scores, which hides nothing: leave it out"
        },
    ),
    "Cosmos3OmniTransformer": SplitTable(  # tokens of the prompt, then of video, sound and actions
        segments=_TEXT_VIDEO,
        inputs={
            "": {"und_len": Cut("text", ndim=0)},
            "layers.0": {"und_seq": Cut("text", dim=0), "gen_seq": _VIDEO_ROWS},
        },
        outputs={"rotary_emb": _both(Cut(_TEXT_VIDEO))},
        gathers={"norm_moe_gen": _VIDEO_ROWS},
        blocks={"layers.*": (Cut("text", dim=0), _VIDEO_ROWS)},
        replicated=_COSMOS3_PACKED,
        attends={"layers.*.self_attn": Keys(_TEXT_VIDEO)},
        copied=("text",),  # it attends to itself alone, and is attended to by all
        unbatched=_COSMOS3_PACKED,
    ),
    "CosmosTransformer3DModel": SplitTable(
        segments=("video",),
        inputs={
            "": {"block_controlnet_hidden_states": _VIDEO},
            _FIRST: {_HIDDEN: _VIDEO},
            **dict.fromkeys(  # times of each token; those of a sample have fewer dims
                (_BLOCKS, "norm_out"), dict.fromkeys(("embedded_timestep", "temb"), _VIDEO_TOKENS)
            ),
        },
        outputs={"rope": _both(_VIDEO_ROWS), "learnable_pos_embed": {0: _VIDEO}},
        gathers={"proj_out": _VIDEO},
        blocks={_BLOCKS: ("video",)},
        replicated=(*_LATENTS, "attention_mask", "condition_mask", "padding_mask"),
        attends={"transformer_blocks.*.attn2": ()},
    ),
    "ErnieImageTransformer2DModel": SplitTable(
        segments=("all",),
        inputs={
            "layers.0": {"x": _ALL_ROWS},
            "layers.*": {"rotary_pos_emb": _ALL, "temb": _ALL_ROWS},
        },
        gathers={"final_linear": _ALL_ROWS},
        blocks={"layers.*": (_ALL_ROWS,)},
        replicated=(_HIDDEN, "timestep", "text_bth", "text_lens"),
    ),
    "Flux2Transformer2DModel": replace(
        _LIKE_FLUX,
        blocks=_JOINED,
        replicated=("timestep", "guidance"),
        unbatched=(),
        alike=FLUX.unbatched,
        refused=dict.fromkeys(("kv_cache", "kv_cache_mode"), _NO_KV_CACHE),
    ),
    "FluxControlNetModel": replace(
        _LIKE_FLUX,
        inputs={"": _FLUX_INPUTS, "controlnet_x_embedder": {"input": _IMAGE}},
        gathers=dict.fromkeys(("controlnet_blocks.*", "controlnet_single_blocks.*"), _IMAGE),
        replicated=(*FLUX.replicated, _CONTROL, "controlnet_mode"),  # of a model that is no union
    ),
    "FluxTransformer2DModel": FLUX,
    "HeliosTransformer3DModel": SplitTable(
        segments=_HISTORY_VIDEO,
        inputs={
            "blocks.*": {
                "original_context_length": Cut("video", ndim=0),
                "temb": Cut(_HISTORY_VIDEO),
                "rotary_emb": Cut(_HISTORY_VIDEO),
            },
            "blocks.0": {_HIDDEN: Cut(_HISTORY_VIDEO)},
        },
        gathers={"blocks.-1": Cut(_HISTORY_VIDEO)},  # later modules take the last tokens of all
        blocks={"blocks.*": (_HISTORY_VIDEO,)},
        replicated=(*_LATENTS, *_HELIOS_LATENTS, *_HELIOS_INDICES),
        attends={"blocks.*.attn2": ()},
    ),
    "HiDreamImageTransformer2DModel": SplitTable(
        segments=_IMAGE_TEXT,
        inputs={
            "double_stream_blocks.*": {"hidden_states_masks": _IMAGE},
            "single_stream_blocks.*": {"hidden_states_masks": Cut(_IMAGE_TEXT)},
        },
        outputs={"x_embedder": {0: _IMAGE}, "pe_embedder": {0: Cut(_IMAGE_TEXT)}},
        gathers={"final_layer": _IMAGE},
        blocks={"double_stream_blocks.*": _IMAGE_TEXT, "single_stream_blocks.*": (_IMAGE_TEXT,)},
        replicated=(
            *(_HIDDEN, "hidden_states_masks", "img_ids", "img_sizes", "timesteps"),
            *("pooled_embeds", "encoder_hidden_states_t5", "encoder_hidden_states_llama3"),
        ),
        copied=("text",),  # each block appends other tokens to it, and removes them again
        batch_dims={"encoder_hidden_states_llama3": 1},
    ),
    "HunyuanImageTransformer2DModel": SplitTable(
        segments=_IMAGE_TEXT,
        inputs={_FIRST: {_HIDDEN: _IMAGE, _PROMPT: _TEXT}},
        outputs={"rope": _both(_IMAGE_ROWS)},
        gathers={"proj_out": _IMAGE},
        blocks=dict.fromkeys(_BOTH_BLOCKS, _IMAGE_TEXT),
        replicated=(*_LATENTS, "encoder_attention_mask", *_PROMPT_2, "timestep_r", "guidance"),
        attends={"context_embedder": ()},
        nonempty=("text",),
    ),
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN_VIDEO,
        inputs={
            _FIRST: {_HIDDEN: _VIDEO, _PROMPT: _TEXT},
            _BLOCKS: {"attention_mask": Mask("text", of_pairs=True)},
        },
        blocks={_BLOCKS: _VIDEO_TEXT},
        replicated=(_HIDDEN, *_PROMPT_MASK, *_PROMPT_2, "image_embeds", "timestep", "timestep_r"),
        alike=("image_embeds",),  # only if all samples' are 0, none attends to them
    ),
    "HunyuanVideoFramepackTransformer3DModel": replace(
        _HUNYUAN_VIDEO,
        inputs={
            _FIRST: {_HIDDEN: _VIDEO, _PROMPT: _TEXT},
            _BLOCKS: {"freqs_cis": _VIDEO_ROWS},
            "single_transformer_blocks.*": {"image_rotary_emb": _VIDEO_ROWS},
        },
        outputs={},
        # Later modules take the last tokens of all; the history lies before them.
        gathers={"single_transformer_blocks.-1": _VIDEO},
        replicated=(
            *(_HIDDEN, *_PROMPT_MASK, "timestep", "pooled_projections", "guidance"),
            *("image_embeds", *_FRAMEPACK_HISTORY, *_FRAMEPACK_INDICES),
        ),
        unbatched=_FRAMEPACK_INDICES,
    ),
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "Ideogram4Transformer2DModel": SplitTable(
        segments=("all",),
        inputs={
            "": {
                **dict.fromkeys((_HIDDEN, _PROMPT, "position_ids", "indicator"), _ALL),
                "timestep": Cut("all", ndim=2),
            }
        },
        gathers={"final_layer": _ALL},
        blocks={"layers.*": ("all",)},
        replicated=("segment_ids",),
    ),
    "Krea2Transformer2DModel": SplitTable(
        segments=_TEXT_IMAGE,
        inputs={"": {_HIDDEN: _IMAGE, _PROMPT: _TEXT, "encoder_attention_mask": Mask("text")}},
        outputs={"rotary_emb": _both(Cut(_TEXT_IMAGE, dim=0))},
        gathers={"final_layer": _IMAGE},
        blocks={"text_fusion.refiner_blocks.*": ("text",), _BLOCKS: (_TEXT_IMAGE,)},
        replicated=("timestep", "position_ids"),
        attends={"text_fusion.layerwise_blocks.*": (), "text_fusion.refiner_blocks.*": ("text",)},
        unbatched=("position_ids",),
    ),
    "LTX2VideoTransformer3DModel": SplitTable(
        segments=("video", "audio"),
        inputs={
            "": {
                **dict.fromkeys((_HIDDEN, "video_keyframes_mask"), _VIDEO),
                "timestep": _VIDEO_TIMES,
                "audio_hidden_states": _AUDIO,
                "audio_timestep": Cut("audio", ndim=2),
            },
            "transformer_blocks.*.attn1": {"attention_mask": Mask("video")},
        },
        outputs={  # angles of all heads together, or of each
            **dict.fromkeys(("rope", "cross_attn_rope"), _both(Cut("video", dim=-2))),
            **dict.fromkeys(("audio_rope", "cross_attn_audio_rope"), _both(Cut("audio", dim=-2))),
        },
        gathers={"proj_out": _VIDEO, "audio_proj_out": _AUDIO},
        blocks={_BLOCKS: ("video", "audio")},
        replicated=(
            *(*_PROMPT_MASK, "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
            *("sigma", "audio_sigma", "video_coords", "audio_coords"),
            *("perturbation_mask", "video_self_attention_mask"),
        ),
        attends={
            "transformer_blocks.*.attn1": ("video",),
            "transformer_blocks.*.attn2": (),
            "transformer_blocks.*.audio_attn1": ("audio",),
            "transformer_blocks.*.audio_attn2": (),
            "transformer_blocks.*.audio_to_video_attn": Keys("audio"),
            "transformer_blocks.*.video_to_audio_attn": Keys("video"),
        },
    ),
    "LTXVideoTransformer3DModel": SplitTable(
        segments=("video",),
        inputs={"": {_HIDDEN: _VIDEO, "timestep": _VIDEO_TIMES}},
        outputs={"rope": _both(_VIDEO)},
        gathers={"proj_out": _VIDEO},
        blocks={_BLOCKS: ("video",)},
        replicated=(*_PROMPT_MASK, "rope_interpolation_scale", "video_coords"),
        attends={"transformer_blocks.*.attn2": ()},
    ),
    "LongCatImageTransformer2DModel": replace(_LIKE_FLUX, replicated=("timestep", "guidance")),
    "Lumina2Transformer2DModel": SplitTable(
        segments=("all",),
        inputs={
            "noise_refiner.*": dict.fromkeys((_HIDDEN, "image_rotary_emb"), _IMAGE),
            "layers.0": {_HIDDEN: _ALL},
            "layers.*": {"image_rotary_emb": _ALL},
        },
        gathers={"noise_refiner.*": _IMAGE, "norm_out": _ALL},
        blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
        replicated=(*_LATENTS, "encoder_attention_mask"),
        attends={"noise_refiner.*": ("image",), "context_refiner.*": ()},
    ),
    "MiniMaxH3Transformer3DModel": SplitTable(
        segments=("packed",),  # text, video and audio, in the order of their indices
        inputs={
            _FIRST: {_HIDDEN: _PACKED},
            _BLOCKS: {"adaln_indices": _PACKED_ROWS},
            "norm_out": {"timestep_indices": _PACKED_ROWS},
        },
        outputs={"rope": _both(_PACKED_ROWS)},
        gathers={"proj_out": _PACKED, "audio_proj_out": _PACKED},
        blocks={_BLOCKS: ("packed",)},
        replicated=(_HIDDEN, "audio_hidden_states", _PROMPT, *_H3_REPLICATED),
        attends={"token_refiner": ()},
        unbatched=_H3_REPLICATED,
    ),
    "MochiTransformer3DModel": replace(
        _HUNYUAN_VIDEO,
        inputs={_FIRST: {_HIDDEN: _VIDEO, _PROMPT: _TEXT}},
        blocks={_BLOCKS: _VIDEO_TEXT},
        replicated=(*_LATENTS, "encoder_attention_mask"),
        attends={"time_embed": ()},
        nonempty=(),
        copied=("text",),  # each sample takes the tokens that its mask lets it see
    ),
    "OvisImageTransformer2DModel": _LIKE_FLUX,
    "PixArtTransformer2DModel": SplitTable(
        segments=("image",),
        inputs={},
        outputs={"pos_embed": {0: _IMAGE}},
        gathers={"proj_out": _IMAGE},
        blocks={_BLOCKS: ("image",)},
        replicated=(*_LATENTS, "added_cond_kwargs", "encoder_attention_mask"),
        attends={"transformer_blocks.*.attn2": ()},
        refused={"attention_mask": _PADDED_MASK},
    ),
    "QwenImageControlNetModel": replace(
        _QWEN_IMAGE,
        inputs={
            "": {_HIDDEN: _IMAGE, "encoder_hidden_states_mask": Mask("text")},
            _FIRST: {_PROMPT: _TEXT},
            "controlnet_x_embedder": {"input": _IMAGE},
        },
        gathers={"controlnet_blocks.*": _IMAGE},
        replicated=(_PROMPT, "timestep", _CONTROL),
    ),
    "QwenImageTransformer2DModel": _QWEN_IMAGE,
    "SD3ControlNetModel": replace(
        _SD3,
        inputs={"": {_PROMPT: _TEXT, _HIDDEN: Cut("image", ndim=3)}},
        outputs={"pos_embed": {0: _IMAGE}, "pos_embed_input": {0: _IMAGE}},
        gathers={"controlnet_blocks.*": _IMAGE},
        replicated=("pooled_projections", "timestep", _CONTROL),
    ),
    "SD3Transformer2DModel": _SD3,
    "SkyReelsV2Transformer3DModel": replace(
        _WAN,
        inputs={
            "blocks.0": {_HIDDEN: _VIDEO},
            "blocks.*": {"temb": Cut("video", dim=2, ndim=4)},
            "proj_out": {"input": _VIDEO},
        },
        # Modules after the last norm modulate frame by frame, by times that the model has whole.
        gathers={"norm_out": _VIDEO, "proj_out": _VIDEO},
        replicated=(*_WAN.replicated, "timestep", "fps"),
    ),
    "StableAudio3DiTModel": SplitTable(
        segments=_MEMORY_AUDIO,
        inputs={
            _BLOCKS: {
                "num_memory_tokens": Cut("memory", ndim=0),
                "rope": Cut(_MEMORY_AUDIO, dim=0),
                "local_seq": _AUDIO,
            },
            _FIRST: {_HIDDEN: Cut(_MEMORY_AUDIO)},
        },
        gathers={"transformer_blocks.-1": Cut(_MEMORY_AUDIO)},  # the model then drops the memory
        blocks={_BLOCKS: (_MEMORY_AUDIO,)},
        replicated=(*_LATENTS, _PROMPT_MASK[1], "global_hidden_states", "local_add_cond"),
        attends={"transformer_blocks.*.cross_attn": ()},
    ),
    "WanAnimateTransformer3DModel": replace(
        _WAN,
        inputs={"blocks.0": {_HIDDEN: _VIDEO}, "face_adapter.*.to_out": {"input": _VIDEO}},
        # A frame attends to its own face, so the queries of the faces are whole on every rank.
        gathers={"face_adapter.*.pre_norm_q": _VIDEO, "proj_out": _VIDEO},
        replicated=(*_WAN.replicated, "timestep", "pose_hidden_states", "face_pixel_values"),
        attends={"blocks.*.attn2": (), "face_adapter.*": ()},
    ),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(
        _WAN,
        inputs={
            "vace_blocks.0": dict.fromkeys((_HIDDEN, "control_hidden_states"), _VIDEO),
            "blocks.0": {_HIDDEN: _VIDEO},
        },
        blocks={"vace_blocks.*": ("video", "video"), "blocks.*": ("video",)},
        replicated=(*_WAN.replicated, "timestep", *_VACE_CONTROL),
        attends={"vace_blocks.*.attn2": (), "blocks.*.attn2": ()},
        unbatched=("control_hidden_states_scale",),
    ),
    "ZImageTransformer2DModel": SplitTable(
        segments=("all",),
        inputs={
            "": {"controlnet_block_samples": _ALL},
            "noise_refiner.*": dict.fromkeys(("x", "freqs_cis", "noise_mask"), _IMAGE),
            "layers.0": {"x": _ALL},
            "layers.*": dict.fromkeys(("freqs_cis", "noise_mask"), _ALL),
            "all_final_layer.*": {"noise_mask": _ALL},
        },
        gathers={"noise_refiner.*": _IMAGE, "all_final_layer.*": _ALL},
        blocks={"noise_refiner.*": ("image",), "layers.*": ("all",)},
        replicated=("x", "t", "cap_feats", "siglip_feats"),
        attends={"noise_refiner.*": ("image",), "context_refiner.*": (), "siglip_refiner.*": ()},
        listed=("x", "cap_feats", "siglip_feats"),
    ),
}

_LINEAR = "its linear attention sums over all tokens, and its feed-forwards are convolutions"
WITHOUT_TABLE: Mapping[str, str] = {  # reasons, by name of a class of diffusers
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "WanAnimate2Transformer3DModel": "it attends by flex attention, in a buffer of all tokens",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of DDP, torch.compile and PEFT."""
    wrapper: Any = model
    if isinstance(model, FullyShardedDataParallel):
        wrong = f"bascule cannot split a {type(model.module).__name__} that FSDP 1 shards"
        raise ConfigError(f"{wrong}: use fully_shard(model) (FSDP 2)")
    if isinstance(model, DistributedDataParallel):
        return unwrapped(wrapper.module)
    if isinstance(model, OptimizedModule):
        return unwrapped(wrapper._orig_mod)
    is_of_peft = type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model")
    return unwrapped(wrapper.get_base_model()) if is_of_peft else model


def table_of(model: nn.Module, table: SplitTable | Mapping[str, Any] | None = None) -> SplitTable:
    """Return the given table, the table of a diffusers plan, or the table of the model's class."""
    if isinstance(table, SplitTable):
        return table
    if table is not None:
        return table_from_plan(model, table)
    name = _class_name((*TABLES, *WITHOUT_TABLE), model)
    if getattr(model, "union", False):
        raise ConfigError(
            f"no split table for a {type(model).__name__} that is a union, whose text gets a token "
            "for its mode: do not split it, but only the transformer beside it"
        )
    if name in TABLES:
        return TABLES[name]
    kind = f"no split table for {type(model).__name__}"
    if name in WITHOUT_TABLE:
        raise ConfigError(f"{kind}: {WITHOUT_TABLE[name]}: run it on each rank, with other prompts")
    plan = getattr_static(model, "_cp_plan", None)  # not one that a wrapper passes on
    if plan is not None:
        return table_from_plan(model, plan)
    for path, module in model.named_modules():
        if name := _class_name(TABLES, module):
            raise ConfigError(f"{kind}, which holds a {name}: split that, its {path!r}")
    raise ConfigError(
        f"{kind}: write one for parallelize(.., table=SplitTable(..)), as in Adding a table of "
        "docs/sequence_parallel.md, or use context_parallel(mesh) around its calls"
    )


def _class_name(names: Collection[str], model: nn.Module) -> str:
    """Return the first diffusers class of a model's MRO that is in `names`; "" if none is."""
    of_diffusers = (cls for cls in type(model).__mro__ if cls.__module__.startswith("diffusers."))
    return next((cls.__name__ for cls in of_diffusers if cls.__name__ in names), "")
