"""`bascule simulate`: what a training step takes on machines that need not be there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bascule.cli.inputs import InputOptions, MachineOptions
from bascule.cli.writing import STDOUT, check_outputs, tell_written, write_json, write_report
from bascule.errors import ConfigError
from bascule.plan.checks import number, whole
from bascule.plan.costs import TransformerCost
from bascule.plan.machine import HardwareProfile, passes_of
from bascule.report.reports import of_simulation
from bascule.sim.seconds import EncoderStage, Sharding, SimulationOptions
from bascule.sim.simulation import SimulationResult, simulate
from bascule.sim.traces import segments_of
from bascule.workload.traces import write_steps

_DEFAULT_STEPS = 20
_DEFAULT_TRAIN_STEPS = 1000
_MOST_PRICE = 1e9
_MOST_BILLIONS = 1e6


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(InputOptions, MachineOptions):
    """Predict training steps under topologies, and under what is done today.

    Attributes:
        topologies: What to compare; put first what you do now, the others are compared with it.
            Topologies, or auto for those that bascule topology would choose; "knapsack g8n4" for
            the greedy of the KnapFormer paper; loader, none, padded, buckets and packs.
        steps: Steps; more than one only with --data, of which 20 are the default.
        accumulate: Microbatches of a step.
        train_steps: Steps of your run, for GPU-hours; by default those of an epoch of --manifest
            with --batch-size, or 1000.
        gpu_hour_price: Of a GPU-hour, to see what it is worth in money.
        ranks_per_node: Ranks in a node; at most 8 by default.
        inter_gbs: GB that a rank sends in a second to other nodes, in place of the profile's.
        params_b: Parameters in billions; those of plain blocks if not given.
        shard_ranks: Ranks that share the parameters; those of a node if not given.
        text_encoder_us: Microseconds that a text encoder takes for a text token, where its rank has
            loaded it; and, in rows named "+ encoders", in balance. For --data and --manifest.
        vae_us: Likewise of a VAE, for an image token.
        kb_per_token: KB of activations that a token holds, over all layers; those of checkpointed
            blocks if not given.
        json: Where to write it all as JSON; - for standard output.
        report: Where to write a page of it all, .html.
        traces: Folder for the steps as traces, a folder in it for each of --topologies; Perfetto,
            HolisticTraceAnalysis and bascule trace read them.
    """

    topologies: tuple[str, ...] = ("none", "loader", "auto", "buckets", "packs")
    steps: int | None = None
    accumulate: int = 1
    train_steps: int | None = None
    gpu_hour_price: float | None = None
    ranks_per_node: int | None = None
    inter_gbs: float | None = None
    params_b: float | None = None
    shard_ranks: int | None = None
    text_encoder_us: float | None = None
    vae_us: float | None = None
    kb_per_token: float | None = None
    json: Path | None = None
    report: Path | None = None
    traces: Path | None = None

    @property
    def sharding(self) -> Sharding:
        """Of the parameters.

        Raises:
            ConfigError: A value is out of range.
        """
        params = self.params_b
        if params is not None:
            params = max(round(number("--params-b", params, most=_MOST_BILLIONS) * 1e9), 1)
        return Sharding(params, self.shard_ranks)

    @property
    def stages(self) -> tuple[EncoderStage, ...]:
        """Encoders before the model, as `bascule bench` names them.

        Raises:
            ConfigError: A value is out of range.
        """
        found: list[EncoderStage] = []
        if self.text_encoder_us is not None:
            seconds = number("--text-encoder-us", self.text_encoder_us) * 1e-6
            found.append(EncoderStage("text_encoder", text_token_s=seconds))
        if self.vae_us is not None:
            seconds = number("--vae-us", self.vae_us) * 1e-6
            found.append(EncoderStage("vae", image_token_s=seconds))
        return tuple(found)


def _simulated(
    batches: Sequence[Any],
    profile: HardwareProfile,
    cost: TransformerCost,
    topologies: Sequence[str],
    options: SimulationOptions,
) -> SimulationResult:
    """Each topology; with encoders, also with these in balance."""

    def run(stages: tuple[EncoderStage, ...]) -> SimulationResult:
        chosen = replace(options, stages=stages)
        return simulate(batches, profile=profile, model=cost, topologies=topologies, options=chosen)

    found = run(options.stages)
    if not options.stages:
        return found
    even = run(tuple(replace(stage, is_balanced=True) for stage in options.stages)).runs
    named = tuple(replace(one, name=f"{one.name} + encoders") for one in even)
    return replace(found, runs=(*found.runs, *named))


def run(options: SimulateOptions, arguments: list[str]) -> None:
    """Simulate and print.

    Raises:
        ConfigError: The input is malformed or does not fit.
    """
    check_outputs(
        file=options.file,
        manifest=options.manifest,
        json=options.json,
        report=options.report,
        traces=options.traces,
    )
    if options.traces is not None and options.traces.exists() and not options.traces.is_dir():
        raise ConfigError(f"--traces {options.traces}: is a file; give a folder")
    _check(options)
    steps = options.steps or (_DEFAULT_STEPS if options.has_steps else 1)
    profile = options.hardware()
    cost = options.cost
    if options.kb_per_token is not None:
        per_token = number("--kb-per-token", options.kb_per_token) * 1e3
        cost = replace(cost, bytes_per_token=per_token)
    with Console(stderr=True).status("simulating"):
        read = options.read_shapes if options.stages else options.read
        numbers = range(steps * options.accumulate)
        batches = [read(options.ranks, steps_after=k) for k in numbers]
        chosen = SimulationOptions(
            num_steps=steps,
            accumulate=options.accumulate,
            ranks_per_node=options.ranks_per_node,
            sharding=options.sharding,
            passes=passes_of("step", profile),
            stages=options.stages,
            train_steps=_train_steps(options, len(batches[0])),
            gpu_hour_price=options.gpu_hour_price,
        )
        found = _simulated(batches, profile, cost, options.topologies, chosen)
    console = Console(stderr=options.json == STDOUT)
    found.show(console)
    write_json(console, options.json, found.to_dict())
    if options.report is not None:
        write_report(console, options.report, of_simulation(found))
    if options.traces is not None:
        for run in found.runs:
            folder = options.traces / run.name.replace(" ", "_")
            tell_written(console, *write_steps(folder, segments_of(run), found.num_ranks))


def _check(options: SimulateOptions) -> None:
    """Refuse what does not fit together.

    Raises:
        ConfigError: Says so.
    """
    if options.lengths is not None or options.file is not None:
        for name in ("step", "seed"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name}: lengths are as given; it is for --data and --manifest"
                )
    for name in ("steps", "accumulate", "train_steps"):
        if (value := getattr(options, name)) is not None:
            whole(_flag(name), value, 1)
            if value > 1 and name != "train_steps" and not options.has_steps:
                raise ConfigError(
                    f"--{name} {value}: only --data and --batch-size have more than one batch"
                )
    if options.gpu_hour_price is not None:
        number("--gpu-hour-price", options.gpu_hour_price, most=_MOST_PRICE)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _train_steps(options: SimulateOptions, num_ranks: int) -> int:
    """Steps of the user's run: as given, those of an epoch, or a round number."""
    epoch = options.epoch_batches(num_ranks)
    if options.train_steps is not None or epoch is None:
        return options.train_steps or _DEFAULT_TRAIN_STEPS
    return max(epoch // options.accumulate, 1)
