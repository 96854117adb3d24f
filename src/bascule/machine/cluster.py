"""Predict the seconds of work on a machine from its rates, by one formula.

In a bag or a mesh of U R ranks, U ranks share heads, and R pass keys and values on. A rank needs

    compute                                                            [products of matrices]
    + near bytes / intra + far bytes / inter + packed bytes / pack     [all-to-alls of Ulysses]
    + (R - 1) max(0, exchange - attention / R)                         [rounds of the ring]
    + launch (exchanges + rounds) + max(0, launch kernels - compute)   [launches]

seconds: 1/R of a rank's attention hides each exchange of keys and values, and the host launches
kernels while the device computes. Source: db-SP, equation 4, `(R - 1) max(compute, exchange) +
compute`, double-buffered as in FastUSP.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import MAX_RANKS, choice, fields, number, of_type, rate, shown, whole
from bascule.errors import ConfigError
from bascule.files import parse_json, read_lines, to_path
from bascule.machine.calibration import BACKWARD, PASSES, RECOMPUTE, Calibration, built
from bascule.machine.costs import FLOPS_PER_UNIT, Cost, TransformerCost, evaluate, in_bag
from bascule.quantities import amount

BYTES_PER_VALUE = 2
"""Activations travel as bf16."""

NUM_ALL_TO_ALLS = 2
"""All-to-alls of a call of attention: q, k and v to the ranks of their heads, the output back."""

FLOPS_PER_VALUE = 4
"""FLOPs of a query-key pair, by value of the head: products with the key and the value."""

Amount: TypeAlias = float | Floats
"""A scalar of one rank, or (n,) per sequence, summed over its bag's ranks."""


def exposed_ring(exchange_s: Amount, attention_s: Amount, ring_degree: int) -> Amount:
    """Return the seconds of R - 1 exchanges of a sequence that its attention does not hide."""
    return (ring_degree - 1) * np.maximum(exchange_s - attention_s / ring_degree, 0.0)


