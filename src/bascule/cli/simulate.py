"""`bascule simulate --data g16b4i256f1s0,g8b1i2048f1s0`: predict training steps."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bascule.cli.inputs import InputOptions, MachineOptions
from bascule.options import Group, NewFolder, Outputs, Range

if TYPE_CHECKING:
    from bascule.sim.seconds import EncoderStage

_WAYS = "none", "loader", "auto", "buckets", "packs"
_DEFAULT_STEPS = 20
_DEFAULT_TRAIN_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Outputs, MachineOptions, InputOptions):
    """Predict training steps under topologies, and under what is done today.

    Attributes:
        topologies: Ways to compare; put first what you do now, the others are compared with it.
            Topologies, or auto for those that bascule topology would choose; "knapsack g8n4" for
            the greedy of the KnapFormer paper; loader, none, padded, buckets and packs.
        steps: Steps; more than one only with --data or --manifest, where the default is 20.
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
        vae_us: The same of a VAE, for an image token.
        kb_per_token: KB of activations of a token, over all layers; else of checkpointed blocks.
        traces: Folder for the steps as traces, a folder in it for each of --topologies; Perfetto,
            HolisticTraceAnalysis and bascule trace read them.
    """

    topologies: Annotated[tuple[str, ...], Group("What to compare")] = _WAYS
    steps: Annotated[int | None, Range(1)] = None
    accumulate: Annotated[int, Range(1)] = 1
    train_steps: Annotated[int | None, Range(1)] = None
    gpu_hour_price: Annotated[float | None, Range(0, 1e9)] = None
    ranks_per_node: Annotated[int | None, Group("Machine")] = None
    inter_gbs: float | None = None
    params_b: Annotated[float | None, Range(0, 1e6), Group("Model")] = None
    shard_ranks: int | None = None
    text_encoder_us: Annotated[float | None, Range()] = None
    vae_us: Annotated[float | None, Range()] = None
    kb_per_token: Annotated[float | None, Range()] = None
    traces: Annotated[Path | None, NewFolder(), Group("Output")] = None

    @property
    def stages(self) -> "tuple[EncoderStage, ...]":
        """Encoders before the model, under the names that `bascule bench` uses."""
        from bascule.sim.seconds import EncoderStage

        text, image = self.text_encoder_us, self.vae_us
        stages = [] if text is None else [EncoderStage("text_encoder", text_token_s=text * 1e-6)]
        if image is not None:
            stages.append(EncoderStage("vae", image_token_s=image * 1e-6))
        return tuple(stages)


def run(options: SimulateOptions, arguments: list[str]) -> None:
    """Simulate each topology, with encoders also in balance, and publish what each takes."""
    from bascule.cli.command import publish, saved, waiting
    from bascule.machine.cluster import passes_of
    from bascule.sim.seconds import Sharding, SimulationOptions
    from bascule.sim.simulation import segments_of, simulate
    from bascule.workload.traces import write_steps

    options.check_steps(steps=options.steps, accumulate=options.accumulate)
    steps = options.steps or (_DEFAULT_STEPS if options.has_steps else 1)
    profile, cost, params = options.hardware(), options.cost, options.params_b
    if options.kb_per_token is not None:
        cost = replace(cost, bytes_per_token=options.kb_per_token * 1e3)
    with waiting("simulating"):
        read = options.read_shapes if options.stages else options.read
        numbers = range(steps * options.accumulate)
        batches = [read(options.ranks, steps_after=k) for k in numbers]
        train_steps, epoch = options.train_steps, options.epoch_batches(len(batches[0]))
        if train_steps is None and epoch is not None:
            train_steps = max(epoch // options.accumulate, 1)
        setting = SimulationOptions(
            num_steps=steps,
            accumulate=options.accumulate,
            ranks_per_node=options.ranks_per_node,
            sharding=Sharding(
                None if params is None else max(round(params * 1e9), 1), options.shard_ranks
            ),
            passes=passes_of("step", profile),
            stages=options.stages,
            train_steps=train_steps or _DEFAULT_TRAIN_STEPS,
            gpu_hour_price=options.gpu_hour_price,
        )
        compare = partial(
            simulate, batches, profile=profile, model=cost, topologies=options.topologies
        )
        result = compare(options=setting)
        if setting.stages:
            balanced = tuple(replace(stage, is_balanced=True) for stage in setting.stages)
            others = compare(options=replace(setting, stages=balanced)).runs
            others = tuple(replace(other, name=f"{other.name} + encoders") for other in others)
            result = replace(result, runs=(*result.runs, *others))
    console = publish(options, result.to_report())
    if options.traces is not None:
        for simulated in result.runs:
            folder = options.traces / simulated.name.replace(" ", "_")
            saved(console, *write_steps(folder, segments_of(simulated), result.num_ranks))
