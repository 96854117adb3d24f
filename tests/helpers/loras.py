"""Tiny LoRA files of peft for the tiny Flux, with random weights that change pixels clearly."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bascule.generate.options import Lora
from bascule.generate.tiny import TINY
from tests.helpers.serving import pipeline_of

ATTENTION = "to_q", "to_v", "to_out.0"


def save_lora(
    folder: Path, seed: int, targets: Sequence[str] = ATTENTION, *, text: bool = False
) -> Path:
    """Save an adapter of rank 4 into a folder as diffusers does; `text`: of the encoder, too."""
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = pipeline_of(TINY)
    models = {"transformer": (pipeline.transformer, targets)}
    if text:
        models["text_encoder"] = (pipeline.text_encoder, ("q_proj", "v_proj"))
    layers: dict[str, Any] = {}
    for name, (model, names) in models.items():
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=list(names)))
        layers[f"{name}_lora_layers"] = tensors = get_peft_model_state_dict(model)
        draw = torch.Generator().manual_seed(seed)
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
    pipeline.save_lora_weights(
        folder,
        **layers,
        **_collate_lora_metadata({name: model for name, (model, _) in models.items()}),
    )
    return folder


def reference(paths: Mapping[str, Path]) -> Any:
    """The tiny Flux with adapters that diffusers loaded itself."""
    pipeline = pipeline_of(TINY)
    with warnings.catch_warnings(action="ignore"):  # of peft, at the second adapter
        for name, path in paths.items():
            pipeline.load_lora_weights(path, adapter_name=name)
    return pipeline


def choose(pipeline: Any, choice: Sequence[Lora]) -> Any:
    """The pipeline of `reference` with these adapters alone."""
    if choice:
        pipeline.enable_lora()
        pipeline.set_adapters([one.name for one in choice], [one.scale for one in choice])
    else:
        pipeline.disable_lora()
    return pipeline