class BagShape(NamedTuple):
    """The degrees of a bag, and where its ranks lie in nodes; they decide its exchange times."""

    size: int = 1
    ring: int = 1
    ranks_in_node: int = 1
    """The fewest ranks in one node of those that share heads."""
    is_in_node: bool = True
    """True if all its ranks are in one node."""

    @property
    def ulysses(self) -> int:
        """Number of ranks that share heads: the Ulysses degree."""
        return self.size // self.ring

    @classmethod
    def aligned(cls, ring: int, ulysses: int, ranks_per_node: int) -> "BagShape":
        """Return the shape of a bag that begins at a node's first rank; neighbours share heads."""
        size = ulysses * ring
        return cls(size, ring, min(ulysses, ranks_per_node), size <= ranks_per_node)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """The amounts that a rank of a bag computes, sends and launches."""

    compute_s: Amount = 0.0
    attention_s: Amount = 0.0  # part of `compute_s` behind which the ring sends
    heads_bytes: Amount = 0.0  # to the other ranks that share heads
    near_bytes: Amount = 0.0  # to any other rank of its node, before and after attention
    far_bytes: Amount = 0.0  # to any rank of another node, likewise
    ring_bytes: Amount = 0.0  # passed on in all rounds
    num_exchanges: int = 0
    num_rounds: int = 0
    num_kernels: int = 0

    @classmethod
    def of_layers(
        cls, bag: BagShape, num_layers: int, values: Amount, compute_s: Amount, attention_s: Amount
    ) -> "Work":
        """Return the work of a rank over all layers; `values` counts its elements of q in all."""
        tensor = BYTES_PER_VALUE * values
        return cls(
            compute_s=compute_s,
            attention_s=attention_s,
            heads_bytes=4 * tensor / bag.ulysses * (bag.ulysses - 1),
            ring_bytes=2 * tensor * (bag.ring - 1),
            num_exchanges=NUM_ALL_TO_ALLS * num_layers if bag.ulysses > 1 else 0,
            num_rounds=(bag.ring - 1) * num_layers,
        )


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of work by cause; `total` does not include waiting for the slowest rank."""

    compute_s: Amount = 0.0
    heads_s: Amount = 0.0
    ring_s: Amount = 0.0
    launch_s: Amount = 0.0
    waiting_s: Amount = 0.0  # of the average rank

    @property
    def total(self) -> Amount:
        """Seconds of the work, without the waiting."""
        return self.compute_s + self.heads_s + self.ring_s + self.launch_s

    def __add__(self, other: "Seconds") -> "Seconds":
        names = self.__dataclass_fields__
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        parts = {
            "compute": self.compute_s,
            "wires": self.heads_s + self.ring_s,
            "launches": self.launch_s,
            "waiting": self.waiting_s,
        }
        shares = ", ".join(f"{name} {amount(float(part), 's')}" for name, part in parts.items())
        return f"{amount(float(self.total), 's')} ({shares})"


@dataclass(frozen=True, slots=True)
class Wires:
    """Rates at which a rank sends and launches; work at an infinite rate needs no time."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float
    pack_bytes_per_s: float = math.inf

    def sending(self, near_bytes: Amount, far_bytes: Amount) -> Amount:
        """Predict the seconds in which a rank sends bytes within its node, and to other nodes."""
        return near_bytes / self.intra_bytes_per_s + far_bytes / self.inter_bytes_per_s

    def seconds(self, work: Work, bag: BagShape) -> Seconds:
        """Predict the seconds of work in a bag; a ring sends while it computes."""
        share = work.heads_bytes / max(bag.ulysses - 1, 1)
        heads_s = self.sending(
            share * (bag.ranks_in_node - 1) + work.near_bytes,
            share * (bag.ulysses - bag.ranks_in_node) + work.far_bytes,
        )
        heads_s = heads_s + share * bag.ulysses / self.pack_bytes_per_s
        passed = work.ring_bytes / max(bag.ring - 1, 1)  # in a round
        round_s = self.sending(*((passed, 0.0) if bag.is_in_node else (0.0, passed)))
        launch_s: Amount = self.latency_s * (work.num_exchanges + work.num_rounds)
        if work.num_kernels:
            launch_s += np.maximum(self.latency_s * work.num_kernels - work.compute_s, 0.0)
        ring_s = exposed_ring(round_s, work.attention_s, bag.ring)
        return Seconds(work.compute_s, heads_s, ring_s, launch_s)


_ATTENTION_BACKWARD = 2.5 * 648 / 561
"""Ratio of attention's backward seconds to its forward seconds: five products of matrices against
two, at 561 TFLOP/s against 648. Source: FlashAttention-3, speeds on an H100 at a head dimension of
128 and 16k tokens, not causal."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Ratios of the seconds of a step's passes to the seconds of a forward pass."""

    linear: float  # of the linear layers
    attention: float
    exchanges: float  # of all-to-alls and the ring; as many backward as forward
    name: str  # for tables

    def __post_init__(self) -> None:
        fields(self, linear=rate, attention=rate, exchanges=rate)

    def cost(self, cost: Cost) -> Cost:
        """Return the cost model whose seconds cover all passes."""
        if self == FORWARD:
            return cost
        wanted = "a TransformerCost, which tells attention apart"
        model: TransformerCost = of_type("model", cost, TransformerCost, wanted)
        unit_s = model.seconds_per_unit
        return replace(
            model,
            gamma=model.gamma * self.attention / self.linear,
            seconds_per_unit=None if unit_s is None else unit_s * self.linear,
        )


FORWARD = Passes(1.0, 1.0, 1.0, "forward")
TRAINING = Passes(4.0, 2.0 + _ATTENTION_BACKWARD, 3.0, "step")
"""Forward, recomputation and backward, which takes two forward passes of the linear layers."""

