"""Models that are split by the plan which diffusers has for them."""

import torch
from torch import nn

from tests.helpers.model_case import CHANNELS, TEXT_DIM, Case, Draw, Inputs, Makes, built

PLAN = "plan"  # option: by the plan of its class, also where there is a table of our own

# Text as long as the image, lengths and heads that do not divide, fewer tokens than ranks.
CASES = [
    Case("flux", 5, 2, 7, (3, 5), (PLAN,)),
    Case("flux2", 5, 2, 9, (3, 3), (PLAN,)),
    Case("qwen", 5, 2, 7, (3, 5), (PLAN,)),
    Case("qwen", 4, 1, 9, (3, 3), (PLAN, "zero_cond")),
    Case("wan", 5, 2, 7, (3, 5), (PLAN,)),
    Case("wan", 4, 2, 3, (1, 1), (PLAN, "token_times")),
    Case("ltx by plan", 5, 2, 6, (1, 3)),
    Case("ltx by plan", 4, 1, 3, (3, 5), ("mask",)),
]


def plan_of(case: Case, model: nn.Module) -> dict[str, object] | None:
    """What `table=` is to be."""
    return type(model)._cp_plan if PLAN in case.options else None  # pyright: ignore


def _ltx(case: Case) -> nn.Module:
    return built(
        "LTXVideoTransformer3DModel",
        case,
        cross_attention_dim=16 * case.heads,
        caption_channels=TEXT_DIM,
    )


def _ltx_inputs(case: Case, draw: Draw) -> Inputs:
    frames, (rows, columns) = 2, case.grid
    mask = torch.ones(case.batch, case.text, dtype=torch.long)
    if "mask" in case.options:
        mask[:, 1:] = draw(case.batch, case.text - 1) < 0.3
    return {
        "hidden_states": draw(case.batch, frames * rows * columns, CHANNELS),
        "encoder_hidden_states": draw(case.batch, case.text, TEXT_DIM),
        "timestep": draw(case.batch).abs() * 100,
        "encoder_attention_mask": mask,
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


MODELS: Makes = {
    "ltx by plan": (_ltx, _ltx_inputs),
}
