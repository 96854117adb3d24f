"""Denoising at batch 1: 1,024 x 1,024 pixels, 28 steps, FLUX-size random weights in bf16.

4,096 image and 512 text tokens. Ours is the packed MM-DiT with 19 + 38 blocks: plain, with compiled
blocks, and with their kernels recorded in one CUDA graph that is replayed for each step. That of
diffusers is split by `parallelize` over a world of one rank and compiled by its handle, without
and with CUDA graphs, if diffusers is installed. Speed-ups are over the plain model, by rounds; the
target is FastUSP's figure. Graphs that torch made while the timed calls ran count as recompiled.
Images of all ways are compared with that of the plain one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from measuring import ratio
from torch import Tensor

from bascule.diffusers.compiling import Mode
from bascule.models import MMDiT, PackedBatch
from bascule.parallel import Step
from bascule.workload.codes import SampleShape
from gpu.diffusers_models import flux_inputs, flux_of, no_diffusers
from gpu.measuring import Case, Row, Setting, Target, Timed, timed, told
from gpu.shapes import Pack, batch_of, config_of, make_model, parallel_of

STEPS = 28
IMAGE = SampleShape(text_tokens=512, image_tokens=4096, grid_width=64)
SPEEDUP, NO_GRAPHS = Target(1.16), Target(0.0, at_least=False)
SAME = Target(0.1, at_least=False)
"""How far images may be apart that were computed in 16 bits, in all steps, with other roundings."""

MODES: dict[str, Mode] = {"compiled": "default", "CUDA graphs": "reduce-overhead"}


def cases(setting: Setting) -> Iterator[Case]:
    """Ours; and diffusers', a case for each way of compiling, which takes minutes."""
    yield Case("packed MM-DiT", partial(ours, setting))
    for way in MODES:
        yield Case(f"diffusers through parallelize, {way}", partial(theirs, setting, way))


@torch.inference_mode()
def ours(setting: Setting) -> list[Row]:
    """The packed model, three ways."""
    config, pack = config_of(setting, *_blocks(setting)), _pack(setting)
    model = make_model(config, setting).eval()
    denoiser = Denoiser(model, batch_of(pack, config, setting), parallel_of(setting), pack)
    calls: dict[str, Callable[[], Tensor]] = {"plain": partial(_denoise, denoiser, setting)}
    wrapped = denoiser.with_blocks(lambda block: setting.compile(block, fullgraph=True))
    calls["compiled"] = partial(_denoise, wrapped, setting)
    rows, reason = list[Row](), "CUDA graphs are CUDA's: left out on a CPU"
    if setting.on_cuda:
        reason = None
        try:
            calls["CUDA graphs"] = partial(_denoise, Recorded(wrapped), setting)
        except Exception as error:  # the other ways are measured
            reason = told(error)
    if reason is not None:
        rows.append(Row("packed MM-DiT, CUDA graphs", reason=reason))
    return [*_rows_of("packed MM-DiT", setting, calls, "plain"), *rows]


class Denoiser:
    """Predicts a velocity; all that does not change from step to step is made once.

    Shapes: i image tokens, T all tokens, N samples.
    """

    def __init__(self, model: MMDiT, batch: PackedBatch, parallel: Any, pack: Pack) -> None:
        self.model, self._batch = model, batch
        self._step: Step = parallel.plan(pack.seq_lens)
        is_image = batch.is_image.to(batch.pos.device)
        self._layout = model.layout(is_image, batch.pos, self._step.token_slot)
        self.noise = batch.image_tokens.clone()

    def with_blocks(self, wrap: Callable[[Any], Any]) -> "Denoiser":
        """The same with other blocks, which share their weights with these."""
        other = object.__new__(Denoiser)
        other.__dict__ |= self.__dict__
        other.model = MMDiT.__new__(MMDiT)
        other.model.__dict__ |= self.model.__dict__
        other.model._modules = dict(self.model._modules)
        for name in ("double_blocks", "single_blocks"):
            blocks = getattr(self.model, name)
            setattr(other.model, name, torch.nn.ModuleList(wrap(block) for block in blocks))
        return other

    def __call__(self, image_iC: Tensor, timestep_N: Tensor) -> Tensor:
        """(i, in_channels) the velocity of image tokens."""
        model, batch, rows = self.model, self._batch, self._layout.interleaving
        vec_NC = model.condition(timestep_N, batch.pooled)
        x_TC = rows.pack(model.text_in(batch.text_tokens), model.image_in(image_iC))
        out_TC = model.blocks(x_TC, vec_NC, self._layout, self._step.attend)
        return rows.split(out_TC)[1]


