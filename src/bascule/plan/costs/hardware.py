"""The machines: what they do in a second, and from where that is known."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from bascule.errors import ConfigError
from bascule.plan.checks import number, of_type, put, shown, whole
from bascule.plan.costs.attention_latency import AttentionLatency
from bascule.plan.costs.calibration import ALL_TO_ALL, POINT_TO_POINT, Calibration, built
from bascule.plan.costs.cluster import Cluster
from bascule.plan.costs.known_profiles import KNOWN_PROFILES
from bascule.plan.files import parse_json, read_lines, to_path

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
