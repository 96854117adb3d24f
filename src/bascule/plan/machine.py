"""The machines: what they do in a second, and the seconds that work takes on them."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.calibration import (
    ALL_TO_ALL,
    BACKWARD,
    PASSES,
    POINT_TO_POINT,
    RECOMPUTE,
    Calibration,
    built,
)
from bascule.plan.checks import MAX_RANKS, number, of_type, put, rate, shown, whole
from bascule.plan.costs import FLOPS_PER_UNIT, Cost, TransformerCost, evaluate
from bascule.plan.files import parse_json, read_lines, to_path
from bascule.plan.topology import Topology

if TYPE_CHECKING:  # plans are made by the solver, which imports the machines
    from bascule.plan.sparse.plan import SparsePlan


BYTES_PER_VALUE = 2
"""Activations travel as bf16."""

VALUES_PER_TOKEN = 4
"""Of the width of the model: q, k and v to the heads, and the output back."""

EXCHANGES_PER_LAYER = 2
"""All-to-alls of Ulysses attention: one to the heads, one back."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal ranks, and how fast they compute and talk. Ranks are numbered node by node.

    In a bag of G ranks, a forward pass over a sequence of L tokens takes each rank

        compute(L) / G  +  layers * 8 d * (L / G) * ((R - 1) / intra + (G - R) / inter) / G

    seconds: a G-th of the compute, and the Ulysses all-to-alls of its L / G tokens. A token is 4
    values of width d a layer, 2 bytes each; of a rank's tokens a G-th goes to each rank of the bag,
    of which R - 1 others are in its own node (the fewest of any rank, where a bag crosses nodes).
    All sequences of a bag share their all-to-alls: once a pass, a rank of a bag with more than one
    rank spends ``2 * layers * latency_s`` on launching them, whatever it holds. What a ring adds
    stands in `plan.prices`.

    Compute is the cost model's: a `TransformerCost` with `seconds_per_unit` is measured; one
    without is converted with `flops_per_s`; any other model must give seconds already.

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
            exchanges; None: in no time. Adds ``layers * 8 d * (L / G) / pack_bytes_per_s``.
        piece_s: Seconds of the host for each piece that an exchange of a layer puts into order, of
            which there are G for each sequence of a bag: of software that loops over them, as
            KnapFormer does. The host works while the device computes: what takes longer than the
            compute delays the step. bascule has no such loop.

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
        for name in ("num_nodes", "ranks_per_node"):
            put(self, name, whole(f"Cluster({name}", getattr(self, name), 1, MAX_RANKS))
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            check = number if field.name in ("latency_s", "piece_s") else rate
            if value is not None or field.name != "pack_bytes_per_s":
                put(self, field.name, check(f"Cluster({field.name}", value))
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
        """Refuse a world of another size.

        Raises:
            ConfigError: Says both sizes.
        """
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"a cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks each has "
                f"{self.num_ranks} ranks, not {num_ranks}: change num_nodes, or the input"
            )

    def compute_seconds(
        self, cost: Cost, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None
    ) -> Floats:
        """Forward seconds of sequences of these many tokens on one rank; as `evaluate`."""
        if not isinstance(cost, TransformerCost):
            return evaluate(cost, seq_lens, num_pairs)
        if cost.seconds_per_unit is not None:
            return cost.seconds(seq_lens, num_pairs)
        return cost(seq_lens, num_pairs) * (FLOPS_PER_UNIT / self.flops_per_s)

    def wire_seconds(self, cost: Cost, bag_size: int, ranks_in_node: int | None = None) -> float:
        """Seconds that a token of a sequence costs each rank of its bag in all-to-alls and packing.

        Args:
            cost: Knows the width and the layers of the model.
            bag_size: Ranks of the bag.
            ranks_in_node: Ranks of the bag in a rank's own node. Default: as many as fit.

        Raises:
            ConfigError: The cost model has no width.
        """
        if bag_size == 1:
            return 0.0
        local = min(bag_size, self.ranks_per_node) if ranks_in_node is None else ranks_in_node
        width, num_layers = _shape(cost)
        num_bytes = BYTES_PER_VALUE * VALUES_PER_TOKEN * width * num_layers / bag_size**2
        near, far = (local - 1) / self.intra_bytes_per_s, (bag_size - local)
        pack = 0.0 if self.pack_bytes_per_s is None else bag_size / self.pack_bytes_per_s
        return num_bytes * (near + far / self.inter_bytes_per_s + pack)

    def launch_seconds(self, cost: Cost, bag_size: int) -> float:
        """Seconds that a rank of a bag spends on launching the all-to-alls of a forward pass."""
        if bag_size == 1:
            return 0.0
        return EXCHANGES_PER_LAYER * _shape(cost)[1] * self.latency_s

    def host_seconds(self, cost: Cost, bag_size: int) -> float:
        """Seconds that the host of a rank spends on the pieces of a sequence in its bag."""
        if bag_size == 1 or self.piece_s == 0.0:
            return 0.0
        return self.piece_s * _shape(cost)[1] * bag_size

    def bag_seconds(self, cost: Cost, seq_lens: npt.ArrayLike, bag_size: int) -> Floats:
        """Seconds of sequences of these many tokens on each rank of a bag, without launches."""
        wire = np.asarray(seq_lens, dtype=np.float64) * self.wire_seconds(cost, bag_size)
        return self.compute_seconds(cost, seq_lens) / bag_size + wire

    def nodes_of(self, topology: Topology) -> tuple[Ints, Ints]:
        """(num_bags,) node of each bag's first rank, and the fewest of its ranks in one node."""
        first, sizes = topology.first_ranks, topology.bag_sizes
        last = first + sizes - 1
        node, last_node = first // self.ranks_per_node, last // self.ranks_per_node
        head = (node + 1) * self.ranks_per_node - first
        tail = last - last_node * self.ranks_per_node + 1
        return node, np.where(node == last_node, sizes, np.minimum(head, tail))


