"""A pipeline's call as a scope: one noise on all ranks, its phases timed, its other models shared.

All ranks of a replica run the same program, so random states that are equal when it starts stay
equal. The ranks share the work of the VAE and of the text encoders.
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bascule.comm import groups
from bascule.comm.agree import agree
from bascule.comm.collectives import broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.values import contents_of, described, in_memory
from bascule.diffusers.arguments import leaves
from bascule.diffusers.compiling import device_of
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.items import table_of
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost
from bascule.stand_in import Override

_TEXT_ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"
_TOKENS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a pipeline whose work ranks share, until `remove`."""

    module: nn.Module
    phase: str  # that has most of the work: "encode" or "decode"
    encoder: BalancedEncoder | TiledVAE
    overrides: tuple[Override, ...]  # of the part's methods

    def remove(self) -> None:
        """Let each rank do all of the work."""
        for override in self.overrides:
            override.remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let each rank do all of the work within."""
        with ExitStack() as stack:
            for override in self.overrides:
                stack.enter_context(override.suspended())
            yield


def shared_parts(pipeline: Any, for_vae: str, for_texts: str) -> list[nn.Module]:
    """Return the modules that ranks share besides the transformers."""
    if pipeline is None:
        return []
    vae = _shared_vae(pipeline, for_vae)
    return [*([] if vae is None else [vae]), *_shared_text_encoders(pipeline, for_texts)]


def _shared_vae(pipeline: Any, for_vae: str) -> nn.Module | None:
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, nn.Module) or for_vae == "own":
        return None
    if for_vae == "first" and hasattr(pipeline, "video_processor"):
        raise ConfigError(
            f"parallelize(.., vae='first'): other ranks of a {type(pipeline).__name__} would put "
            "together a video of no frames, which it cannot: use vae='all'"
        )
    if getattr(vae, "use_tiling", False):
        return vae
    if for_vae == "first":
        raise ConfigError(
            f"parallelize(.., vae='first'): a {type(vae).__name__} without tiling decodes whole "
            "images on every rank: call pipeline.vae.enable_tiling() before parallelize"
        )
    return None


def _shared_text_encoders(pipeline: Any, for_texts: str) -> list[nn.Module]:
    if for_texts == "own":
        return []
    encoders = [getattr(pipeline, name, None) for name in _TEXT_ENCODERS]
    modules = [encoder for encoder in encoders if isinstance(encoder, nn.Module)]
    for module in modules:
        if table_of(module).length is None:
            raise ConfigError(
                f"parallelize(.., text_encoders='all'): it is not known how a "
                f"{type(module).__name__} holds prompts; use text_encoders='own'"
            )
    return modules


def share_parts(
    pipeline: Any,
    group: RankGroup,
    for_vae: Literal["all", "first", "own"],
    for_texts: Literal["all", "own"],
    device: torch.device,
    known: Sequence[nn.Module],
) -> Iterator[SharedPart]:
    """Share tiles of the VAE and prompts of a batch among ranks; yield new parts, not `known`."""
    ranks = group.process_group
    vae = _shared_vae(pipeline, for_vae)
    if vae is not None and for_vae != "own" and vae not in known:
        settings = EncoderOptions(features_for=for_vae, device=device)
        tiled = encoding = TiledVAE(vae, mesh_or_group=ranks, options=settings)
        if for_vae == "first":  # the first rank alone gets pixels; all get latents
            for_all = replace(settings, features_for="all")
            encoding = TiledVAE(vae, mesh_or_group=ranks, options=for_all)
        ways = {"encode": encoding.encode, "decode": tiled.decode}
        tiles: Any = vae
        both = [_override(vae, *way, lambda: tiles.use_tiling) for way in ways.items()]
        yield SharedPart(vae, "decode", tiled, tuple(both))
    settings = EncoderOptions(features_for="all", device=device)
    for module in _shared_text_encoders(pipeline, for_texts):
        if module not in known:
            encoder = BalancedEncoder(module, cost=_TOKENS, mesh_or_group=ranks, options=settings)
            override = _override(module, "__call__", encoder.call)
            yield SharedPart(module, "encode", encoder, (override,))


def _override(
    module: nn.Module,
    name: str,
    shared: Callable[..., Any],
    is_on: Callable[[], bool] = lambda: True,
) -> Override:
    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (shared if is_on() else method)(*args, **kwargs)

    return Override(module, name, call)


PHASES = "encode", "denoise", "decode"

TRANSFORMERS = "transformer", "transformer_2", "unconditional_transformer"

_METHODS = {
    "encode": ("", "encode_prompt"),
    "noise": ("", "prepare_latents"),
    "step": ("scheduler", "step"),
    "decode": ("vae", "decode"),
} | {name: (name, "__call__") for name in TRANSFORMERS}

Observer = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]  # name, arguments, output


@contextmanager
def watched(pipeline: Any, observe: Observer) -> Iterator[None]:
    """Observe "encode", "noise", "step", "decode", and calls of the transformers by their names."""

    def around(what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        observe(what, args, kwargs, output)
        return output

    with ExitStack() as stack:
        for what, (part, name) in _METHODS.items():
            owner = getattr(pipeline, part, None) if part else pipeline
            if getattr(owner, name, None) is not None:
                # Some pipelines take steps with copies of their scheduler.
                one = Override(owner, name, partial(around, what), with_copies=what == "step")
                stack.callback(one.remove)
        yield


def execution_device(pipeline: Any, model: nn.Module) -> torch.device:
    """Return the device on which a pipeline computes and draws, also if weights are offloaded."""
    device = getattr(pipeline, "_execution_device", None)
    if isinstance(device, torch.device) and device.type != "meta":
        return device
    return device_of(model)


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of the phases of the last call of a pipeline, on this rank."""

    begun: float = 0.0  # of one clock, as the next three
    encoded: float = 0.0  # when the noise was drawn
    denoised: float = 0.0  # when the last step ended
    ended: float = 0.0
    num_steps: int = 0  # calls of the scheduler
    num_passes: int = 0  # calls of the transformers, for all branches of guidance

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, after the call."""
        times = self.begun, self.encoded, self.denoised, self.ended
        return {
            phase: after - before
            for phase, before, after in zip(PHASES, times, times[1:], strict=False)
        }


@contextmanager
def timed(pipeline: Any, device: torch.device) -> Iterator[PhaseTimes]:
    """Measure one call of a pipeline, made within; after each step the host waits."""
    times = PhaseTimes()

    def now() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def observe(what: str, *_: Any) -> None:
        if what == "step":
            times.denoised, times.num_steps = now(), times.num_steps + 1
        elif what in TRANSFORMERS:
            times.num_passes += 1
        elif what != "decode" and not times.num_passes:  # some draw again between steps
            times.encoded = times.denoised = now()

    with watched(pipeline, observe):
        times.begun = times.encoded = times.denoised = now()
        try:
            yield times
        finally:
            times.ended = now()


def phase_lines(times: PhaseTimes | None, shared: Sequence[SharedPart]) -> tuple[str, ...]:
    """Describe the phases of the last call: measured seconds, and the work that ranks shared."""
    lines = list[str]()
    for name in PHASES:
        facts = [] if times is None else [f"{times.seconds[name]:.3g} s measured"]
        parts = [one.encoder.last for one in shared if one.phase == name]
        facts += [str(encoding) for encoding in parts if encoding is not None]
        if facts:
            lines.append(f"{name}: {'; '.join(facts)}")
    return tuple(lines)


_OF_A_RANK = "output_type", "return_dict", "callback"  # beginnings of names; ranks may differ


class PipelineRun(Override):
    """Calls of a pipeline that all ranks of a replica make together, each within a `run`."""

    def __init__(
        self,
        pipeline: Any,
        group: RankGroup,
        models: Sequence[nn.Module],
        run: Callable[[], AbstractContextManager[None]],
        shares_vae: bool,
    ) -> None:
        self._pipeline, self._group, self._models, self._of_run = pipeline, group, models, run
        self._shares_vae = shares_vae
        self._check_models()
        super().__init__(pipeline, "__call__", self._run)

    @shared("a call of a pipeline")
    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compare the arguments by a small all-gather, and broadcast a few kilobytes of states."""
        self._check_models()
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.apply_defaults()
        device = execution_device(self._pipeline, self._models[0])
        settings = {
            name: described(value)
            for name, value in bound.arguments.items()
            if not name.startswith(_OF_A_RANK)
        }
        settings |= {"adapters": _adapters_of(self._pipeline), "device": device.type}
        settings |= _configured(self._pipeline)
        if self._shares_vae:
            vae = getattr(self._pipeline, "vae", None)
            settings["vae"] = f"{type(vae).__name__}, tiling {getattr(vae, 'use_tiling', None)}"
        agree(self._group, settings, what=f"a call of a {type(self._pipeline).__name__}")
        generators = generators_of(bound.arguments)
        states = random_states(device, generators)
        sent = torch.cat(states).to(groups.device_of(self._group))  # NCCL sends nothing of the host
        first = broadcast(self._group, "broadcast (noise)", sent).cpu()
        set_random_states(device, generators, first.split([state.numel() for state in states]))
        with self._of_run():
            return call(*args, **kwargs)

    def _check_models(self) -> None:
        """Refuse a transformer that is not split, and does not wrap a split model."""
        for name in TRANSFORMERS:
            model = getattr(self._pipeline, name, None)
            if isinstance(model, nn.Module) and not {*self._models} & {*model.modules()}:
                raise ConfigError(
                    f"the {name} of this {type(self._pipeline).__name__} is not one of the models "
                    "that were split: call undo() of the handle, then parallelize(pipeline, ..)"
                )