class Recorded:
    """A denoiser whose kernels are recorded once and replayed."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.noise = denoiser.noise
        self._image = denoiser.noise.clone()
        self._time = torch.ones(1, device=self._image.device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                denoiser(self._image, self._time)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL's watchdog asks for events in a thread of its own.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._out = denoiser(self._image, self._time)

    def __call__(self, image_iC: Tensor, timestep_N: Tensor) -> Tensor:
        """See `Denoiser`; the output is overwritten by the next call."""
        self._image.copy_(image_iC)
        self._time.copy_(timestep_N)
        self._graph.replay()
        return self._out


@torch.inference_mode()
def _denoise(denoiser: Denoiser | Recorded, setting: Setting) -> Tensor:
    """All steps of an image, from noise."""
    num_steps = setting.pick(STEPS, 2)
    times = torch.linspace(1.0, 0.0, num_steps + 1, device=setting.device)
    image = denoiser.noise
    for number in range(num_steps):
        velocity = denoiser(image, times[number : number + 1])
        image = image - velocity / num_steps
    return image


@torch.inference_mode()
def theirs(setting: Setting, way: str) -> list[Row]:
    """A `FluxTransformer2DModel` with its hooks; eager turns with a way of compiling."""
    label, reason = "diffusers through parallelize", no_diffusers()
    if reason is not None:
        return [Row(label, reason=reason)]
    from bascule.diffusers import parallelize

    config, pack = config_of(setting, *_blocks(setting)), _pack(setting)
    model = flux_of(config, setting).eval()
    inputs = flux_inputs(pack.samples[0], 1, config, setting)
    with parallelize(model) as handle:
        eager = partial(_call_theirs, model, inputs, setting)
        if not setting.on_cuda:
            found = timed(setting, {"eager": eager})
            said = Row(f"{label}, {way}", reason="handle.compile is for GPUs: left out on a CPU")
            return [_seconds_row(label, "eager", found, setting), said]
        handle.compile(MODES[way])
        calls = {"eager": partial(_forced_eager, eager), way: eager}
        return _rows_of(label, setting, calls, "eager")


def _call_theirs(model: Any, inputs: dict[str, Any], setting: Setting) -> Tensor:
    num_steps = setting.pick(STEPS, 2)
    image = inputs["hidden_states"]
    times = torch.linspace(1.0, 0.0, num_steps + 1, device=setting.device, dtype=setting.dtype)
    for number in range(num_steps):
        at = {"hidden_states": image, "timestep": times[number : number + 1]}
        image = image - model(**(inputs | at))[0] / num_steps
    return image


def _forced_eager(call: Callable[[], Tensor]) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return call()


def _rows_of(
    label: str, setting: Setting, calls: dict[str, Callable[[], Tensor]], plain: str
) -> list[Row]:
    """Seconds of an image, speed-ups over the plain way, and graphs made after the warm-up."""
    graphs = _Graphs()
    found = timed(setting, {name: graphs.watched(name, call) for name, call in calls.items()})
    rows = [_seconds_row(label, name, found, setting) for name in found.seconds]
    others = [name for name in found.seconds if name != plain]
    best = found.fastest(others)
    for name in others if plain in found.seconds else ():
        spread = ratio(found.seconds[plain], found.seconds[name])
        quartiles = spread["lower_quartile"], spread["upper_quartile"]
        target = SPEEDUP if name == best else None
        what = f"{label}, {name} over {plain}"
        rows.append(Row(what, "x", spread["median"], quartiles, target))
        again = float(graphs.made_later(name))
        what = f"{label}, {name}: graphs made after the warm-up"
        rows.append(Row(what, "graphs", again, target=NO_GRAPHS))
        wanted, image = (calls[one]().float() for one in (plain, name))
        error = float((image - wanted).norm() / wanted.norm())
        what = f"{label}, {name}: image against that of {plain}"
        rows.append(Row(what, "relative error", error, target=SAME))
    return [*rows, *found.reasons(label)]


class _Graphs:
    """How many graphs torch made in each call of a candidate."""

    def __init__(self) -> None:
        self._made: dict[str, list[int]] = {}

    def watched(self, name: str, call: Callable[[], object]) -> Callable[[], object]:
        """The same call, counted."""
        counts = self._made.setdefault(name, [])

        def counted() -> object:
            before = self._now()
            found = call()
            counts.append(self._now() - before)
            return found

        return counted

    def made_later(self, name: str) -> int:
        """By the calls after the first, which is the warm-up."""
        return sum(self._made[name][1:])

    def _now(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _seconds_row(label: str, name: str, found: Timed, setting: Setting) -> Row:
    what = f"{label}, {name}: {setting.pick(STEPS, 2)} steps"
    return Row.of(what, "s", found.seconds[name])


def _blocks(setting: Setting) -> tuple[int, int]:
    return setting.pick((19, 38), (1, 1))


def _pack(setting: Setting) -> Pack:
    small = SampleShape(text_tokens=4, image_tokens=16, grid_width=4)
    return Pack("an image", (setting.pick(IMAGE, small),))
