"""Predict seconds of work on machines: rates of a machine, and one sum that all predictions use.

In a bag or a mesh of U R ranks, of which U share heads and R pass keys and values on, a rank takes

    compute                                                            [products of matrices]
    + near bytes / intra + far bytes / inter + packed bytes / pack     [all-to-alls of Ulysses]
    + (R - 1) max(0, exchange - attention / R)                         [rounds of the ring]
    + launch (exchanges + rounds) + max(0, launch kernels - compute)   [launches]

seconds: keys and values travel behind the R-th part of a rank's attention, and the host launches
while the device computes. Source: db-SP, equation 4, as `(R - 1) max(compute, exchange) + compute`,
double-buffered as in FastUSP.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import MAX_RANKS, choice, fields, number, of_type, rate, shown, whole
from bascule.errors import ConfigError
from bascule.files import parse_json, read_lines, to_path
from bascule.machine.calibration import (
    ALL_TO_ALL,
    BACKWARD,
    PASSES,
    POINT_TO_POINT,
    RECOMPUTE,
    Calibration,
    built,
)
from bascule.machine.costs import FLOPS_PER_UNIT, Cost, TransformerCost, evaluate, in_bag
from bascule.plan.topology import Topology

if TYPE_CHECKING:  # plans are made by the solver, which imports the machines
    from bascule.plan.sparse.plan import SparsePlan

BYTES_PER_VALUE = 2
"""Activations travel as bf16."""

NUM_ALL_TO_ALLS = 2
"""All-to-alls of a call of attention: q, k and v to the ranks of their heads, the output back."""

FLOPS_PER_VALUE = 4
"""FLOPs of a query-key pair, by value of the head: products with the key and the value."""

Amount: TypeAlias = float | Floats
"""A number of a rank; or (n,) numbers of sequences, of all ranks of their bag together."""


def exposed_ring(exchange_s: Amount, attention_s: Amount, ring_degree: int) -> Amount:
    """Return the seconds of R - 1 exchanges that attention, R rounds, does not hide, a sequence."""
    return (ring_degree - 1) * np.maximum(exchange_s - attention_s / ring_degree, 0.0)


class Bag(NamedTuple):
    """The degrees of a bag and where its ranks are: all that decides what its exchanges take."""

    size: int = 1
    ring: int = 1
    ranks_in_node: int = 1
    """The fewest ranks in one node of those that share heads."""
    is_in_node: bool = True
    """True if all its ranks are in one node."""

    @property
    def ulysses(self) -> int:
        """Ranks that share heads."""
        return self.size // self.ring

    @classmethod
    def aligned(cls, ulysses: int, ring: int, ranks_per_node: int) -> "Bag":
        """Return a bag that begins with a node; neighbours share heads."""
        size = ulysses * ring
        return cls(size, ring, min(ulysses, ranks_per_node), size <= ranks_per_node)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """Amounts that a rank of a bag computes, sends and launches."""

    compute_s: Amount = 0.0
    attention_s: Amount = 0.0  # the part of it that hides what the ring sends
    heads_bytes: Amount = 0.0  # to the other ranks that share heads
    ring_bytes: Amount = 0.0  # passed on in all rounds
    num_exchanges: int = 0
    num_rounds: int = 0
    num_kernels: int = 0

    @classmethod
    def of_layers(
        cls, bag: Bag, num_layers: int, values: Amount, compute_s: Amount, attention_s: Amount
    ) -> "Work":
        """Return the work of a rank with so many values of q, in all layers."""
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
    """Seconds of work by what they go to; waiting for the slowest rank is none of the total."""

    compute_s: Amount = 0.0
    heads_s: Amount = 0.0
    ring_s: Amount = 0.0
    launch_s: Amount = 0.0
    waiting_s: Amount = 0.0  # of the average rank

    @property
    def total(self) -> Amount:
        """All but the waiting."""
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
        shares = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts.items())
        return f"{self.total * 1e3:.3g} ms ({shares})"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal ranks, numbered node by node, and their speeds.

    Compute is the cost model's: a `TransformerCost` with `seconds_per_unit` is measured; one
    without is converted with `flops_per_s`; any other model must give seconds. Once a pass, a rank
    of a bag with more than one rank spends ``2 * layers * latency_s`` on launching all-to-alls.

    Args:
        num_nodes: Nodes.
        ranks_per_node: Ranks in a node.
        flops_per_s: FLOPs that a rank sustains in a second.
        memory_bytes: Memory that a rank has for activations: what weights, gradients and optimiser
            states leave. It limits plans if the cost model knows its `bytes_per_token`.
        intra_bytes_per_s: Bytes that a rank sends in a second to ranks of its node.
        inter_bytes_per_s: The same, to ranks of other nodes.
        latency_s: Time to launch an all-to-all.
        pack_bytes_per_s: Bytes that a rank brings into order in a second, before and after the
            exchanges; None: in no time.
        piece_s: Seconds of the host for each piece that an exchange of a layer puts into order, U
            for each sequence of a bag, where software loops over them, as KnapFormer does. They
            delay the step where they take longer than the compute.

    Raises:
        ConfigError: A value is out of range.
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

    def __post_init__(self) -> None:
        count = whole, 1, MAX_RANKS
        fields(self, num_nodes=count, ranks_per_node=count, flops_per_s=rate, memory_bytes=rate)
        fields(self, intra_bytes_per_s=rate, inter_bytes_per_s=rate, pack_bytes_per_s=rate)
        fields(self, latency_s=number, piece_s=number)
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"Cluster(num_nodes={self.num_nodes}, ranks_per_node={self.ranks_per_node}): "
                f"{self.num_ranks} ranks, at most {MAX_RANKS} can be planned for"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def check_world(self, num_ranks: int) -> None:
        """Refuse a world of another size."""
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"a cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks each has "
                f"{self.num_ranks} ranks, not {num_ranks}: change num_nodes, or the input"
            )

    def compute_seconds(
        self, cost: Cost, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None
    ) -> Floats:
        """Return forward seconds of sequences of these many tokens on one rank, as `evaluate`."""
        if not isinstance(cost, TransformerCost):
            return evaluate(cost, seq_lens, num_pairs)
        if cost.seconds_per_unit is not None:
            return cost.seconds(seq_lens, num_pairs)
        return cost(seq_lens, num_pairs) * (FLOPS_PER_UNIT / self.flops_per_s)

    def wire_seconds(self, near_bytes: Amount, far_bytes: Amount) -> Amount:
        """Return the seconds in which a rank sends bytes to ranks of its node, and of others."""
        return near_bytes / self.intra_bytes_per_s + far_bytes / self.inter_bytes_per_s

    def seconds(self, work: Work, bag: Bag) -> Seconds:
        """Predict seconds of work in a bag; a ring sends while it computes."""
        each = work.heads_bytes / max(bag.ulysses - 1, 1)
        heads_s = self.wire_seconds(
            each * (bag.ranks_in_node - 1), each * (bag.ulysses - bag.ranks_in_node)
        )
        if self.pack_bytes_per_s is not None:
            heads_s = heads_s + each * bag.ulysses / self.pack_bytes_per_s
        passed = work.ring_bytes / max(bag.ring - 1, 1)  # in a round
        round_s = self.wire_seconds(*((passed, 0.0) if bag.is_in_node else (0.0, passed)))
        launch_s: Amount = self.latency_s * (work.num_exchanges + work.num_rounds)
        if work.num_kernels:
            launch_s += np.maximum(self.latency_s * work.num_kernels - work.compute_s, 0.0)
        ring_s = exposed_ring(round_s, work.attention_s, bag.ring)
        return Seconds(work.compute_s, heads_s, ring_s, launch_s)

    def sequence_seconds(
        self, cost: Cost, bag: Bag, lens: Ints, num_pairs: npt.ArrayLike | None = None
    ) -> Seconds:
        """Predict seconds of (n,) sequences, times the ranks of their bag, launches aside."""
        cost = in_bag(cost, bag.ulysses)
        compute_s = self.compute_seconds(cost, lens, num_pairs)
        if bag.size == 1:
            return Seconds(compute_s)
        width, num_layers = _shape(cost)
        attention_s = compute_s - self.compute_seconds(cost, lens, 0 * lens)
        values = lens.astype(np.float64) * (width * num_layers)
        work = Work.of_layers(bag, num_layers, values, compute_s, attention_s)
        return self.seconds(work, bag)

    def host_seconds(self, cost: Cost, bag: Bag) -> float:
        """Return the seconds that the host of a rank spends on the pieces of a sequence."""
        if bag.ulysses == 1 or self.piece_s == 0.0:
            return 0.0
        return self.piece_s * _shape(cost)[1] * bag.ulysses

    def ranks_in_node(self, topology: Topology) -> Ints:
        """Return the (num_bags,) fewest ranks of each bag in one node."""
        first, sizes, per_node = topology.first_ranks, topology.bag_sizes, self.ranks_per_node
        last = first + sizes - 1
        at_ends = np.minimum(per_node - first % per_node, last % per_node + 1)
        return np.where(first // per_node == last // per_node, sizes, at_ends)


def _shape(cost: Cost) -> tuple[int, int]:
    """Return the width and the layers of the model, which decide what its exchanges carry."""
    if not isinstance(cost, TransformerCost):
        raise ConfigError(
            f"the wires of a bag carry activations, but {type(cost).__name__} does not know the "
            "width of the model: use a TransformerCost, or bags of one rank"
        )
    return cost.d_model, cost.num_layers


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """The load of the slowest of U x R ranks in a call of block-sparse attention."""

    ulysses_degree: int
    ring_degree: int
    work: float  # of the slowest rank in all rounds, in pairs or blocks: imbalance times the mean
    all_to_all_bytes: float  # that it sends to others in both all-to-alls; 0 if there are none
    p2p_bytes: float  # keys and values that it passes on in a round
    copied_bytes: float = 0.0  # q, k, v and outputs that it lays out; 0 where all rows stay

    def __post_init__(self) -> None:
        fields(self, ulysses_degree=(whole, 1), ring_degree=(whole, 1))
        fields(self, work=number, all_to_all_bytes=number, p2p_bytes=number, copied_bytes=number)

    @classmethod
    def of_plan(cls, plan: "SparsePlan", batch: int, row_bytes: int) -> "AttentionLoad":
        """Return the load in query-key pairs; bytes other than p2p are means over the ranks."""
        mean_work = float(plan.tiles.sum()) / plan.num_ranks
        used = plan.kv_rank_of >= 0
        lens = np.broadcast_to(plan.kv.lens, used.shape)[used]
        kv_tokens = np.bincount(plan.kv_rank_of[used], lens, plan.num_ranks)
        q_tokens = len(plan.ring_of) * int(plan.q.lens.sum())
        copied = 2.0 * (q_tokens + float(kv_tokens.sum())) / plan.num_ranks
        return cls(
            plan.ulysses_degree,
            plan.ring_degree,
            batch * plan.imbalance * mean_work,
            plan.wire_bytes(row_bytes, 1, batch) / plan.num_ranks,
            2.0 * batch * float(kv_tokens.max()) * row_bytes if plan.ring_degree > 1 else 0.0,
            0.0 if plan.is_local else batch * copied * row_bytes,
        )

    @property
    def degrees(self) -> tuple[int, int]:
        """(U, R)."""
        return (self.ulysses_degree, self.ring_degree)


@dataclass(frozen=True, slots=True)
class AttentionLatency:
    """Seconds of such a call: `copies + exchanges + R compute + (R - 1) max(0, p2p - compute)`.

    With `copies = copy_s_per_byte copied_bytes`, `exchanges = 2 all_to_all_latency_s +
    all_to_all_s_per_byte all_to_all_bytes`, or 0 where nothing is sent, `compute = launch_s +
    compute_s_per_work work / R`, and `p2p = p2p_latency_s + p2p_s_per_byte p2p_bytes`. Source:
    db-SP, equation 4, without the imbalance of exchanges; latencies, bytes and copies are ours.

    Args:
        all_to_all_latency_s: Seconds to start an all-to-all.
        all_to_all_s_per_byte: Seconds per byte that a rank sends in it.
        p2p_latency_s: Seconds to start an exchange with the neighbours in the ring.
        p2p_s_per_byte: Seconds per byte that a rank passes on.
        compute_s_per_work: Seconds per unit of work.
        launch_s: Seconds to start the kernel of a period.
        copy_s_per_byte: Seconds per byte that a rank lays out.
        fit_error: Root mean square relative error of the fit that gave the above, if any.

    Raises:
        ConfigError: A coefficient, or the error, is negative or not finite.
    """

    all_to_all_latency_s: float
    all_to_all_s_per_byte: float
    p2p_latency_s: float
    p2p_s_per_byte: float
    compute_s_per_work: float
    launch_s: float
    copy_s_per_byte: float = 0.0
    _: KW_ONLY
    fit_error: float | None = None

    def __post_init__(self) -> None:
        fields(self, **dict.fromkeys(self.__dataclass_fields__, number))

    def __call__(self, load: AttentionLoad) -> float:
        """Predict the seconds of a call."""
        compute_s = self.launch_s * load.ring_degree + self.compute_s_per_work * load.work
        p2p_s = self.p2p_latency_s + self.p2p_s_per_byte * load.p2p_bytes
        exchange_s = self.all_to_all_s_per_byte * load.all_to_all_bytes
        if load.all_to_all_bytes > 0:
            exchange_s += NUM_ALL_TO_ALLS * self.all_to_all_latency_s
        exchange_s += self.copy_s_per_byte * load.copied_bytes
        return exchange_s + compute_s + float(exposed_ring(p2p_s, compute_s, load.ring_degree))

    def row_work(self, row_bytes: int) -> float:
        """Return the work that takes as long as one row of an all-to-all."""
        row_s = (self.all_to_all_s_per_byte + self.copy_s_per_byte) * row_bytes
        return row_s / self.compute_s_per_work if self.compute_s_per_work else math.inf


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
        "note": f"55 % of the peak of {peak_tflops:g} TFLOP/s in bf16, 40 % of {link}'s "
        f"{link_gbs:g} GB/s a direction, half of a link of 400 Gb/s; launches guessed",
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
_NESTED = {"attention": partial(built, AttentionLatency), "calibration": Calibration.of_dict}
"""Fields that hold more than a number, and how they are made of what JSON holds."""

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

    Clusters and predictions of attention take their numbers from here.

    Args:
        device: Its name.
        source: "measured", "datasheet", "published" or "given".
        matmul_flops_per_s: FLOPs in a second that a rank sustains in products of matrices.
        attention_flops_per_s: The same in attention, on the blocks that are computed.
        intra_bytes_per_s: Bytes that a rank sends in a second to ranks of its node.
        inter_bytes_per_s: The same, to ranks of other nodes.
        memory_bytes: Memory of a rank.
        launch_s: Seconds to start a kernel or an exchange.
        host_s: Seconds that the host adds to a step of a rank, whatever its sequences.
        peak_flops_per_s: FLOPs in a second of the data sheet, of which HFU is a share.
        pack_bytes_per_s: See `Cluster`; None: in no time.
        piece_s: See `Cluster`; None: 0.
        attention: The fit of measured calls of attention, of one width of heads; used in place of
            the rates above to predict attention.
        note: The origin of the numbers, in words.
        calibration: The measurements of `bascule calibrate`; None: the numbers have another origin.

    Raises:
        ConfigError: A value is out of range.
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
    attention: AttentionLatency | None = None
    note: str = ""
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        text = of_type, str, "a text"
        fields(self, device=text, note=text, source=(choice, *_SOURCES))
        fields(self, **{name: (number, *limits) for name, limits in LIMITS.items()})
        fields(
            self,
            attention=(of_type, AttentionLatency, "an AttentionLatency, or None"),
            calibration=(of_type, Calibration, "a Calibration, or None"),
        )
        number("HardwareProfile: gamma of its calibration", self.gamma, most=1e24)
        if self.calibration is None:
            return
        for name, measured in self.calibration.rates.items():
            value = getattr(self, name) or 0.0
            is_same = math.isclose(value, measured, rel_tol=1e-6)  # rounding, in a file
            if name in self.calibration.measured and not is_same:  # costs follow from the curves
                raise ConfigError(
                    f"HardwareProfile({name}={value:g}): its calibration measured {measured:g}; to "
                    'give a number of your own, take "calibration" out and say source="given"'
                )

    def __str__(self) -> str:
        """One line: the numbers, and whether anybody measured them."""
        made, parts = self.calibration, list[str]()
        for name, unit, text in (
            ("matmul_flops_per_s", 1e12, "TFLOP/s"),
            ("intra_bytes_per_s", 1e9, "GB/s in a node"),
            ("inter_bytes_per_s", 1e9, "GB/s between nodes"),
            ("launch_s", 1e-6, "us a launch"),
        ):
            if (value := getattr(self, name)) is not None:
                is_known = made is None or name in made.measured
                parts.append(f"{value / unit:.4g} {text}{'' if is_known else ' (not measured)'}")
        if self.attention is not None:
            error = self.attention.fit_error
            fit = "" if error is None else f" with an error of {error:.1%}"
            parts.append(f"attention fitted{fit}")
        return f"{self.device}: {', '.join(parts) or 'no numbers'}; {self.provenance}"

    @property
    def numbers(self) -> list[str]:
        """Names of the fields that hold one."""
        return [name for name in (*LIMITS, "attention") if getattr(self, name) is not None]

    @property
    def provenance(self) -> str:
        """The source of the numbers, in words, for wherever they appear."""
        made = self.calibration
        if made is None:
            return _SOURCES[self.source]
        ranks = f"{made.num_ranks} ranks with torch {made.torch}"
        return f"{made.name}, measured {made.date} on {ranks}"

    def provenance_of(self, field: str) -> str:
        """Return the source of one number: a calibration leaves some as they were."""
        if self.calibration is None or field in self.calibration.measured:
            return self.provenance
        return f"from {self.calibration.base}, not measured"

    @property
    def gamma(self) -> float:
        """Seconds of a FLOP of attention over those of one of the linear layers; 1 if unknown."""
        if self.calibration is not None and (gamma := self.calibration.gamma) is not None:
            return gamma
        if self.matmul_flops_per_s is None or self.attention_flops_per_s is None:
            return 1.0
        return self.matmul_flops_per_s / self.attention_flops_per_s

    def numbers_of(self, *names: str) -> list[float]:
        """Return numbers that must be known; those that are not are named in a ConfigError."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ConfigError(
                f"the hardware profile of {self.device} has no {', '.join(missing)}: add what is "
                "missing to the file, or use another profile"
            )
        return [getattr(self, name) for name in names]

    def cluster(self, num_nodes: int, ranks_per_node: int) -> Cluster:
        """Return nodes of such ranks; a ConfigError names the numbers that are missing."""
        rates = ("matmul_flops_per_s", "memory_bytes", "intra_bytes_per_s", "inter_bytes_per_s")
        compute, memory, near, far, launch_s = self.numbers_of(*rates, "launch_s")
        numbers = num_nodes, ranks_per_node, compute, memory, near, far, launch_s
        return Cluster(*numbers, self.pack_bytes_per_s, self.piece_s or 0.0)

    def forward_seconds(self, ranks: Sequence[Work], bag: Bag) -> Seconds:
        """Predict seconds of the slowest rank of a bag; wires of unknown rate carry nothing."""
        near = ("intra_bytes_per_s",) if bag.size > 1 else ()
        far = () if bag.is_in_node else ("inter_bytes_per_s",)
        launch_s, *_ = self.numbers_of("launch_s", *near, *far)
        wires = self.intra_bytes_per_s or 1.0, self.inter_bytes_per_s or 1.0
        machine = Cluster(1, bag.size, 1.0, 1.0, *wires, launch_s)
        each = [machine.seconds(work, bag) for work in ranks]
        slowest = max(each, key=lambda one: float(one.total))
        mean = sum(float(one.total) for one in each) / len(each)
        return replace(slowest, waiting_s=slowest.total - mean)

    def attention_latency(self, head_dim: int) -> AttentionLatency:
        """Predict calls of attention by the fit if there is one, or else by rates and launches."""
        if self.attention is not None:
            return self.attention
        compute, wire, launch_s = self.numbers_of(
            "attention_flops_per_s", "intra_bytes_per_s", "launch_s"
        )
        work_s = FLOPS_PER_VALUE * whole("head_dim", head_dim, 1) / compute
        made = self.calibration
        near = [None if made is None else made.fit(what) for what in (ALL_TO_ALL, POINT_TO_POINT)]
        wires = [(launch_s, 1.0 / wire) if x is None else x.coefficients[:2] for x in near]
        (all_s, all_byte_s), (next_s, next_byte_s) = wires
        return AttentionLatency(all_s, all_byte_s, next_s, next_byte_s, work_s, launch_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return _FORMAT | asdict(self)

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            to_path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or take one of `KNOWN_PROFILES`, as "h100-datasheet"."""
        if isinstance(path, str) and path in KNOWN_PROFILES:
            return cls(**KNOWN_PROFILES[path])
        if isinstance(path, str) and re.fullmatch(r"[\w-]{1,80}", path) and not Path(path).exists():
            known = ", ".join(KNOWN_PROFILES)
            raise ConfigError(f"there is no profile {shown(path)}: give a file, or one of {known}")
        return cls.of_dict(parse_json("".join(read_lines(path)), str(path)), str(path))

    @classmethod
    def of_dict(cls, values: object, name: str) -> Self:
        """Read what `to_dict` returned, or JSON of it; messages begin with `name`."""
        values = cast(dict[str, Any], values) if isinstance(values, dict) else {}
        if {key: values.get(key) for key in _FORMAT} != _FORMAT:
            raise ConfigError(
                f"{name} is no hardware profile of version {_FORMAT['version']}, as "
                f"HardwareProfile.save writes them; by name there is {', '.join(KNOWN_PROFILES)}"
            )
        values = {key: value for key, value in values.items() if key not in _FORMAT}
        try:
            for key, build in _NESTED.items():
                if values.get(key) is not None:
                    values[key] = build(values[key])
            return built(cls, values)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


_ATTENTION_BACKWARD = 2.5 * 648 / 561
"""Seconds of the backward of attention over those of its forward: five products of matrices against
two, at 561 TFLOP/s against 648. Source: FlashAttention-3, speeds on an H100 at a head dimension of
128 and 16k tokens, not causal."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Work of a step over that of the forward pass that plans are priced by."""

    linear: float  # seconds of the linear layers over those of a forward pass
    attention: float  # the same of attention
    exchanges: float  # the same of all-to-alls and the ring; as many backward as forward
    name: str  # for tables

    def __post_init__(self) -> None:
        fields(self, linear=rate, attention=rate, exchanges=rate)

    def over(self, timed: "Passes") -> "Passes":
        """Return the same for a cost model that was timed in other passes; wires were not."""
        linear, attention = self.linear / timed.linear, self.attention / timed.attention
        return replace(self, linear=linear, attention=attention)


FORWARD = Passes(1.0, 1.0, 1.0, "forward")
TRAINING = Passes(4.0, 2.0 + _ATTENTION_BACKWARD, 3.0, "step")
"""Forward, recomputation and backward, which takes two forward passes of the linear layers."""

WITHOUT_RECOMPUTING = Passes(3.0, 1.0 + _ATTENTION_BACKWARD, 2.0, "step-without-recompute")
"""Forward and backward, no block checkpointed."""


def in_passes(
    cost: TransformerCost, cluster: Cluster, passes: Passes
) -> tuple[TransformerCost, Cluster]:
    """Return a cost model and a cluster whose seconds are of a step, not of a forward pass."""
    of_type("model", cost, TransformerCost, "a TransformerCost, which tells attention apart")
    each, exchanges = cost.seconds_per_unit, passes.exchanges
    priced = replace(
        cost,
        gamma=cost.gamma * passes.attention / passes.linear,
        seconds_per_unit=None if each is None else each * passes.linear,
    )
    pack = cluster.pack_bytes_per_s
    slowed = replace(
        cluster,
        flops_per_s=cluster.flops_per_s / passes.linear,
        intra_bytes_per_s=cluster.intra_bytes_per_s / exchanges,
        inter_bytes_per_s=cluster.inter_bytes_per_s / exchanges,
        pack_bytes_per_s=None if pack is None else pack / exchanges,
        latency_s=cluster.latency_s * exchanges,
        piece_s=cluster.piece_s * exchanges,
    )
    return priced, slowed


def passes_of(name: str, profile: HardwareProfile | None = None) -> Passes:
    """Return passes by name: "forward", or a "step" or "step-without-recompute" of training."""
    known = {passes.name: passes for passes in (FORWARD, TRAINING, WITHOUT_RECOMPUTING)}
    if name not in known:
        raise ConfigError(f"passes {name!r}: choose one of {', '.join(known)}")
    made = None if profile is None else profile.calibration
    if name == FORWARD.name or made is None:
        return known[name]
    fits = {one: made.fit(one) for one in PASSES}
    rates = {one: fit.coefficients[1:] for one, fit in fits.items() if fit is not None}
    if len(rates) < len(PASSES) or min(rates[PASSES[0]]) <= 0:  # the noise left nothing of a pass
        return known[name]
    run = PASSES if name == TRAINING.name else (RECOMPUTE, BACKWARD)
    linear, attention = np.sum([rates[one] for one in run], axis=0) / rates[PASSES[0]]
    return replace(known[name], linear=float(linear), attention=float(attention))