def _configured(pipeline: Any) -> dict[str, str]:
    """Describe the configurations of a pipeline and its parts, as of schedulers and guiders."""
    texts = dict[str, str]()
    for name, part in {**vars(pipeline), "pipeline": pipeline}.items():
        config: Any = getattr(part, "config", None)
        if isinstance(part, nn.Module) or not isinstance(config, Mapping):
            continue
        # Names with _ belong to a rank, as paths; a scheduler's other numbers to its last run.
        others = {} if part is pipeline or hasattr(part, "step") else vars(part)
        settings = {key: value for key, value in others.items() if isinstance(value, int | float)}
        settings |= {"shift of now": getattr(part, "shift", None), **config}
        kept = {key: value for key, value in settings.items() if not key.startswith("_")}
        if part is pipeline:  # its lists name the classes of parts, which a rank may lack
            kept = {key: x for key, x in kept.items() if not isinstance(x, list | tuple)}
        texts[name] = f"{type(part).__name__} {described(kept)}"
    return texts


def _adapters_of(pipeline: Any) -> str:
    """Describe the LoRA layers of peft, often loaded or scaled after `parallelize`."""
    parts = [getattr(pipeline, name, None) for name in TRANSFORMERS]
    models = [part for part in parts if isinstance(part, nn.Module)]
    layers = [
        (layer, scales)
        for model in models
        for layer in model.modules()
        if isinstance(scales := getattr(layer, "scaling", None), dict) and hasattr(layer, "lora_A")
    ]
    values = [x for model in models for name, x in in_memory(model).items() if "lora_" in name]
    states = Counter(
        f"{layer.active_adapters} scaled by {scales}{' and off' if layer.disable_adapters else ''}"
        for layer, scales in layers
    )
    return f"{dict(states)}, {contents_of(values)}" if layers else "none"


def generators_of(nest: Any) -> list[torch.Generator]:
    """Return the generators among arguments, each once."""
    return list(dict.fromkeys(x for _, x in leaves(nest) if isinstance(x, torch.Generator)))


def random_states(device: torch.device, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of torch's generators, on the host and the device, and of these."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states + [generator.get_state() for generator in generators]


def set_random_states(
    device: torch.device, generators: Sequence[torch.Generator], states: Sequence[Tensor]
) -> None:
    """Draw from these states on, which `random_states` returned."""
    rest = (state.clone() for state in states)
    torch.set_rng_state(next(rest))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(next(rest), device)
    for generator, state in zip(generators, rest, strict=True):
        generator.set_state(state)
