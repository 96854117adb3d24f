"""TiledVAE: the tiles of a VAE's images and videos are computed by the ranks that have time.

The model's code cuts an image into tiles and blends them. It runs twice, with a wrapper in place of
its encoder or decoder: one records the calls of each tile, the other returns the computed tiles.
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
    """A replacement of a pipeline's module, with its class and state, but other `methods`."""

    def __init__(self, pipeline: Any, module: nn.Module, **methods: Callable[..., Any]) -> None:
        names = [name for name, value in vars(pipeline).items() if value is module]
        if isinstance(pipeline, nn.Module):
            names += [name for name, child in pipeline.named_children() if child is module]
        if not names:
            what = f"a {type(pipeline).__name__} does not have this {type(module).__name__}"
            raise ConfigError(f"{what}: install it in the pipeline that its module came from")
        self._pipeline, self._name, self._module = pipeline, names[0], module
        cls = type(module)
        members: dict[str, Any] = {"__module__": cls.__module__}
        members |= {name: staticmethod(method) for name, method in methods.items()}
        stand_in = object.__new__(type(cls.__name__, (cls,), members))
        stand_in.__dict__ = vars(module)
        setattr(pipeline, names[0], stand_in)

    def undo(self) -> None:
        """Give the pipeline its module back."""
        setattr(self._pipeline, self._name, self._module)


