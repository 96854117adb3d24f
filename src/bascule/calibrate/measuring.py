"""Time blocks, messages and attention on all ranks; make a hardware profile from the times.

Shapes: N ranks, P probes.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b

import numpy as np
import torch

from bascule.arrays import Floats
from bascule.attention import AttentionMesh, attention, select_kernel
from bascule.calibrate.blocks import (
    BlockCall,
    block_of_each_kind,
    calls_of_model,
    calls_of_user,
    check_name,
    find,
)
from bascule.calibrate.options import CalibrateOptions
from bascule.calibrate.timed import (
    ALL_REDUCE,
    COLLECTIVE,
    MOST_IN_A_ROW,
    Probe,
    collectives,
    device_name,
    memory_bytes,
    time_round,
)
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.mesh import mesh_of_all
from bascule.errors import ConfigError
from bascule.machine.calibration import (
    ALL_TO_ALL,
    BACKWARD,
    BYTES,
    FORWARD,
    RECOMPUTE,
    TOKENS,
    Calibration,
    Fit,
    Overhead,
    block_rates,
)
from bascule.machine.cluster import HardwareProfile
from bascule.machine.fits import fit_curve
from bascule.models import MMDiTConfig
from bascule.quantities import count, number, percent

PASS, HOST = "pass", "host"
ALONE, ON_RANKS = "call of attention", "call of attention on all ranks"
BETWEEN_NODES = ", between nodes"

_EXCHANGE = "exchange of attention"
_MORE_TIMES = 3  # messages again in a round: they are short, and a busy machine disturbs them most
_LEAST_S = 0.02  # of a measurement: shorter calls are repeated
_QUARTILE = 0.25
_DRAWS = 200  # of the bootstrap
_NORMAL = 1.96  # standard errors on either side hold 95 %


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The times of all ranks, equal on every rank, and facts about this rank's device."""

    probes: tuple[Probe, ...]
    seconds: Floats  # (rounds, N, P)
    device: str  # its name on this rank
    memory_bytes: float | None  # of a rank; None: not known
    d_model: int  # width of the block
    settings: str  # what was timed, in words


def measure(
    options: CalibrateOptions, device: torch.device, advance: Callable[[], object] = lambda: None
) -> Measured:
    """Time all probes on the ranks of the default group, which must have equal options.

    Collectives: a comparison of options, then the probes in two warm-up rounds and in each round
    that counts.
    """
    group = member_of(resolve(None), "calibrate")
    error, probes = None, list[Probe]()
    try:
        options.check()
        probes = _passes(options, device)
    except Exception as refusal:  # the other ranks must not wait
        error = refusal
    host = np.frombuffer(blake2b(socket.gethostname().encode(), digest_size=8).digest(), np.int64)
    what = "bascule calibrate"
    rows = agree(group, options.settings, error, what=what, values=host, capacity=1)
    hosts = [int(row[0]) for row in rows]
    with shared("bascule calibrate"):
        probes += [*_messages(group, hosts, options, device), *_attention(group, options, device)]
        time_round(group, device, probes)  # warms up connections, memory and kernels
        advance()
        probes = _in_a_row(probes, time_round(group, device, probes))
        advance()
        rounds = np.empty((options.rounds, group.size, len(probes)))
        for number in range(options.rounds):
            rounds[number] = _round(group, device, probes)
            advance()
    memory = memory_bytes(device)
    sharing = hosts.count(hosts[group.rank]) if device.type == "cpu" else 1
    return Measured(
        tuple(probes),
        rounds,
        device_name(device),
        None if memory is None else memory / sharing,
        options.on(device.type, "d_model"),
        _in_words(options, group, device),
    )


def _dtype(options: CalibrateOptions, device: torch.device) -> torch.dtype:
    return getattr(torch, options.on(device.type, "dtype"))


def check_block(options: CalibrateOptions, device: torch.device) -> None:
    """Refuse a block that cannot be made or has no kernel, before ranks start."""
    if options.module is not None:
        check_name(options.module)
        return
    shape = {"dtype": _dtype(options, device), "head_dim": _config(options, device).head_dim}
    select_kernel(options.kernel, device.type, **shape, is_packed=True)