WITHOUT_RECOMPUTING = Passes(3.0, 1.0 + _ATTENTION_BACKWARD, 2.0, "step-without-recompute")
"""Forward and backward, no block checkpointed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal ranks, numbered node by node, and their speeds.

    The cost model predicts compute: a `TransformerCost` with `seconds_per_unit` was measured;
    without it, `flops_per_s` converts its FLOPs; any other model must give seconds. In each pass, a
    rank of a bag of several ranks spends ``2 * layers * latency_s`` on launching all-to-alls.

    Args:
        num_nodes: Number of nodes.
        ranks_per_node: Ranks per node.
        flops_per_s: FLOPs per second that a rank sustains.
        memory_bytes: Memory that a rank has for activations, besides weights, gradients and
            optimiser states. It limits plans if the cost model knows its `bytes_per_token`.
        intra_bytes_per_s: Bytes per second that a rank sends to ranks of its node.
        inter_bytes_per_s: Bytes per second that a rank sends to ranks of other nodes.
        latency_s: Seconds to launch an all-to-all.
        pack_bytes_per_s: Bytes per second that a rank reorders before and after exchanges; None: in
            no time.
        piece_s: Host seconds per piece that a layer's exchange reorders, if software loops over
            pieces, as KnapFormer does: U pieces for each sequence of a bag. They delay the step
            only if they exceed the compute.
        passes: The passes to predict: forward passes, or those of a training step (`TRAINING`). The
            rates above hold for a forward pass.
    """

    num_nodes: int
    ranks_per_node: int
    flops_per_s: float
    memory_bytes: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float
    pack_bytes_per_s: float | None = None
    piece_s: float = 0.0
    passes: Passes = FORWARD

    def __post_init__(self) -> None:
        count = whole, 1, MAX_RANKS
        fields(self, num_nodes=count, ranks_per_node=count, flops_per_s=rate, memory_bytes=rate)
        fields(self, intra_bytes_per_s=rate, inter_bytes_per_s=rate, pack_bytes_per_s=rate)
        fields(self, latency_s=number, piece_s=number, passes=(of_type, Passes, "a Passes(..)"))
        if self.num_ranks > MAX_RANKS:
            wrong = f"Cluster(num_nodes={self.num_nodes}, ranks_per_node={self.ranks_per_node})"
            raise ConfigError(f"{wrong} has {self.num_ranks} ranks: give at most {MAX_RANKS}")

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def check_world(self, num_ranks: int) -> None:
        """Refuse another number of ranks."""
        if num_ranks != self.num_ranks:
            wrong = f"a cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks each has"
            fix = "change num_nodes, or the input"
            raise ConfigError(f"{wrong} {self.num_ranks} ranks, not {num_ranks}: {fix}")

    def compute_seconds(
        self, cost: Cost, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None
    ) -> Floats:
        """Predict the compute seconds of sequences on one rank; arguments as in `evaluate`."""
        return self._compute(self.passes.cost(cost), seq_lens, num_pairs)

    def _compute(self, cost: Cost, seq_lens: Any, num_pairs: Any = None) -> Floats:
        """Predict seconds of compute by a cost model that covers all passes."""
        if not isinstance(cost, TransformerCost):
            return evaluate(cost, seq_lens, num_pairs)
        if cost.seconds_per_unit is not None:
            return cost.seconds(seq_lens, num_pairs)
        flops_per_s = self.flops_per_s / self.passes.linear
        return cost(seq_lens, num_pairs) * (FLOPS_PER_UNIT / flops_per_s)

    @property
    def wires(self) -> Wires:
        """Rates at which the exchanges of one forward pass take as long as those of all passes."""
        times, pack = self.passes.exchanges, self.pack_bytes_per_s
        return Wires(
            self.intra_bytes_per_s / times,
            self.inter_bytes_per_s / times,
            self.latency_s * times,
            math.inf if pack is None else pack / times,
        )

    def sequence_seconds(
        self, cost: Cost, bag: BagShape, lens: Ints, num_pairs: npt.ArrayLike | None = None
    ) -> Seconds:
        """Predict the seconds of (n,) sequences without launches, times the ranks of their bag."""
        cost = in_bag(self.passes.cost(cost), bag.ulysses)
        compute_s = self._compute(cost, lens, num_pairs)
        if bag.size == 1:
            return Seconds(compute_s)
        width, num_layers = _shape(cost)
        attention_s = compute_s - self._compute(cost, lens, 0 * lens)
        values = lens.astype(np.float64) * (width * num_layers)
        work = Work.of_layers(bag, num_layers, values, compute_s, attention_s)
        return self.wires.seconds(work, bag)

    def host_seconds(self, cost: Cost, bag: BagShape) -> float:
        """Predict the host's seconds for the pieces of a sequence that exchanges reorder."""
        if bag.ulysses == 1 or self.piece_s == 0.0:
            return 0.0
        return self.piece_s * self.passes.exchanges * _shape(cost)[1] * bag.ulysses