class TiledVAE:
    """A VAE of diffusers that encodes, or decodes, each tile on a rank that has time.

    The model's own code chooses tile sizes, cuts tiles and blends them. Ranks share all tiles by
    pixels. Results equal the model's with tiling, even if `enable_tiling()` was not called. A tile
    of a causal video VAE spans all frames. All ranks construct and call it at the same points.

    Args:
        vae: A VAE with tiling; weights, configuration and tiles are the same on all ranks.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        options: As for a BalancedEncoder. With `features_for="first"`, other ranks get an output
            without rows.

    Raises:
        RemoteConfigError: An argument is wrong on a rank; all ranks raise it.
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
        """The report of the last call."""
        return self._tiles.last

    def encode(self, x: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Encode x (B, C, .., H, W) as `vae.encode` with tiling; B may be 0.

        A sequence of tensors of different sizes gives `Features`; see `Features.attach` for
        gradients. Three small gathers, and two all-to-alls if tiles move.
        """
        return self._run("encode", x, args, kwargs)

    def decode(self, z: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Decode latents as `vae.decode` with tiling; see `encode`."""
        return self._run("decode", z, args, kwargs)

    def install(self, pipeline: Any) -> InPlace:
        """Use this in a pipeline, or another object with the VAE as an attribute, until `undo()`.

        The VAE does not change: the attribute becomes another object of its class and state.
        """
        return InPlace(pipeline, self.vae, encode=self.encode, decode=self.decode)

    @shared("a call of a TiledVAE")
    def _run(self, method: str, x: Tensor | Sequence[Tensor], args: Any, kwargs: Item) -> Any:
        samples, tiles, empty = list[Tensor](), list[Item](), list[Any]()
        error = None
        try:
            samples = [x] if isinstance(x, Tensor) else list(x)
            for sample in samples:
                cut, output = noted(self.vae, method, sample, *args, **kwargs)
                tiles += cut
                empty.append(mapped(output, lambda leaf: leaf[:0]))
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        most = max(map(len, samples), default=0)  # tiles of a call, as in the model's own calls
        features = self._tiles.encode(tiles, None, error, call=method, inputs=samples, at_once=most)
        answers, has_answers = deque[Tensor](features), bool(features)
        features.clear()  # each tile is freed once it was blended
        outputs = list[Any]()
        for sample, nothing in zip(samples, empty, strict=True):
            rows = sample.split(1) if has_answers and len(sample) else ()
            results = [answered(self.vae, answers, method, row, *args, **kwargs) for row in rows]
            outputs.append(joined(results) if results else nothing)
        if isinstance(x, Tensor):
            return features.attach(outputs[0])
        return Features(features.attach(outputs), features.token, None)


_CACHE = "feat_cache"  # argument: a list that calls for a tile's next frames share and change
_HANDED = "conv_cache"  # argument: what the call for the frames before returned with its output


class TileCalls(nn.Module):
    """Computes a tile by repeating the VAE's calls of its encoder, or decoder, for this tile."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, part: str, calls: Sequence[Item], **tensors: Tensor) -> Tensor:
        """Call the "encoder" or "decoder" several times; join outputs along time: (1, C, .., h, w).

        `tensors` holds argument NAME of call NUMBER as "NUMBER.NAME", and its first argument as
        "NUMBER."; `calls` holds the arguments that are not tensors.
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
    """Check a VAE's tiles, and describe the settings that must be the same on all ranks."""
    vae: Any = calls.vae
    name = type(vae).__name__
    parts = getattr(vae, "_modules", {})
    if not hasattr(vae, "use_tiling") or not {"encoder", "decoder"} <= parts.keys():
        fix = "that has enable_tiling, or encode whole images with BalancedEncoder"
        what = f"a {name} cannot tile (needs use_tiling, encoder, decoder)"
        raise ConfigError(f"{what}: give a VAE of diffusers {fix}")
    sizes = {key: value for key, value in vars(vae).items() if key.startswith(("tile_", "use_f"))}
    for key, size in sizes.items():
        may_be_0 = key.startswith("use_") or "overlap" in key
        numbers: Any = size if isinstance(size, tuple | list) else (size,)
        if not all(isinstance(n, int | float) and (n > 0 or may_be_0) for n in numbers):
            raise ConfigError(f"{key} of the {name} is {size!r}: a tile needs a number above 0")
        least = sizes.get(key.replace("_stride_", "_min_"), size)
        if size > least:
            what = f"{key} of the {name} is {size}, more than its tile size {least}"
            raise ConfigError(f"{what}: give enable_tiling a smaller stride")
    config = {k: v for k, v in vae.config.items() if not k.startswith(("_", "latents_"))}
    return f"{name} with {sizes}, {dict(sorted(config.items()))}"


def pixels_of(calls: nn.Module, tile: Mapping[str, Any]) -> int:
    """Count a tile's pixels, or latents: the time of its convolutions is proportional to it."""
    vae: Any = calls.vae
    firsts = [x for name, x in tile.items() if name.endswith(".")]
    frames = sum(x.shape[2] if x.dim() == 5 else 1 for x in firsts)
    if tile["part"] == "decoder":  # a causal decoder makes one frame of the first latent
        frames = 1 + (frames - 1) * 2 ** sum(getattr(vae, "temperal_downsample", ()))
    return frames * firsts[0].shape[-2:].numel()


def noted(
    vae: nn.Module, method: str, x: Tensor, *args: Any, **kwargs: Any
) -> tuple[list[Item], Any]:
    """Return the tiles that the model cuts from samples (B, C, .., H, W), and an empty output."""
    tiles: list[Item] = []
    output = None
    for sample in x.split(1) if len(x) else [x]:
        recorder = _Recorder(vae, method)
        try:
            output = getattr(recorder.model, method)(sample, *args, **kwargs)
        except Exception as error:
            what = f"the {type(vae).__name__} cannot {method} a sample of shape {tuple(x.shape)}"
            raise ConfigError(f"{what} in its tiles: {error}") from error
        tiles += [_as_item(recorder.part, calls) for calls in recorder.tiles if len(x)]
    return tiles, output


def answered(
    vae: nn.Module, answers: deque[Tensor], method: str, sample: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the model's output for a sample, blended from the computed tiles in `answers`."""
    return getattr(_Player(vae, method, answers).model, method)(sample, *args, **kwargs)


def _as_item(part: str, calls: Sequence[Item]) -> Item:
    """Return a tile as arguments of `TileCalls`."""
    tensors, plain = Item(), list[Item]()
    for number, call in enumerate(calls):
        moving = {name: x for name, x in call.items() if isinstance(x, Tensor)}
        tensors |= {f"{number}.{name}": x for name, x in moving.items()}
        left_out = moving.keys() | ({_CACHE, _HANDED} if number else set())
        plain.append({name: value for name, value in call.items() if name not in left_out})
    for x in tensors.values():
        if not x.numel():
            fix = "the tile sizes do not fit this model: choose larger ones in enable_tiling"
            raise ConfigError(f"a tile of shape {tuple(x.shape)} is empty: {fix}")
    return {"part": part, "calls": plain, **tensors}


class _TiledPart(nn.Module):
    """A stand-in for the `real` encoder or decoder, in `model`, a shallow copy of the VAE."""

    def __init__(self, vae: nn.Module, method: str) -> None:
        super().__init__()
        self.part = "encoder" if method == "encode" else "decoder"
        self.real: Any = vae._modules[self.part]
        modules = {
            name: child if child is None else _SkipEmpty(child)
            for name, child in vae._modules.items()
        }
        model: Any = object.__new__(type(vae))
        model.__dict__ |= {**vars(vae), "_modules": {**modules, self.part: self}}
        model.use_tiling = True
        object.__setattr__(self, "model", model)
        self._cache: Any = None
        self._hands = _HANDED in inspect.signature(type(self.real).forward).parameters

    def _begins(self, call: Item) -> bool:
        """Return whether a call begins a tile: it takes no cache from the call before."""
        if self._hands:
            return _HANDED not in call
        before, self._cache = self._cache, call.get(_CACHE)
        return self._cache is None or self._cache is not before

    def _output(self, x: Tensor) -> Any:
        """Return an output as the real part does: alone, or with what the next call takes."""
        return (x, {}) if self._hands else x

    def _named(self, args: Sequence[Any], kwargs: Item) -> Item:
        """Return the arguments by name; the first one's name is empty."""
        named = called_with(type(self.real).forward.__get__(self.real), args, kwargs)
        first, *others = named
        return {"": named[first], **{name: named[name] for name in others}}


class _SkipEmpty(nn.Module):
    """A wrapper of another part of the model, which is not called for a tensor without values."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.real(x, *args, **kwargs) if x.numel() else x


class _Recorder(_TiledPart):
    """A stand-in that records the calls for every tile, and returns outputs without pixels."""

    def __init__(self, vae: nn.Module, method: str) -> None:
        super().__init__(vae, method)
        self.tiles: list[list[Item]] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self._named((x, *args), kwargs)
        if self._begins(call):
            self.tiles.append([])
        self.tiles[-1].append(call)
        channels = getattr(getattr(self.real, "conv_out", None), "out_channels", 2 * x.shape[1])
        return self._output(x.new_empty(len(x), channels, *x.shape[2:-2], 0, 0))


class _Player(_TiledPart):
    """A stand-in that returns all frames of a tile at the tile's first call, and then no frames."""

    def __init__(self, vae: nn.Module, method: str, answers: deque[Tensor]) -> None:
        super().__init__(vae, method)
        self._answers, self._no_frames = answers, torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._begins(self._named(args, kwargs)):
            return self._output(self._no_frames)
        tile = self._answers.popleft()
        self._no_frames = tile.new_empty(*tile.shape[:2], 0, *tile.shape[3:])
        return self._output(tile)