def _config(options: CalibrateOptions, device: torch.device) -> MMDiTConfig:
    width, num_heads = (options.on(device.type, name) for name in ("d_model", "num_heads"))
    if width % (step := 2 * num_heads):
        wrong = f"--d-model {width} and --num-heads {num_heads}: a head must have an even width"
        fix = f"a multiple of {step}, such as --d-model {-(-width // step) * step}"
        raise ConfigError(f"{wrong}: give {fix}")
    return MMDiTConfig(
        in_channels=4,
        text_dim=4,
        vec_dim=4,
        d_model=width,
        num_heads=num_heads,
        num_double=1,
        num_single=1,
        axes_dim=(width // num_heads,),
    )


def _passes(options: CalibrateOptions, device: torch.device) -> list[Probe]:
    """Make probes of all passes by length: packs for our blocks, one sequence for a user's."""
    dtype = _dtype(options, device)
    lens = options.seq_lens(device.type)
    if options.module is not None:
        make = find(options.module)
        packs = [[length] for length in lens]
        calls = [calls_of_user(options.module, make, length, device) for length in lens]
    else:
        model = block_of_each_kind(_config(options, device), device, dtype)
        packs = [[length] * (lens[-1] // length) for length in lens]
        calls = [calls_of_model(model, (0.5, 0.5, 0.0), p, dtype, options.kernel) for p in packs]
    pairs = zip(calls, packs, strict=True)
    return [probe for pair in pairs for probe in _passes_of_pack(*pair, device.type)]


def _passes_of_pack(calls: list[BlockCall], pack: list[int], on: str) -> list[Probe]:
    def run(functions: Sequence[Callable[[], object]]) -> None:
        for function in functions:
            function()

    forward = partial(run, [call.forward for call in calls])
    probe = Probe(PASS, FORWARD, on, pack[0], float(len(calls) * len(pack)), forward)
    return [
        probe,
        replace(probe, name=RECOMPUTE, run=partial(run, [call.recompute for call in calls])),
        replace(
            probe, name=BACKWARD, prepare=lambda: partial(run, [call.backward() for call in calls])
        ),
    ]


def _messages(
    group: RankGroup, hosts: list[int], options: CalibrateOptions, device: torch.device
) -> list[Probe]:
    """Make probes of collectives within each host, and among one rank of each host."""
    nodes = [[p for p in range(group.size) if hosts[p] == host] for host in dict.fromkeys(hosts)]
    local = next(ranks for ranks in nodes if group.rank in ranks)
    sizes, groups = {len(ranks) for ranks in nodes}, dict[str, RankGroup]()
    if min(sizes) > 1:
        groups[""] = group.part(local, "calibrate in a node")
    if len(nodes) > 1 and len(sizes) == 1:
        place = local.index(group.rank)
        groups[BETWEEN_NODES] = group.part([ranks[place] for ranks in nodes], "between nodes")
    return [
        replace(probe, name=probe.name + where)
        for where, ranks in groups.items()
        for size in options.message_bytes()
        for probe in collectives(ranks, device, size)
        if probe.name != ALL_REDUCE
    ]


def _attention(group: RankGroup, options: CalibrateOptions, device: torch.device) -> list[Probe]:
    """Make probes of attention on one token a rank, whose time is that of the host alone."""
    dtype = _dtype(options, device)
    q = torch.randn(1, group.size, 1, 64, device=device, dtype=dtype)

    def attend(mesh: AttentionMesh) -> None:
        with torch.no_grad():
            attention(q, q, q, mesh)

    alone = AttentionMesh(None, None, None)
    probes = [Probe(HOST, ALONE, device.type, 0, 0.0, partial(attend, alone))]
    if group.size > 1:
        run = partial(attend, mesh_of_all(ring=1, ulysses=group.size))
        probes.append(Probe(HOST, ON_RANKS, device.type, 0, 0.0, run))
    return probes


def _round(group: RankGroup, device: torch.device, probes: list[Probe]) -> Floats:
    """Return (N, P) seconds of a round; of short probes the quickest of several times."""
    seconds = time_round(group, device, probes)
    places = [place for place, probe in enumerate(probes) if probe.kind != PASS]
    for _ in range(_MORE_TIMES):
        again = time_round(group, device, [probes[place] for place in places])
        best = seconds[:, places]
        seconds[:, places] = np.where(again.max(axis=0) < best.max(axis=0), again, best)
    return seconds


def _in_a_row(probes: list[Probe], seconds: Floats) -> list[Probe]:
    """Let short probes run several times in a row; equally often on all ranks."""
    times = np.clip(np.ceil(_LEAST_S / seconds.max(axis=0)), 1, MOST_IN_A_ROW).astype(int)
    return [replace(probe, in_a_row=num) for probe, num in zip(probes, times.tolist(), strict=True)]


def _in_words(options: CalibrateOptions, group: RankGroup, device: torch.device) -> str:
    lens, threads = options.seq_lens(device.type), torch.get_num_threads()
    width, num_heads, dtype = (
        options.on(device.type, name) for name in ("d_model", "num_heads", "dtype")
    )
    block = f"{options.module} as a block of width {width}"
    if options.module is None:
        sizes = f"width {width}, {num_heads} heads, {dtype}, kernel {options.kernel or 'as chosen'}"
        block = f"double and single block of an MM-DiT, {sizes}"
    sizes = f"{number(lens[0])} to {number(lens[-1])} tokens, messages up to {options.mib} MiB"
    rounds = f"{options.points} sizes each, {count(options.rounds, 'round')}"
    ranks = f"{count(group.size, 'rank')} at once, {threads} threads each"
    return f"{block}; {sizes}, {rounds}; {ranks} of {os.cpu_count()} processors"


def profile_of(measured: Measured, options: CalibrateOptions) -> HardwareProfile:
    """Make a hardware profile from the measurements; other numbers come from the base."""
    fits, overheads = _fits(measured), _overheads(measured)
    numbers = _numbers(measured, fits, overheads)
    calibration = Calibration(
        name=options.out.stem,
        date=datetime.now(UTC).date().isoformat(),
        torch=str(torch.__version__),
        num_ranks=measured.seconds.shape[1],
        settings=measured.settings,
        d_model=measured.d_model,
        measured=tuple(numbers),
        base=options.base,
        fits=tuple(fits.values()),
        overheads=overheads,
    )
    base = HardwareProfile.load(options.base)
    return replace(
        base,
        **numbers,
        device=measured.device,
        source="measured",
        peak_flops_per_s=base.peak_flops_per_s if base.device == measured.device else None,
        note=f"what was not measured is taken from {options.base}: {base.note}".strip(": "),
        calibration=calibration,
    )


def refusals(profile: HardwareProfile, limit: float, *, attends: bool = True) -> list[str]:
    """Name the curves that miss held-out points by more than `limit`, or give no rate."""
    assert profile.calibration is not None
    sentences: list[str] = []
    for fit in profile.calibration.fits:
        error = fit.held_out_error
        if error is not None and error > limit:
            wrong = f"are missed by {percent(error)} (median), and the limit is {percent(limit)}"
            fix = "leave the machine idle, give more --rounds, or a narrower range of sizes"
            sentences.append(f"{fit.what}: held-out {fit.unit} {wrong}: {fix}")
        elif fit.coefficients[1] <= 0:
            wrong = f"the times do not grow in proportion to the {fit.unit}, so they give no rate"
            fix = "leave the machine idle, give more --rounds, or larger sizes"
            sentences.append(f"{fit.what}: {wrong}: {fix}")
        elif attends and fit.what == FORWARD and fit.coefficients[2] <= 0:
            wrong = "attention cannot be told from noise: the fit gives it no time at any length"
            sentences.append(f"{fit.what}: {wrong}: give longer --lengths, or an idle machine")
    return sentences


def _fits(measured: Measured) -> dict[str, Fit]:
    places: dict[str, list[int]] = {}
    for place, probe in enumerate(measured.probes):
        if probe.kind in (PASS, COLLECTIVE):
            places.setdefault(probe.name, []).append(place)
    return {name: _fit(name, same, measured) for name, same in places.items()}


def _fit(name: str, places: list[int], measured: Measured) -> Fit:
    """Fit a curve: to the slowest rank's messages, or to a block's mean over the ranks."""
    probes, seconds = [measured.probes[place] for place in places], measured.seconds[:, :, places]
    amounts = np.array([probe.amount for probe in probes])
    if probes[0].kind == COLLECTIVE:
        sizes = [max(round(amount), 1) for amount in amounts.tolist()]
        return fit_curve(name, BYTES, sizes, *undisturbed(seconds.max(axis=1)))
    times = seconds.mean(axis=1) / amounts
    return fit_curve(name, TOKENS, [probe.size for probe in probes], *undisturbed(times))


def undisturbed(times: Floats) -> tuple[Floats, Floats]:
    """Return (n,) lower quartiles of (rounds, n) times, and relative errors by bootstrap.

    In 18 rounds of messages on two busy cores, fits missed held-out sizes by 8.8 % with the least
    times, 8.1 % with medians, and 4.8 % with lower quartiles (median of 480 fits).
    """
    drawn = np.random.default_rng(0).integers(len(times), size=(_DRAWS, len(times)))
    again = np.quantile(times[drawn], _QUARTILE, axis=1)
    seconds = np.quantile(times, _QUARTILE, axis=0)
    return seconds, again.std(axis=0) / seconds


def _overheads(measured: Measured) -> tuple[Overhead, ...]:
    times: dict[str, tuple[float, float]] = {}
    for place, probe in enumerate(measured.probes):
        if probe.kind == HOST:
            slowest = measured.seconds[:, :, place].max(axis=1, keepdims=True)
            (seconds,), (noise,) = undisturbed(slowest)
            times[probe.name] = float(seconds), float(seconds * noise)
    if ON_RANKS in times:  # its two exchanges are on top of attention alone
        (both_s, both_error), (alone_s, error) = times.pop(ON_RANKS), times[ALONE]
        half = max(both_s - alone_s, 0.0) / 2
        times[_EXCHANGE] = half, float(np.hypot(both_error, error)) / 2
    return tuple(
        Overhead(what=what, seconds=seconds, error=_NORMAL * error)
        for what, (seconds, error) in times.items()
    )


def _numbers(
    measured: Measured, fits: dict[str, Fit], overheads: Sequence[Overhead]
) -> dict[str, float]:
    numbers: dict[str, float | None] = {
        **block_rates(fits[FORWARD], measured.d_model),
        "memory_bytes": measured.memory_bytes,
    }
    wires = {"intra_bytes_per_s": ALL_TO_ALL, "inter_bytes_per_s": ALL_TO_ALL + BETWEEN_NODES}
    for name, what in wires.items():
        if what in fits:
            numbers[name] = 1.0 / byte_s if (byte_s := fits[what].coefficients[1]) > 0 else None
    launches = {overhead.what: overhead.seconds for overhead in overheads}
    numbers["launch_s"] = launches.get(_EXCHANGE)
    return {name: float(number) for name, number in numbers.items() if number is not None}
