"""Split tables of ControlNets: what they give for each block is gathered."""

from collections.abc import Mapping

from bascule.diffusers.image_models import FLUX, QWEN_IMAGE, SD3
from bascule.diffusers.split_table import Cut, Mask, SplitTable

_SAMPLES = ("controlnet_blocks.*", "controlnet_single_blocks.*")
_CONDITION = {"controlnet_x_embedder": {"input": Cut("image")}}

FLUX_CONTROLNET = SplitTable(
    segments=FLUX.segments,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
            "img_ids": Cut("image", dim=-2),
            "txt_ids": Cut("text", dim=-2),
        },
        **_CONDITION,
    },
    gathers=dict.fromkeys(_SAMPLES, Cut("image")),
    blocks=FLUX.blocks,
    whole=(*FLUX.whole, "controlnet_cond"),
    unbatched=FLUX.unbatched,
    refused={"controlnet_mode": "its text has one token more: call the model before parallelize"},
)

QWEN_IMAGE_CONTROLNET = SplitTable(
    segments=QWEN_IMAGE.segments,
    inputs={
        "": {"hidden_states": Cut("image"), "encoder_hidden_states_mask": Mask("text")},
        "transformer_blocks.0": {"encoder_hidden_states": Cut("text")},
        **_CONDITION,
    },
    outputs=QWEN_IMAGE.outputs,
    gathers={"controlnet_blocks.*": Cut("image")},
    blocks=QWEN_IMAGE.blocks,
    whole=("encoder_hidden_states", "timestep", "controlnet_cond"),
)

SD3_CONTROLNET = SplitTable(
    segments=SD3.segments,
    inputs={"": {"encoder_hidden_states": Cut("text"), "hidden_states": Cut("image", ndim=3)}},
    outputs={"pos_embed": {0: Cut("image")}, "pos_embed_input": {0: Cut("image")}},
    gathers={"controlnet_blocks.*": Cut("image")},
    blocks=SD3.blocks,
    whole=("pooled_projections", "timestep", "controlnet_cond"),
    attends=SD3.attends,
)

TABLES: Mapping[str, SplitTable] = {
    "controlnet_flux.FluxControlNetModel": FLUX_CONTROLNET,
    "controlnet_qwenimage.QwenImageControlNetModel": QWEN_IMAGE_CONTROLNET,
    "controlnet_sd3.SD3ControlNetModel": SD3_CONTROLNET,
}
"""By class, within `diffusers.models.controlnets`."""