def _shape(cost: Cost) -> tuple[int, int]:
    """Width and layers of the model, which decide what its all-to-alls carry."""
    if not isinstance(cost, TransformerCost):
        raise ConfigError(
            f"the wires of a bag carry activations, but {type(cost).__name__} does not know the "
            "width of the model: use a TransformerCost, or bags of one rank"
        )
    return cost.d_model, cost.num_layers


# Block-sparse attention on a mesh. The model is db-SP's equation 4: the all-to-alls, then R periods
# of compute, of which all but the last hide an exchange of keys and values, or are hidden by it.
# There the imbalance multiplies compute and exchange alike; here only the work, since what is
# exchanged does not depend on the mask. What a rank lays out in its own memory, before and after,
# is ours: it is a good part of a call with little work.

NUM_ALL_TO_ALLS = 2
"""All-to-alls of a call: queries, keys and values to their ranks, and the output back."""


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """What an attention call asks of the slowest of U x R ranks.

    Args:
        ulysses_degree: U.
        ring_degree: R.
        work: What the slowest rank computes in all R periods: the imbalance times the mean over the
            ranks, in query-key pairs or in blocks; in one unit for a fit and its predictions.
        all_to_all_bytes: What it sends to other ranks in both all-to-alls; 0 if there are none.
        p2p_bytes: Keys and values that it passes on in a period.
        copied_bytes: Queries, keys, values and outputs of a rank, which it lays out for exchange
            and compute; 0 where all rows are used by the rank that has them.

    Raises:
        ConfigError: A value is out of range.
    """

    ulysses_degree: int
    ring_degree: int
    work: float
    all_to_all_bytes: float
    p2p_bytes: float
    copied_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ulysses_degree", "ring_degree"):
            put(self, name, whole(f"AttentionLoad({name}", getattr(self, name), 1))
        for name in ("work", "all_to_all_bytes", "p2p_bytes", "copied_bytes"):
            put(self, name, number(f"AttentionLoad({name}", getattr(self, name)))

    @classmethod
    def of_plan(cls, plan: "SparsePlan", batch: int, row_bytes: int) -> "AttentionLoad":
        """The load of a plan, in query-key pairs; of bytes other than p2p the mean over the ranks.

        Args:
            plan: Its tiles are the work.
            batch: Sequences that are attended alike.
            row_bytes: Of one token of one head of one of them.
        """
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
    """Seconds of a call: `copies + exchanges + (R - 1) max(compute, p2p) + compute`.

    With `copies = copy_s_per_byte copied_bytes`, `exchanges = 2 all_to_all_latency_s +
    all_to_all_s_per_byte all_to_all_bytes`, or 0 where nothing is sent, `compute = launch_s +
    compute_s_per_work work / R`, and `p2p = p2p_latency_s + p2p_s_per_byte p2p_bytes`. Source:
    db-SP, equation 4; latencies, bytes and copies are ours.

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
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "fit_error":
                put(self, field.name, number(f"AttentionLatency({field.name}", value))

    def __call__(self, load: AttentionLoad) -> float:
        """Predicted seconds of a call."""
        compute_s = self.launch_s + self.compute_s_per_work * load.work / load.ring_degree
        p2p_s = self.p2p_latency_s + self.p2p_s_per_byte * load.p2p_bytes
        exchange_s = self.all_to_all_s_per_byte * load.all_to_all_bytes
        if load.all_to_all_bytes > 0:
            exchange_s += NUM_ALL_TO_ALLS * self.all_to_all_latency_s
        exchange_s += self.copy_s_per_byte * load.copied_bytes
        return exchange_s + (load.ring_degree - 1) * max(compute_s, p2p_s) + compute_s


# Profiles that are known by name: nobody here measured them; each says where it is from.


def _of_datasheet(
    device: str, peak_tflops: float, link_gbs: float, link: str, memory_gb: float
) -> dict[str, Any]:
    """What training is taken to sustain of a data sheet's numbers, by the same shares for all.

    Args:
        device: Its name.
        peak_tflops: In bf16, dense.
        link_gbs: GB/s of a rank to others of its node, in one direction.
        link: What that is.
        memory_gb: Of a rank.
    """
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


# What a machine does in a second, and from where that is known.

FLOPS_PER_VALUE = 4
"""Of a query-key pair, by value of the head: a product with the key, and one with the value."""

_SOURCES = {
    "measured": "measured",
    "datasheet": "assumed from a data sheet, not measured",
    "published": "fitted to a published table, not measured by us",
    "given": "given, not measured",
}

_FORMAT = {"bascule": "hardware profile", "version": 1}
"""What a file of a profile begins with."""

_NESTED = {"attention": partial(built, AttentionLatency), "calibration": Calibration.of_dict}
"""Fields that hold more than a number, and how they are made of what JSON holds."""

_ADDED = ("peak_flops_per_s", "pack_bytes_per_s", "piece_s", "calibration")
"""Fields that files written before there were any lack."""


_RATE, _SECONDS = (1.0, 1e24), (0.0, 1e6)

LIMITS: dict[str, tuple[float, float]] = {
    "matmul_flops_per_s": _RATE,
    "attention_flops_per_s": _RATE,
    "intra_bytes_per_s": _RATE,
    "inter_bytes_per_s": _RATE,
    "memory_bytes": (1.0, 1e15),
    "launch_s": _SECONDS,
    "host_s": _SECONDS,
    "peak_flops_per_s": _RATE,
    "pack_bytes_per_s": _RATE,
    "piece_s": _SECONDS,
}
"""Fields that hold a number, and between what: far beyond any machine, so that what is computed of
them stays finite and no error names something that the user did not write."""

_MOST_GAMMA = 1e24

_NAME = re.compile(r"[\w-]{1,80}")


_SAME = 1e-6
"""Share by which a rate may differ from the curve that it is read from: rounding, in a file."""


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What a machine does in a second, and from where that is known. None: not known.

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
        note: How the numbers came about, in words.
        calibration: What `bascule calibrate` measured; None: something else gave the numbers.

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
        for name in ("device", "source", "note"):
            of_type(f"HardwareProfile: {name}", getattr(self, name), str, "a text")
        if self.source not in _SOURCES:
            raise ConfigError(
                f"HardwareProfile(source={shown(self.source)}): must be one of "
                + ", ".join(_SOURCES)
            )
        for name, limits in LIMITS.items():
            if (value := getattr(self, name)) is not None:
                put(self, name, number(f"HardwareProfile({name}", value, *limits))
        if self.attention is not None:
            advice = "an AttentionLatency, or None"
            of_type("HardwareProfile: attention", self.attention, AttentionLatency, advice)
        if self.calibration is not None:
            advice = "a Calibration, or None"
            of_type("HardwareProfile: calibration", self.calibration, Calibration, advice)
            if wrong := [x for x in self.calibration.measured if x not in self.numbers]:
                raise ConfigError(
                    f"HardwareProfile: {shown(wrong[0])} is said to be measured, and is no number "
                    "of the profile: leave it out, or add the number"
                )
            self._check_rates(self.calibration)
        told = "HardwareProfile: seconds of a FLOP of attention over those of others,"
        number(told, self.gamma, most=_MOST_GAMMA)

    def _check_rates(self, made: Calibration) -> None:
        """Refuse rates that were edited: costs follow from the curves, which say something else."""
        for field, rate_of in made.rates.items():
            value = getattr(self, field)
            if field in made.measured and abs(value / rate_of - 1.0) > _SAME:
                raise ConfigError(
                    f"HardwareProfile({field}={value:g}): its calibration measured {rate_of:g}; to "
                    'give a number of your own, take "calibration" out and say source="given"'
                )

    def __str__(self) -> str:
        """One line: the numbers, and whether anybody measured them."""
        units = (
            ("matmul_flops_per_s", 1e12, "TFLOP/s"),
            ("intra_bytes_per_s", 1e9, "GB/s in a node"),
            ("inter_bytes_per_s", 1e9, "GB/s between nodes"),
            ("launch_s", 1e-6, "us a launch"),
        )
        made = self.calibration
        parts = [
            f"{getattr(self, field) / unit:.4g} {name}"
            + ("" if made is None or field in made.measured else " (not measured)")
            for field, unit, name in units
            if field in self.numbers
        ]
        if self.attention is not None:
            error = self.attention.fit_error
            fit = "" if error is None else f" with an error of {error:.1%}"
            parts.append(f"attention fitted{fit}")
        return f"{self.device}: {', '.join(parts) or 'no numbers'}; {self.provenance}"

    @property
    def numbers(self) -> list[str]:
        """Names of the fields that hold one."""
        return [x.name for x in fields(self)[2:13] if getattr(self, x.name) is not None]

    @property
    def provenance(self) -> str:
        """From where the numbers are, in words, for wherever they appear."""
        made = self.calibration
        if made is None:
            return _SOURCES[self.source]
        ranks = f"{made.num_ranks} ranks with torch {made.torch}"
        return f"{made.name}, measured {made.date} on {ranks}"

    def provenance_of(self, field: str) -> str:
        """From where one number is: a calibration leaves some as they were."""
        if self.calibration is None or field in self.calibration.measured:
            return self.provenance
        return f"from {self.calibration.base}, not measured"

    @property
    def gamma(self) -> float:
        """Seconds of a FLOP of attention over those of a FLOP of the linear layers; 1 if unknown.

        As `TransformerCost` takes it.
        """
        if self.calibration is not None and (found := self.calibration.gamma) is not None:
            return found
        if self.matmul_flops_per_s is None or self.attention_flops_per_s is None:
            return 1.0
        return self.matmul_flops_per_s / self.attention_flops_per_s

    def cluster(self, num_nodes: int, ranks_per_node: int) -> Cluster:
        """Nodes of such ranks.

        Raises:
            ConfigError: The profile lacks a number that it takes, or there are too many ranks.
        """
        compute, memory, near, far, launch_s = self._known(
            *("matmul_flops_per_s", "memory_bytes", "intra_bytes_per_s", "inter_bytes_per_s"),
            "launch_s",
        )
        machine = Cluster(num_nodes, ranks_per_node, compute, memory, near, far, launch_s)
        piece_s = 0.0 if self.piece_s is None else self.piece_s
        return replace(machine, pack_bytes_per_s=self.pack_bytes_per_s, piece_s=piece_s)

    def attention_latency(self, head_dim: int) -> AttentionLatency:
        """What predicts a call: the fit if there is one, or else rates and launches.

        Args:
            head_dim: Values of a head.

        Raises:
            ConfigError: There is no fit, and the profile lacks a rate.
        """
        if self.attention is not None:
            return self.attention
        compute, wire, launch_s = self._known(
            "attention_flops_per_s", "intra_bytes_per_s", "launch_s"
        )
        work_s = FLOPS_PER_VALUE * whole("head_dim", head_dim, 1) / compute
        made = self.calibration
        near = [None if made is None else made.fit(what) for what in (ALL_TO_ALL, POINT_TO_POINT)]
        wires = [[launch_s, 1.0 / wire] if x is None else x.coefficients[:2] for x in near]
        (all_s, all_byte_s), (next_s, next_byte_s) = wires
        return AttentionLatency(all_s, all_byte_s, next_s, next_byte_s, work_s, launch_s)

    def _known(self, *names: str) -> list[float]:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                f"the hardware profile of {self.device} has no {', '.join(missing)}: add what is "
                "missing to the file, or use another profile"
            )
        return [getattr(self, name) for name in names]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return _FORMAT | asdict(self)

    def save(self, path: str | Path) -> None:
        """Write a JSON file.

        Raises:
            ConfigError: The file cannot be written; says why.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            to_path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote, or take a profile that is known by its name.

        Args:
            path: Of the file; or a name of `KNOWN_PROFILES`, such as "h100-datasheet".

        Raises:
            ConfigError: The file cannot be read, or holds something else; says what.
        """
        if isinstance(path, str) and path in KNOWN_PROFILES:
            return cls(**KNOWN_PROFILES[path])
        if isinstance(path, str) and _NAME.fullmatch(path) and not Path(path).exists():
            known = ", ".join(KNOWN_PROFILES)
            raise ConfigError(f"there is no profile {shown(path)}: give a file, or one of {known}")
        return cls.of_dict(parse_json("".join(read_lines(path)), str(path)), str(path))

    @classmethod
    def of_dict(cls, found: object, name: str) -> Self:
        """From what `to_dict` gave, or JSON of it.

        Args:
            found: The fields.
            name: From where, for messages.

        Raises:
            ConfigError: They are no profile; says why.
        """
        values = cast(dict[str, Any], found) if isinstance(found, dict) else {}
        if {key: values.get(key) for key in _FORMAT} != _FORMAT:
            raise ConfigError(
                f"{name} is no hardware profile of version {_FORMAT['version']}, as "
                f"HardwareProfile.save writes them; by name there is {', '.join(KNOWN_PROFILES)}"
            )
        values = {key: value for key, value in values.items() if key not in _FORMAT}
        values = dict.fromkeys(_ADDED) | values if values else values
        try:
            for key, build in _NESTED.items():
                if values.get(key) is not None:
                    values[key] = build(values[key])
            return built(cls, values)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


# A forward pass on ranks that share a sequence. In the layers of a kind, with R ring ranks, U
# Ulysses ranks, and rates of a `HardwareProfile`, a rank takes
#
#     linear_flops / matmul_rate + attention_flops / attention_rate                   [compute]
#     heads_bytes * ((n - 1) / intra + (U - n) / inter) / (U - 1)                     [Ulysses]
#     max(0, ring_bytes / wire - attention * (R - 1) / R)                             [ring]
#     launch_s * (exchanges + rounds) + max(0, launch_s * kernels - compute)          [launches]
#
# seconds: n of its U ranks are in its node; `wire` is that between nodes where the R U ranks do not
# fit into one; a ring that does not send while it computes hides nothing; and the host launches
# kernels while the device computes. Overlapped Ulysses is priced as if it were not. All wait for
# the slowest rank in every layer.

_RATES = "matmul_flops_per_s", "attention_flops_per_s", "launch_s"


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank does in the layers of a kind in a forward pass.

    Attributes:
        linear_flops: Of products with weights.
        attention_flops: Of attention over the mesh.
        heads_bytes: That it sends to Ulysses ranks.
        ring_bytes: That it passes on.
        num_exchanges: All-to-alls.
        num_rounds: Times that it passes keys and values on.
        num_kernels: Kernels that are launched.
    """

    linear_flops: float
    attention_flops: float
    heads_bytes: float
    ring_bytes: float
    num_exchanges: int
    num_rounds: int
    num_kernels: int


