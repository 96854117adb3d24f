"""The mesh of `parallelize(pipeline, "auto")`: what a model is, for `choose_mesh`."""

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from bascule.diffusers.degrees import Shape
from bascule.errors import ConfigError
from bascule.plan.machine import HardwareProfile
from bascule.plan.mesh_choice import DenoisingStep, MeshChoice, choose_mesh

_LAYERS = "num_layers", "num_single_layers", "num_refiner_layers"


@dataclass(frozen=True, slots=True)
class AutoMesh:
    """What `parallelize` should know to choose the degrees of all ranks, as one replica.

    Attributes:
        num_passes: Forward passes of one sample in a step: 2 with guidance, times the images of a
            prompt where these share a call. Default: 1, without guidance.
        num_tokens: Of a sample, text included; needed with a profile.
        profile: What the machine does in a second. Default: a rule chooses, see `choose_mesh`.
        max_ring_degree: Longest ring. Default: any.
        ranks_per_node: Ranks of a node. Default: as torchrun says (LOCAL_WORLD_SIZE), or all.
    """

    num_passes: int = 1
    num_tokens: int | None = None
    profile: HardwareProfile | None = None
    max_ring_degree: int | None = None
    ranks_per_node: int | None = None

    def choose(self, model: nn.Module, num_ranks: int) -> tuple[Shape, MeshChoice]:
        """The mesh of a model on so many ranks, and why.

        Raises:
            ConfigError: No mesh fits, the model does not tell its heads, or a number is missing.
        """
        config: Any = getattr(model, "config", None)
        num_heads = getattr(config, "num_attention_heads", None)
        if num_heads is None:
            raise ConfigError(
                f"mesh='auto': a {type(model).__name__} does not say its num_attention_heads in "
                "its config: give degrees"
            )
        if self.profile is not None and self.num_tokens is None:
            raise ConfigError("AutoMesh(profile=..) without num_tokens: say how many a sample has")
        head_dim = getattr(config, "attention_head_dim", None)
        layers = sum(getattr(config, name, None) or 0 for name in _LAYERS)
        if self.profile is not None and not (head_dim and layers):
            raise ConfigError(
                f"AutoMesh(profile=..): a {type(model).__name__} does not say attention_head_dim "
                "and num_layers in its config: leave out the profile, or give degrees"
            )
        step = DenoisingStep(
            num_tokens=self.num_tokens or 1,
            num_heads=num_heads,
            head_dim=head_dim or 1,
            num_layers=layers or 1,
            num_passes=self.num_passes,
        )
        in_node = self.ranks_per_node
        if in_node is None:
            in_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        choice = choose_mesh(
            step,
            num_ranks,
            ranks_per_node=in_node,
            max_ring_degree=self.max_ring_degree,
            profile=self.profile,
        )
        mesh = choice.chosen
        return Shape(1, mesh.guidance, mesh.ring, mesh.ulysses), choice
