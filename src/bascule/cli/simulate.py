"""`bascule simulate --data g16b4i256f1s0,g8b1i2048f1s0`: predict training steps."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bascule.cli.inputs import InputOptions, MachineOptions
from bascule.errors import ConfigError
from bascule.machine.cluster import passes_of
from bascule.options import Group, NewFolder, Outputs, Range, refuse

if TYPE_CHECKING:
    from bascule.sim.seconds import EncoderStage

_WAYS = "none", "loader", "auto", "buckets", "packs"
_DEFAULT_STEPS = 20
_DEFAULT_TRAIN_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Outputs, MachineOptions, InputOptions):
    """Predict training steps with bascule's topologies, and with today's ways of batching.

    Attributes:
        topologies: Ways to train, to compare with the first: topologies, such as g4n2; auto, which
            chooses as the command bascule topology; loader, which is bascule's data loader; none,
            padded, buckets or packs, which are today's ways of batching; or "knapsack g4n2", which
            is the greedy algorithm of the KnapFormer paper.
        train_steps: Steps of your whole run, to compute its GPU-hours. Default: one epoch of
            --manifest, otherwise 1000.
        gpu_hour_price: Price of one GPU-hour, to see the savings in money.
        currency: Currency of --gpu-hour-price.
        steps: Steps to simulate. The default is 20 with --data and --manifest; other sources have
            one step.
        accumulate: Microbatches per step. Where these do not fit into memory, a row uses more.
        ranks_per_node: Ranks per node. The default is at most 8.
        inter_gbs: GB per second that a rank sends to other nodes. The default is the profile's.
        params_b: Parameters of the model, in billions. The default is computed from width and
            layers.
        kb_per_token: KB of activations per token, over all layers. The default is computed for
            checkpointed blocks.
        shard_ranks: Ranks over which parameters are sharded. The default is the ranks of a node.
        text_encoder_us: Microseconds of the text encoder per text token. Each row is then simulated
            twice: encoders run where samples were loaded, or ("+ encoders") evenly on all ranks.
            Only for --data and --manifest.
        vae_us: Microseconds of the VAE per image token; simulated like --text-encoder-us.
        slow_ranks: Ranks that compute more slowly, as RANK:TIMES: 5:1.5 for 1.5 times as long.
        slow_links: Ranks that send to other nodes more slowly, such as 5:4 for 4 times as long.
        lost_nodes: Nodes that are gone, the last ones; the other ranks load their samples.
        set_speeds: Plan for the speeds of the slow ranks, as SequenceParallel.set_speeds does.
        traces: Folder for traces of the simulated steps, with one subfolder per row. Perfetto,
            HolisticTraceAnalysis and bascule trace read them.
    """

    topologies: Annotated[tuple[str, ...], Group("What to compare")] = _WAYS
    train_steps: Annotated[int | None, Range(1)] = None
    gpu_hour_price: Annotated[float | None, Range(0, 1e9)] = None
    currency: str = "USD"
    steps: Annotated[int | None, Range(1)] = None
    accumulate: Annotated[int, Range(1)] = 1
    ranks_per_node: Annotated[int | None, Group("Machine")] = None
    inter_gbs: float | None = None
    params_b: Annotated[float | None, Range(0, 1e6), Group("Model")] = None
    kb_per_token: Annotated[float | None, Range()] = None
    shard_ranks: int | None = None
    text_encoder_us: Annotated[float | None, Range()] = None
    vae_us: Annotated[float | None, Range()] = None
    slow_ranks: Annotated[tuple[str, ...], Group("Troubles")] = ()
    slow_links: tuple[str, ...] = ()
    lost_nodes: Annotated[int, Range()] = 0
    set_speeds: bool = False
    traces: Annotated[Path | None, NewFolder(), Group("Output")] = None

    @property
    def stages(self) -> "tuple[EncoderStage, ...]":
        """Encoders that run before the model, by the names that `bascule bench` uses."""
        from bascule.sim.seconds import EncoderStage

        text, image = self.text_encoder_us, self.vae_us
        stages = [] if text is None else [EncoderStage("text_encoder", text_token_s=text * 1e-6)]
        if image is not None:
            stages.append(EncoderStage("vae", image_token_s=image * 1e-6))
        return tuple(stages)


def _factors(option: str, texts: tuple[str, ...]) -> dict[int, float]:
    """Return factors by rank; ConfigError for what is no RANK:TIMES."""
    if wrong := [text for text in texts if not re.fullmatch(r"\d{1,6}:\d{1,4}(\.\d{1,9})?", text)]:
        raise ConfigError(f"{option} {wrong[0]}: give RANK:TIMES, such as 5:1.5")
    return {int(rank): float(times) for rank, times in (text.split(":") for text in texts)}


def run(options: SimulateOptions, arguments: list[str]) -> None:
    """Simulate each topology, and again with balanced encoders; publish the predicted times."""
    from bascule.cli.command import publish, saved, waiting
    from bascule.sim.seconds import Sharding, SimulationOptions
    from bascule.sim.simulation import segments_of, simulate
    from bascule.workload.traces import write_steps

    options.check_steps(steps=options.steps, accumulate=options.accumulate)
    if options.gpu_hour_price is None:
        refuse(options, ("currency",), "names the money of --gpu-hour-price; give both")
    if not options.slow_ranks:
        refuse(options, ("set_speeds",), "only --slow-ranks have other speeds: give both")
    steps = options.steps or (_DEFAULT_STEPS if options.has_steps else 1)
    profile, cost = options.hardware(), options.cost
    params = None if options.params_b is None else max(round(options.params_b * 1e9), 1)
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
            sharding=Sharding(params, options.shard_ranks),
            passes=passes_of("step", profile),
            stages=options.stages,
            train_steps=train_steps or _DEFAULT_TRAIN_STEPS,
            is_epoch=options.train_steps is None and epoch is not None,
            gpu_hour_price=options.gpu_hour_price,
            currency=options.currency,
            slow_ranks=_factors("--slow-ranks", options.slow_ranks),
            slow_links=_factors("--slow-links", options.slow_links),
            lost_nodes=options.lost_nodes,
            set_speeds=options.set_speeds,
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
    report = result.to_report()
    if options.d_model is None:
        report = replace(report, title=f"{report.title}: {options.model}")
    console = publish(options, report)
    if options.traces is not None:
        for simulated in result.runs:
            folder = options.traces / simulated.name.replace(" ", "_")
            saved(console, *write_steps(folder, segments_of(simulated), result.num_ranks))