@dataclass(frozen=True, slots=True)
class Wires:
    """The mesh, and where its ranks are.

    Attributes:
        ring_degree: R.
        ulysses_degree: U; neighbours share heads.
        ranks_per_node: Of how many one node is.
        is_hidden: Whether the ring sends while it computes.
    """

    ring_degree: int
    ulysses_degree: int
    ranks_per_node: int
    is_hidden: bool = True


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of the slowest rank, and how long the average one waits for it, which is none of the total.

    Attributes:
        linear_s: Products with weights.
        attention_s: Attention.
        heads_s: Ulysses' bytes on wires.
        ring_s: The ring's, as far as attention does not hide them.
        launch_s: Exchanges, and kernels that the device waits for.
        waiting_s: Of the average rank.
    """

    linear_s: float = 0.0
    attention_s: float = 0.0
    heads_s: float = 0.0
    ring_s: float = 0.0
    launch_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total(self) -> float:
        """Without what others wait."""
        return self.linear_s + self.attention_s + self.heads_s + self.ring_s + self.launch_s

    def __add__(self, other: Self) -> "Seconds":
        names = [field.name for field in fields(self)]
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        parts = {
            "compute": self.linear_s + self.attention_s,
            "wires": self.heads_s + self.ring_s,
            "launches": self.launch_s,
            "waiting": self.waiting_s,
        }
        said = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts.items())
        return f"{self.total * 1e3:.3g} ms ({said})"


def layer_seconds(ranks: Sequence[RankWork], wires: Wires, profile: HardwareProfile) -> Seconds:
    """Seconds of the layers of a kind.

    Args:
        ranks: What each rank does in them.
        wires: The mesh.
        profile: What the machine does in a second.

    Raises:
        ConfigError: The profile lacks a number.
    """
    num_ranks = wires.ring_degree * wires.ulysses_degree
    near = ("intra_bytes_per_s",) if num_ranks > 1 else ()
    far = ("inter_bytes_per_s",) if num_ranks > wires.ranks_per_node else ()
    missing = [name for name in (*_RATES, *near, *far) if getattr(profile, name) is None]
    if missing:
        raise ConfigError(
            f"the hardware profile of {profile.device} has no {', '.join(missing)}: add what is "
            "missing to the file, or use another profile"
        )
    each = [_rank_seconds(work, wires, profile) for work in ranks]
    slowest = max(each, key=lambda one: one.total)
    mean = sum(one.total for one in each) / len(each)
    return slowest + Seconds(waiting_s=slowest.total - mean)


def _rank_seconds(work: RankWork, wires: Wires, profile: HardwareProfile) -> Seconds:
    ring, ulysses = wires.ring_degree, wires.ulysses_degree
    matmul, attention, launch = (getattr(profile, name) for name in _RATES)
    near = profile.intra_bytes_per_s or math.inf
    far = profile.inter_bytes_per_s or near
    linear_s = work.linear_flops / matmul
    attention_s = work.attention_flops / attention
    in_node = min(ulysses, wires.ranks_per_node)
    byte_s = ((in_node - 1) / near + (ulysses - in_node) / far) / max(1, ulysses - 1)
    wire = near if ring * ulysses <= wires.ranks_per_node else far
    hidden_s = attention_s * (ring - 1) / ring if wires.is_hidden else 0.0
    exposed_s = max(0.0, launch * work.num_kernels - linear_s - attention_s)
    return Seconds(
        linear_s=linear_s,
        attention_s=attention_s,
        heads_s=work.heads_bytes * byte_s,
        ring_s=max(0.0, work.ring_bytes / wire - hidden_s),
        launch_s=launch * (work.num_exchanges + work.num_rounds) + exposed_s,
    )


# How much more a training step runs than the forward pass that plans are priced by.

_ATTENTION_BACKWARD = 2.5 * 648 / 561
"""Seconds of the backward of attention over those of its forward: five products of matrices against
two, at 561 TFLOP/s against 648. Source: FlashAttention-3, speeds on an H100 at a head dimension of
128 and 16k tokens, not causal."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What runs in a step, in units of what runs in its forward pass.

    Attributes:
        linear: Seconds of the linear layers; their backward takes two forward passes.
        attention: Seconds of attention.
        exchanges: All-to-alls and passes of keys and values; as many backward as forward.
        name: For tables.

    Raises:
        ConfigError: A value is not above 0.
    """

    linear: float
    attention: float
    exchanges: float
    name: str

    def __post_init__(self) -> None:
        for name in ("linear", "attention", "exchanges"):
            put(self, name, rate(f"Passes({name}", getattr(self, name)))

    def over(self, timed: "Passes") -> "Passes":
        """The same for a cost model whose seconds are those of other passes, such as measured ones.

        Wires are those of a forward pass all the same.
        """
        linear, attention = self.linear / timed.linear, self.attention / timed.attention
        return replace(self, linear=linear, attention=attention)


FORWARD = Passes(1.0, 1.0, 1.0, "forward")
TRAINING = Passes(4.0, 2.0 + _ATTENTION_BACKWARD, 3.0, "step")
"""Forward, recomputation and backward, every block checkpointed."""

WITHOUT_RECOMPUTING = Passes(3.0, 1.0 + _ATTENTION_BACKWARD, 2.0, "step-without-recompute")
"""Forward and backward, no block checkpointed."""


def in_passes(
    cost: TransformerCost, cluster: Cluster, passes: Passes
) -> tuple[TransformerCost, Cluster]:
    """A cost model and a cluster whose seconds are those of a step, not of a forward pass.

    Whatever takes both then plans, prices and ranks by seconds of a step.

    Raises:
        ConfigError: The cost model is not a `TransformerCost`, so that attention cannot be told
            from the rest.
    """
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
    """`FORWARD`, or a training step that recomputes or does not, by name.

    Args:
        name: "forward", "step" or "step-without-recompute".
        profile: Whose passes of a block a step runs, if it was calibrated. Default: `TRAINING` and
            `WITHOUT_RECOMPUTING`.

    Raises:
        ConfigError: There is no such name.
    """
    known = {passes.name: passes for passes in (FORWARD, TRAINING, WITHOUT_RECOMPUTING)}
    if name not in known:
        raise ConfigError(f"passes {name!r}: choose one of {', '.join(known)}")
    run = PASSES if name == TRAINING.name else (RECOMPUTE, BACKWARD)
    measured = None if name == FORWARD.name else _measured(profile, run)
    return known[name] if measured is None else replace(known[name], **measured)


def _measured(profile: HardwareProfile | None, run: tuple[str, ...]) -> dict[str, float] | None:
    """Passes as they were timed, over the forward pass: by tokens, and by pairs.

    Exchanges were not timed by pass. None: not all was, or the noise left nothing of a pass.
    """
    made = None if profile is None else profile.calibration
    fits = {} if made is None else {name: made.fit(name) for name in PASSES}
    rates = {name: fit.coefficients[1:] for name, fit in fits.items() if fit is not None}
    if len(rates) < len(PASSES) or min(rates[PASSES[0]]) <= 0:
        return None
    linear, attention = np.sum([rates[name] for name in run], axis=0) / rates[PASSES[0]]
    return {"linear": float(linear), "attention": float(attention)}
