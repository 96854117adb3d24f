"""What a run of `bascule train` needs to know before its ranks do anything together."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bascule.errors import ConfigError
from bascule.models import MMDiTConfig
from bascule.plan.costs import TransformerCost
from bascule.plan.machine import Cluster, HardwareProfile
from bascule.plan.topology import Topology
from bascule.train.building import model_config
from bascule.train.checkpoints import Facts, check_facts, newest_checkpoint
from bascule.train.frozen_encoders import FrozenEncoders, load_encoders
from bascule.train.measure import measure_cost
from bascule.train.train_options import Schedule, TrainOptions, schedule_of, settings_of
from bascule.workload.codes import parse_data_codes
from bascule.workload.photos import PhotoStream
from bascule.workload.streams import SyntheticStream

_NUM_PROBES = 5
_PROBED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Prepared:
    """What follows from the options and the data alone, the same on all ranks.

    Attributes:
        data: All samples, by number.
        encoders: What turns them into tokens, if anything.
        schedule: Which of them are in which step.
        config: The model.
        settings: What decides the losses.
        topology: The bags, or "auto".
        cluster: What prices the wires of "auto".
        checkpoint: Where the run goes on from; None: from the beginning.
    """

    data: PhotoStream | SyntheticStream
    encoders: FrozenEncoders
    schedule: Schedule
    config: MMDiTConfig
    settings: dict[str, str]
    topology: Topology | str
    cluster: Cluster | None
    checkpoint: Path | None


def prepare(options: TrainOptions, *, rank: int = 0, world_size: int = 1) -> Prepared:
    """Open the data, and find out all that can be wrong before ranks meet.

    Raises:
        ConfigError: A value is out of range, there is no data, or the run cannot be resumed.
    """
    topology = options.check(world_size)
    cluster = _cluster(options, world_size) if topology == "auto" else None
    encoders = load_encoders(options)
    data = _open(options, encoders, rank, world_size)
    schedule = schedule_of(options, data.num_samples)
    settings = settings_of(options, data.digest, schedule) | encoders.settings
    checkpoint = newest_checkpoint(options.out)
    if checkpoint is not None:
        if not options.resume:
            raise ConfigError(
                f"--out {options.out} has the checkpoint {checkpoint.name} of an earlier run: go "
                "on with --resume, or give another folder"
            )
        check_facts(checkpoint, Facts(settings, schedule))
    return Prepared(
        data=data,
        encoders=encoders,
        schedule=schedule,
        config=model_config(options, data),
        settings=settings,
        topology=topology,
        cluster=cluster,
        checkpoint=checkpoint,
    )


def _open(
    options: TrainOptions, encoders: FrozenEncoders, rank: int, world_size: int
) -> PhotoStream | SyntheticStream:
    if options.data is not None:
        codes = parse_data_codes(options.data)
        of_mix = sum(code.num_ranks for code in codes)
        return SyntheticStream(codes, world_size=of_mix, seed=options.seed)
    assert options.photos is not None
    return PhotoStream(
        options.photos,
        1,
        rank=rank,
        world_size=world_size,
        seed=options.seed,
        options=encoders.photo_options(options),
    )


def _cluster(options: TrainOptions, world_size: int) -> Cluster:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return HardwareProfile.load(options.profile).cluster(world_size // per_node, per_node)


def cost_of(prepared: Prepared, options: TrainOptions, device: torch.device) -> TransformerCost:
    """What a sequence costs, measured by all ranks at once unless gamma is given."""
    config, schedule = prepared.config, prepared.schedule
    if options.gamma is not None:
        num_blocks = config.num_double + config.num_single
        return TransformerCost(config.d_model, gamma=options.gamma, num_layers=num_blocks)
    first = range(min(_PROBED_STEPS * schedule.batch_size, schedule.num_samples))
    longest = max(256, *(shape.seq_len for shape in prepared.data.shapes(first)))
    lens = np.unique(np.geomspace(128, longest, _NUM_PROBES).astype(int))
    return measure_cost(
        config,
        tuple(lens.tolist()),
        device=device,
        dtype=getattr(torch, options.dtype),
        kernel=options.kernel,
    )