def _shape(cost: Cost) -> tuple[int, int]:
    """Return the width and the layers of a model, which decide the bytes of its exchanges."""
    if not isinstance(cost, TransformerCost):
        wrong = f"{type(cost).__name__} has no model width, so the bytes to send are not known"
        raise ConfigError(f"{wrong}: use a TransformerCost, or bags of one rank")
    return cost.d_model, cost.num_layers


def _of_datasheet(
    device: str, peak_tflops: float, link_gbs: float, link: str, memory_gb: float
) -> dict[str, Any]:
    """Take shares of a data sheet's numbers (bf16, dense; GB/s a rank in one direction)."""
    return {
        "device": device,
        "source": "datasheet",
        "matmul_flops_per_s": 0.55 * peak_tflops * 1e12,
        "attention_flops_per_s": 0.55 * peak_tflops * 1e12,
        "intra_bytes_per_s": 0.4 * link_gbs * 1e9,
        "inter_bytes_per_s": 25e9,
        "memory_bytes": memory_gb * 1e9,
        "launch_s": 10e-6,
        "peak_flops_per_s": peak_tflops * 1e12,
        "note": f"55 % of the peak of {amount(peak_tflops * 1e12, 'FLOP/s')}, 40 % of {link}'s "
        f"{amount(link_gbs * 1e9, 'B/s')} per direction, half of a 400 Gb/s link; launches guessed",
    }


KNOWN_PROFILES: dict[str, dict[str, Any]] = {
    "h100-datasheet": _of_datasheet("NVIDIA H100 SXM", 989.0, 450.0, "NVLink", 80.0)
    | {"matmul_flops_per_s": 544e12, "attention_flops_per_s": 544e12},  # rounded
    "h200-datasheet": _of_datasheet("NVIDIA H200 SXM", 989.0, 450.0, "NVLink", 141.0),
    "b200-datasheet": _of_datasheet("NVIDIA B200 SXM", 2250.0, 900.0, "NVLink", 180.0),
    "a100-datasheet": _of_datasheet("NVIDIA A100 SXM 80GB", 312.0, 300.0, "NVLink", 80.0),
    "l40s-datasheet": _of_datasheet("NVIDIA L40S", 362.0, 32.0, "PCIe 4.0 x16", 48.0),
    "h100-knapformer": {
        "device": "NVIDIA H100 SXM under KnapFormer",
        "source": "published",
        "matmul_flops_per_s": 325e12,
        "attention_flops_per_s": 325e12 / 0.426,
        "intra_bytes_per_s": 450e9,
        "inter_bytes_per_s": 25e9,
        "memory_bytes": 80e9,
        "launch_s": 10e-6,
        "host_s": 0.583,
        "peak_flops_per_s": 989e12,
        "pack_bytes_per_s": 182e9,
        "piece_s": 9.25e-6,
        "note": "matmul_flops_per_s, host_s and piece_s were fitted to four rows of Table 1 of "
        "KnapFormer; NVLink is the data sheet's, packing (5.5 passes over what is exchanged, at "
        "30 % of 3.35 TB/s) and half of a link of 400 Gb/s are assumed",
    },
}
"""Fields of a `HardwareProfile` by name."""

_SOURCES = {
    "measured": "measured",
    "datasheet": "assumed from a data sheet, not measured",
    "published": "fitted to a published table, not measured by us",
    "given": "given, not measured",
}

