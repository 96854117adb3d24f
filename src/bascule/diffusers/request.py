"""A request to split a model or pipeline, which ranks compare before anything is split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from bascule.attention.api import AttentionOptions
from bascule.checks import choice, number, of_type
from bascule.comm.values import values_digest
from bascule.diffusers.degrees import ONE_RANK, Shape
from bascule.diffusers.guidance import check_guided
from bascule.diffusers.pipeline_run import TRANSFORMERS, shared_parts
from bascule.diffusers.sparse_layers import SparseConfig, settings_of
from bascule.diffusers.split_model import check_model
from bascule.diffusers.split_table import SplitTable
from bascule.diffusers.tables import unwrapped
from bascule.errors import ConfigError
from bascule.machine.mesh_choice import MeshChoice

_DEFAULT = AttentionOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `parallelize`, checked as far as one rank can."""

    models: Sequence[nn.Module]
    tables: Sequence[SplitTable]  # of each model
    shape: Shape = ONE_RANK
    attention: AttentionOptions = _DEFAULT
    sparse: SparseConfig | None = None
    vae: Literal["all", "first", "own"] = "all"
    text_encoders: Literal["all", "own"] = "own"
    input_tolerance: float = 0.0
    pipeline: Any = None  # None: one model alone
    choice: MeshChoice | None = None  # the reason for the shape, if AutoMesh chose it

    def __post_init__(self) -> None:
        choice("vae", self.vae, "all", "first", "own")
        choice("text_encoders", self.text_encoders, "all", "own")
        number("input_tolerance", self.input_tolerance, 0.0, 1.0)
        if self.sparse is not None:
            of_type("sparse", self.sparse, SparseConfig, "a SparseConfig(keep=..) or another one")
        for model, table in zip(self.models, self.tables, strict=True):
            name, ulysses = type(model).__name__, self.shape.ulysses
            config = getattr(model, "_parallel_config", None)
            if config is not None and getattr(config, "context_parallel_config", None) is None:
                wrong = f"the weights of {name} are sharded by {type(config).__name__} of diffusers"
                raise ConfigError(f"{wrong}: load it without that; fully_shard(model) shards, too")
            num_heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
            if num_heads is not None and num_heads < ulysses:
                wrong = f"{name} has too few heads, {num_heads} for {ulysses} Ulysses ranks"
                raise ConfigError(f"{wrong}: use ulysses_degree={num_heads} at most, and a ring")
            check_model(model, table)
            if self.shape.guidance > 1:
                check_guided(model)

    def settings(self) -> dict[str, str]:
        """Return the settings that must be the same on all ranks, as text by name."""
        parts = shared_parts(self.pipeline, self.vae, self.text_encoders)
        return {
            "models": ", ".join(map(_size_text, self.models)),
            "weights": ", ".join(map(values_digest, self.models)),
            "tables": str(self.tables),
            "mesh": str(self.shape),
            "attention": str(self.attention),
            "input_tolerance": str(self.input_tolerance),
            "vae and text_encoders": f"{self.vae}, {self.text_encoders}",
            "shared parts": ", ".join(map(_size_text, parts)),
            **settings_of(self.sparse),
        }


def models_of(model_or_pipeline: Any) -> list[nn.Module]:
    """Return a model, or the transformers of a pipeline, without their wrappers."""
    if isinstance(model_or_pipeline, nn.Module):
        return [unwrapped(model_or_pipeline)]
    parts = [getattr(model_or_pipeline, name, None) for name in TRANSFORMERS]
    models = [unwrapped(part) for part in parts if isinstance(part, nn.Module)]
    if not models:
        name = type(model_or_pipeline).__name__
        needed = "parallelize needs a model, or a pipeline with a `transformer`"
        raise ConfigError(f"{needed}; {name} has none: give the model itself")
    return models


def _size_text(model: nn.Module) -> str:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return f"{type(model).__name__} with {sum(sizes)} values in {len(sizes)} parameters"
