"""TiledVAE: the tiles of a VAE's images and videos are computed by the ranks that have time.

The model cuts an image into tiles and blends them. It runs twice, with a stand-in for its encoder,
or decoder: one notes the calls of each tile, the other returns the tiles that ranks computed.
"""

import copy
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.failures import shared
from bascule.comm.items import joined, mapped
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.items import EncoderTable, Features, Item, called_with
from bascule.encoders.plan import Encoding
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost

_PIXELS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)
_DEFAULT = EncoderOptions()


class InPlace:
    """Puts `methods`, which take no `self`, in place of a module's, by a stand-in of its class."""

    def __init__(
        self, pipeline: Any, module: nn.Module, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        names = [name for name, value in vars(pipeline).items() if value is module]
        if isinstance(pipeline, nn.Module):
            names += [name for name, child in pipeline.named_children() if child is module]
        if not names:
            raise ConfigError(
                f"a {type(pipeline).__name__} does not have this {type(module).__name__}: "
                "install in the pipeline whose module it was made with"
            )
        self._pipeline, self._name, self._module = pipeline, names[0], module
        cls = type(module)
        members = {name: staticmethod(method) for name, method in methods.items()}
        members = {"__module__": cls.__module__, **members}
        stand_in = object.__new__(type(cls.__name__, (cls,), members))
        stand_in.__dict__ = vars(module)
        setattr(pipeline, names[0], stand_in)

    def undo(self) -> None:
        """Put the module back into its place."""
        setattr(self._pipeline, self._name, self._module)


class TiledVAE:
    """A VAE of diffusers whose tiles are items of a BalancedEncoder, encoded and decoded alike.

    The model's own code cuts and blends tiles, whose sizes are its own. Those of all ranks are one
    pool, spread by pixels. Results are the model's tiled ones, whether or not it has
    `enable_tiling()`. A tile of a causal video VAE is all of its frames. All ranks make it, and
    call it, at the same points.

    Args:
        vae: Has tiles; the same weights, configuration and tiles on all ranks. It is not edited.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        options: Those of the BalancedEncoder. With `features_for="first"`, other ranks get an
            output without rows.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    @shared("construction of a TiledVAE")
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
            options=replace(options, table=EncoderTable(length=pixels_of, settings=settings_of)),
        )

    @property
    def last(self) -> Encoding | None:
        """The items that the last call moved."""
        return self._tiles.last

    def encode(self, x: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return the output of `vae.encode` of x (B, C, .., H, W), made of tiles; B may be 0.

        A sequence of tensors of unlike sizes gives `Features`, one output each; with gradients,
        `attach` the loss of a rank without samples. Three small gathers, two all-to-alls where
        tiles move.
        """
        return self._run("encode", x, args, kwargs)

    def decode(self, z: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return the output of `vae.decode` of latents, made of tiles; as `encode`."""
        return self._run("decode", z, args, kwargs)

    def install(self, pipeline: Any) -> InPlace:
        """Use this in a pipeline, or whatever has the VAE as an attribute, until `undo()`.

        Neither is edited: an object of the VAE's class, with the same state, is in its place.
        """
        return InPlace(pipeline, self.vae, {"encode": self.encode, "decode": self.decode})

    @shared("a call of a TiledVAE")
    def _run(
        self, way: str, x: Tensor | Sequence[Tensor], args: tuple[Any, ...], kwargs: Item
    ) -> Any:
        is_one = isinstance(x, Tensor)
        samples, tiles, empty = list[Tensor](), list[Item](), list[Any]()
        error = None
        try:
            samples = [x] if isinstance(x, Tensor) else list(x)
            for sample in samples:
                cut, output = noted(self.vae, way, sample, *args, **kwargs)
                tiles += cut
                empty.append(mapped(output, lambda leaf: leaf[:0]))
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        most = max(map(len, samples), default=0)  # as many as the model itself has in a call
        features = self._tiles.encode(tiles, None, error, call=way, inputs=samples, at_once=most)
        answers, is_mine = deque[Tensor](features), bool(features)
        features.clear()
        outputs = list[Any]()
        for sample, nothing in zip(samples, empty, strict=True):
            rows = sample.split(1) if is_mine and len(sample) else ()
            results = [answered(self.vae, answers, way, row, *args, **kwargs) for row in rows]
            outputs.append(joined(results) if results else nothing)
        if is_one:
            return features.attach(outputs[0])
        return Features(features.attach(outputs), features.token, None)


_CACHE = "feat_cache"  # a list that causal VAEs hand to a tile's next frames, and calls change
_HANDED = "conv_cache"  # argument that a call gives back beside its output, for the next one


class TileCalls(nn.Module):
    """Computes a tile: the calls that the VAE makes of its encoder, or decoder, for it."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, part: str, calls: Sequence[Item], **tensors: Tensor) -> Tensor:
        """Call the "encoder" or "decoder" several times; join outputs along time: (1, C, .., h, w).

        Tensors of a call come as "NUMBER.NAME", its first argument as "NUMBER."; others in `calls`.
        """
        module, arguments = getattr(self.vae, part), copy.deepcopy(list(calls))
        for name, x in tensors.items():
            number, _, key = name.partition(".")
            arguments[int(number)][key] = x
        cache = {key: arguments[0][key] for key in arguments[0].keys() & {_CACHE}}
        outputs = list[Tensor]()
        for call in arguments:
            output = module(call.pop(""), **call | cache)
            if isinstance(output, tuple):
                output, cache = output[0], {_HANDED: output[1]}
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def settings_of(calls: nn.Module) -> str:
    """Describe the settings that VAEs of all ranks must have in common."""
    vae: Any = calls.vae
    name = type(vae).__name__
    parts = getattr(vae, "_modules", {})
    if not hasattr(vae, "use_tiling") or not {"encoder", "decoder"} <= parts.keys():
        raise ConfigError(
            f"a {name} has no tiles (no use_tiling, encoder and decoder): give a VAE of diffusers "
            "that has enable_tiling, or encode whole images with BalancedEncoder"
        )
    sizes = {key: value for key, value in vars(vae).items() if key.startswith(("tile_", "use_f"))}
    for key, size in sizes.items():
        may_be_0 = key.startswith("use_") or "overlap" in key
        numbers: Any = size if isinstance(size, tuple | list) else (size,)
        if not all(isinstance(n, int | float) and (n > 0 or may_be_0) for n in numbers):
            raise ConfigError(f"{key} of the {name} is {size!r}: a tile needs a number above 0")
        least = sizes.get(key.replace("_stride_", "_min_"), size)
        if size > least:
            raise ConfigError(
                f"{key} of the {name} is {size}, more than its tiles of {least}, which would leave "
                "gaps: choose a smaller stride in enable_tiling"
            )
    config = {k: v for k, v in vae.config.items() if not k.startswith(("_", "latents_"))}
    return f"{name} with {sizes}, {dict(sorted(config.items()))}"


def pixels_of(calls: nn.Module, tile: Mapping[str, Any]) -> int:
    """Count the pixels, or latents, of a tile, by which its convolutions take their time."""
    vae: Any = calls.vae
    firsts = [x for name, x in tile.items() if name.endswith(".")]
    frames = sum(x.shape[2] if x.dim() == 5 else 1 for x in firsts)
    if tile["part"] == "decoder":  # a causal one makes one frame of the first latent
        frames = 1 + (frames - 1) * 2 ** sum(getattr(vae, "temperal_downsample", ()))
    return frames * firsts[0].shape[-2:].numel()


def noted(vae: nn.Module, way: str, x: Tensor, *args: Any, **kwargs: Any) -> tuple[list[Item], Any]:
    """Return the tiles that the model makes of samples (B, C, .., H, W), and its output of none."""
    tiles: list[Item] = []
    output = None
    for sample in x.split(1) if len(x) else [x]:
        notes = _Notes(vae, way)
        try:
            output = getattr(notes.model, way)(sample, *args, **kwargs)
        except Exception as error:
            raise ConfigError(
                f"the {type(vae).__name__} cannot {way} a sample of shape {tuple(x.shape)} in its "
                f"tiles: {error}"
            ) from error
        tiles += [_as_item(notes.part, calls) for calls in notes.tiles if len(x)]
    return tiles, output


def answered(
    vae: nn.Module, answers: deque[Tensor], way: str, sample: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the model's output of a sample, with tiles from the answers."""
    return getattr(_Answers(vae, way, answers).model, way)(sample, *args, **kwargs)


def _as_item(part: str, calls: Sequence[Item]) -> Item:
    """Return a tile that can travel."""
    tensors, plain = Item(), list[Item]()
    for number, call in enumerate(calls):
        moving = {name: x for name, x in call.items() if isinstance(x, Tensor)}
        tensors |= {f"{number}.{name}": x for name, x in moving.items()}
        left_out = moving.keys() | ({_CACHE, _HANDED} if number else set())
        plain.append({name: value for name, value in call.items() if name not in left_out})
    for x in tensors.values():
        if not x.numel():
            raise ConfigError(
                f"a tile of shape {tuple(x.shape)} is empty: its sizes do not fit this model; "
                "choose larger ones in enable_tiling"
            )
    return {"part": part, "calls": plain, **tensors}


class _TiledPart(nn.Module):
    """The encoder or decoder of `model`, a copy of the VAE that tiles; models look into `real`."""

    def __init__(self, vae: nn.Module, way: str) -> None:
        super().__init__()
        self.part = "encoder" if way == "encode" else "decoder"
        self.real: Any = vae._modules[self.part]
        modules = {
            name: None if child is None else _Around(child) for name, child in vae._modules.items()
        }
        model: Any = object.__new__(type(vae))
        model.__dict__ |= {**vars(vae), "_modules": {**modules, self.part: self}}
        model.use_tiling = True
        object.__setattr__(self, "model", model)
        self._cache: Any = None
        self._hands = _HANDED in inspect.signature(type(self.real).forward).parameters

    def _begins(self, call: Item) -> bool:
        """Return True if a call begins a tile: it takes nothing of the call before."""
        if self._hands:
            return _HANDED not in call
        before, self._cache = self._cache, call.get(_CACHE)
        return self._cache is None or self._cache is not before

    def _output(self, x: Tensor) -> Any:
        """Return an output in the form of the real part's."""
        return (x, {}) if self._hands else x

    def _named(self, args: Sequence[Any], kwargs: Item) -> Item:
        """Return the arguments by name, but for the first."""
        named = called_with(type(self.real).forward.__get__(self.real), args, kwargs)
        first, *others = named
        return {"": named[first], **{name: named[name] for name in others}}


class _Around(nn.Module):
    """Stands around another part of the model: is not called where there is nothing to compute."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.real(x, *args, **kwargs) if x.numel() else x


class _Notes(_TiledPart):
    """Notes the calls of every tile, and returns outputs without pixels: nothing to blend."""

    def __init__(self, vae: nn.Module, way: str) -> None:
        super().__init__(vae, way)
        self.tiles: list[list[Item]] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self._named((x, *args), kwargs)
        if self._begins(call):
            self.tiles.append([])
        self.tiles[-1].append(call)
        channels = getattr(getattr(self.real, "conv_out", None), "out_channels", 2 * x.shape[1])
        return self._output(x.new_empty(len(x), channels, *x.shape[2:-2], 0, 0))


class _Answers(_TiledPart):
    """Gives a whole tile in place of its first frames, and no frames in place of the others."""

    def __init__(self, vae: nn.Module, way: str, answers: deque[Tensor]) -> None:
        super().__init__(vae, way)
        self._left, self._rest = answers, torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._begins(self._named(args, kwargs)):
            return self._output(self._rest)
        tile = self._left.popleft()
        self._rest = tile.new_empty(*tile.shape[:2], 0, *tile.shape[3:])
        return self._output(tile)