_FORMAT = {"bascule": "hardware profile", "version": 1}  # the first keys in a file of a profile
LIMITS: dict[str, tuple[float, float]] = {
    "matmul_flops_per_s": (1.0, 1e24),
    "attention_flops_per_s": (1.0, 1e24),
    "intra_bytes_per_s": (1.0, 1e24),
    "inter_bytes_per_s": (1.0, 1e24),
    "memory_bytes": (1.0, 1e15),
    "launch_s": (0.0, 1e6),
    "host_s": (0.0, 1e6),
    "peak_flops_per_s": (1.0, 1e24),
    "pack_bytes_per_s": (1.0, 1e24),
    "piece_s": (0.0, 1e6),
}
"""Least and most of the fields that hold a number: what is computed of them stays finite."""


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """The rates of a machine, and their source. None: not known.

    Args:
        device: Name of the machine.
        source: "measured", "datasheet", "published" or "given".
        matmul_flops_per_s: FLOPs per second that a rank sustains in matrix products.
        attention_flops_per_s: FLOPs per second of attention, on the blocks that it computes.
        intra_bytes_per_s: Bytes per second that a rank sends to ranks of its node.
        inter_bytes_per_s: Bytes per second that a rank sends to ranks of other nodes.
        memory_bytes: Memory of a rank.
        launch_s: Seconds to start a kernel or an exchange.
        host_s: Seconds that the host adds to each step of a rank, whatever its sequences.
        peak_flops_per_s: Peak FLOPs per second of the data sheet; HFU is a share of it.
        pack_bytes_per_s: See `Cluster`; None: in no time.
        piece_s: See `Cluster`; None: 0.
        note: The origin of the numbers, in words.
        calibration: The measurements of `bascule calibrate`; None: the numbers have another origin.
    """

    device: str
    source: str = "given"
    matmul_flops_per_s: float | None = None
    attention_flops_per_s: float | None = None
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    launch_s: float | None = None
    host_s: float | None = None
    peak_flops_per_s: float | None = None
    pack_bytes_per_s: float | None = None
    piece_s: float | None = None
    note: str = ""
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        text = of_type, str, "a text"
        fields(self, device=text, note=text, source=(choice, *_SOURCES))
        fields(self, **{name: (number, *limits) for name, limits in LIMITS.items()})
        fields(self, calibration=(of_type, Calibration, "a Calibration, or None"))
        number("HardwareProfile: gamma of its calibration", self.gamma, most=1e24)
        if self.calibration is None:
            return
        for name, measured in self.calibration.rates.items():
            value = getattr(self, name) or 0.0
            is_same = math.isclose(value, measured, rel_tol=1e-6)  # rounding, in a file
            if name in self.calibration.measured and not is_same:  # costs follow from the curves
                wrong = f"HardwareProfile({name}={value}): its calibration measured {measured}"
                raise ConfigError(f'{wrong}: take "calibration" out and say source="given" first')

    def __str__(self) -> str:
        """Return one line: the numbers, and whether they were measured."""
        made, parts = self.calibration, list[str]()
        for name, unit, text in (
            ("matmul_flops_per_s", "FLOP/s", ""),
            ("intra_bytes_per_s", "B/s", " in a node"),
            ("inter_bytes_per_s", "B/s", " between nodes"),
            ("launch_s", "s", " per launch"),
        ):
            if (value := getattr(self, name)) is not None:
                is_known = made is None or name in made.measured
                parts.append(f"{amount(value, unit)}{text}{'' if is_known else ' (not measured)'}")
        return f"{self.device}: {', '.join(parts) or 'no numbers'}; {self.provenance}"

    @property
    def numbers(self) -> list[str]:
        """Names of the fields that have a number."""
        return [name for name in LIMITS if getattr(self, name) is not None]

    @property
    def provenance(self) -> str:
        """The source of the numbers, in words, to print beside them."""
        made = self.calibration
        if made is None:
            return _SOURCES[self.source]
        ranks = f"{made.num_ranks} ranks with torch {made.torch}"
        return f"{made.name}, measured {made.date} on {ranks}"

    def provenance_of(self, field: str) -> str:
        """Return the source of one number, because a calibration does not measure all."""
        if self.calibration is None or field in self.calibration.measured:
            return self.provenance
        return f"from {self.calibration.base}, not measured"

    @property
    def gamma(self) -> float:
        """Time of an attention FLOP over the time of a linear FLOP; 1 if unknown."""
        if self.calibration is not None and (gamma := self.calibration.gamma) is not None:
            return gamma
        if self.matmul_flops_per_s is None or self.attention_flops_per_s is None:
            return 1.0
        return self.matmul_flops_per_s / self.attention_flops_per_s

    def numbers_of(self, *names: str) -> list[float]:
        """Return numbers by field; a ConfigError names the missing ones."""
        if missing := [name for name in names if getattr(self, name) is None]:
            wrong = f"the hardware profile of {self.device} has no {', '.join(missing)}"
            raise ConfigError(f"{wrong}: add what is missing to the file, or use another profile")
        return [getattr(self, name) for name in names]

    def cluster(self, num_nodes: int, ranks_per_node: int) -> Cluster:
        """Return a cluster of nodes of this machine; a ConfigError names missing numbers."""
        rates = ("matmul_flops_per_s", "memory_bytes", "intra_bytes_per_s", "inter_bytes_per_s")
        compute, memory, near, far, launch_s = self.numbers_of(*rates, "launch_s")
        numbers = num_nodes, ranks_per_node, compute, memory, near, far, launch_s
        return Cluster(*numbers, self.pack_bytes_per_s, self.piece_s or 0.0)

    def forward_seconds(self, ranks: Sequence[Work], bag: BagShape) -> Seconds:
        """Predict the seconds of a bag's slowest rank; rates of unused links may be missing."""
        near = ("intra_bytes_per_s",) if bag.size > 1 else ()
        far = () if bag.is_in_node else ("inter_bytes_per_s",)
        launch_s, *_ = self.numbers_of("launch_s", *near, *far)
        rates = self.intra_bytes_per_s or math.inf, self.inter_bytes_per_s or math.inf
        wires = Wires(*rates, launch_s)
        seconds = [wires.seconds(work, bag) for work in ranks]
        slowest = max(seconds, key=lambda rank_s: float(rank_s.total))
        mean = sum(float(rank_s.total) for rank_s in seconds) / len(seconds)
        return replace(slowest, waiting_s=slowest.total - mean)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return _FORMAT | asdict(self)

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            to_path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or one of `KNOWN_PROFILES`, such as "h100-datasheet"."""
        if isinstance(path, str) and path in KNOWN_PROFILES:
            return cls(**KNOWN_PROFILES[path])
        if isinstance(path, str) and re.fullmatch(r"[\w-]{1,80}", path) and not Path(path).exists():
            known = ", ".join(KNOWN_PROFILES)
            raise ConfigError(f"there is no profile {shown(path)}: give a file, or one of {known}")
        return cls.of_dict(parse_json("".join(read_lines(path)), str(path)), str(path))

    @classmethod
    def of_dict(cls, values: object, name: str) -> Self:
        """Read the values of `to_dict`, or of its JSON; messages begin with `name`."""
        values = cast(dict[str, Any], values) if isinstance(values, dict) else {}
        if {key: values.get(key) for key in _FORMAT} != _FORMAT:
            wrong = f"{name} is no hardware profile of version {_FORMAT['version']}"
            raise ConfigError(f"{wrong}: save one, or give one of {', '.join(KNOWN_PROFILES)}")
        values = {key: value for key, value in values.items() if key not in _FORMAT}
        values.pop("attention", None)  # a fit that former versions saved, and nothing reads
        try:
            if values.get("calibration") is not None:
                values["calibration"] = Calibration.of_dict(values["calibration"])
            return built(cls, values)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def passes_of(name: str, profile: HardwareProfile | None = None) -> Passes:
    """Return passes by name: "forward", or a "step" or "step-without-recompute" of training."""
    known = {passes.name: passes for passes in (FORWARD, TRAINING, WITHOUT_RECOMPUTING)}
    if name not in known:
        raise ConfigError(f"passes {name!r}: choose one of {', '.join(known)}")
    made = None if profile is None else profile.calibration
    if name == FORWARD.name or made is None:
        return known[name]
    fits = {run: made.fit(run) for run in PASSES}
    rates = {run: fit.coefficients[1:] for run, fit in fits.items() if fit is not None}
    if len(rates) < len(PASSES) or min(rates[PASSES[0]]) <= 0:  # the noise left nothing of a pass
        return known[name]
    runs = PASSES if name == TRAINING.name else (RECOMPUTE, BACKWARD)
    linear, attention = np.sum([rates[run] for run in runs], axis=0) / rates[PASSES[0]]
    return replace(known[name], linear=float(linear), attention=float(attention))
