"""TiledVAE: the tiles of a VAE's images and videos are computed by the ranks that have time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.guard.failures import told
from bascule.comm.samples.nests import joined, mapped
from bascule.encoders.balanced_encoder import BalancedEncoder
from bascule.encoders.encoder_tables import EncoderOptions, EncoderTable, Item
from bascule.encoders.features import Features
from bascule.encoders.installed import InPlace
from bascule.encoders.item_plans import Encoding
from bascule.encoders.tile_calls import TileCalls, answered, noted, pixels_of, settings_of
from bascule.errors import ConfigError
from bascule.plan.costs.cost_models import PolynomialCost

_PIXELS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)
_TABLE = EncoderTable(length=pixels_of, settings=settings_of)
_DEFAULT = EncoderOptions()


class TiledVAE:
    """A VAE of diffusers whose tiles are items of a BalancedEncoder, encoded and decoded alike.

    The model's own code cuts images into tiles, and blends them; the tiles of all ranks are one
    pool, spread by their pixels. Results are the model's own tiled ones, whether or not it has
    `enable_tiling()`; a sample no larger than a tile is one item, computed whole. A tile of a
    causal video VAE is all of its frames. All ranks make it, and call it, at the same points.

    Attributes:
        vae: The model, unedited. Sizes of tiles are its own.

    Args:
        vae: Has tiles; the same weights, configuration and tiles on all ranks.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        options: Those of the BalancedEncoder. With `features_for="owner"` each rank gives images of
            its own, and gets theirs. With "all" each gives the same, and gets the result; with
            "first" only the first rank gets it, and the others an output without rows.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    @told("construction of a TiledVAE")
    def __init__(
        self,
        vae: Any,
        *,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
        options: EncoderOptions = _DEFAULT,
    ) -> None:
        if options.table is not None:
            raise ConfigError("the items of a TiledVAE are its tiles: leave out options.table")
        self.vae = vae
        self._tiles = BalancedEncoder(
            TileCalls(vae),
            cost=_PIXELS,
            mesh_or_group=mesh_or_group,
            options=replace(options, table=_TABLE),
        )

    @property
    def last(self) -> Encoding | None:
        """What the last call moved."""
        return self._tiles.last

    @told("a call of a TiledVAE")
    def encode(self, x: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """What `vae.encode` gives with its tiles.

        Three small gathers; an all-to-all where tiles move, and one of what was made of them.

        Args:
            x: (B, C, .., H, W), B may be 0; or several of unlike sizes, also none.
            args: Further arguments of `vae.encode`, as `return_dict`.
            kwargs: Likewise.

        Returns:
            The model's output; several of them as `Features`, if several were given. With
            gradients, a rank that gave none lets its loss take part by their `attach`.

        Raises:
            ConfigError: Something is wrong here. RemoteConfigError: on another rank.
            CommError: A tile failed on a rank (on all ranks), ranks disagree, or one is gone.
        """
        return self._run("encode", x, args, kwargs)

    @told("a call of a TiledVAE")
    def decode(self, z: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """What `vae.decode` gives with its tiles; as `encode`, of latents."""
        return self._run("decode", z, args, kwargs)

    def install(self, pipeline: Any) -> InPlace:
        """Let a pipeline, or whatever else has the VAE as an attribute, use this one from now on.

        Neither is edited: another object of the VAE's class is in its place, with the same modules
        and settings, whose `encode` and `decode` are these.

        Returns:
            Its `undo()` puts the VAE back.

        Raises:
            ConfigError: The pipeline does not have the VAE.
        """
        return InPlace(pipeline, self.vae, {"encode": self.encode, "decode": self.decode})

    def _run(
        self, way: str, given: Tensor | Sequence[Tensor], args: tuple[Any, ...], kwargs: Item
    ) -> Any:
        is_one = isinstance(given, Tensor)
        samples, tiles, empty = list[Tensor](), list[Item](), list[Any]()
        error = None
        try:
            samples = [given] if isinstance(given, Tensor) else list(given)
            for x in samples:
                own, output = noted(self.vae, way, x, *args, **kwargs)
                tiles += own
                empty.append(mapped(output, lambda leaf: leaf[:0]))
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        most = max(map(len, samples), default=0)  # as many as the model itself has in a call
        features = self._tiles.encode(tiles, None, error, way, samples, at_once=most)
        answers, is_mine = deque[Tensor](features), bool(features)
        features.clear()
        outputs = list[Any]()
        for x, nothing in zip(samples, empty, strict=True):
            rows = x.split(1) if is_mine and len(x) else ()
            own = [answered(self.vae, answers, way, one, *args, **kwargs) for one in rows]
            outputs.append(joined(own) if own else nothing)
        if is_one:
            return features.attach(outputs[0])
        return Features(features.attach(outputs), features.token, None)
