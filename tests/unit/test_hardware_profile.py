"""Profiles of machines: what is saved is loaded, what they predict, and what is no profile."""

# pyright: reportArgumentType=false
# What the types forbid is what is tried here.

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import bascule
from bascule.errors import ConfigError
from bascule.plan.machine import (
    KNOWN_PROFILES,
    LIMITS,
    AttentionLatency,
    AttentionLoad,
    Cluster,
    HardwareProfile,
)
from tests.helpers.cli import run
from tests.helpers.refusals import NO_NUMBERS, UNREADABLE, refusal, refused, title
from tests.helpers.sparse_studies import even_load

FIT = AttentionLatency(40e-6, 6e-12, 15e-6, 9e-12, 2e-12, math.pi / 3e5, 2e-12, fit_error=1 / 3)
KNOWN = HardwareProfile.load("h100-datasheet")
MEASURED = HardwareProfile(device="two cores", source="measured", attention=FIT, host_s=1e-3)
RATES = (
    *("matmul_flops_per_s", "attention_flops_per_s", "intra_bytes_per_s", "inter_bytes_per_s"),
    *("memory_bytes", "launch_s", "host_s", "peak_flops_per_s", "pack_bytes_per_s", "piece_s"),
)


def test_it_is_a_public_name() -> None:
    assert bascule.HardwareProfile is HardwareProfile


@pytest.mark.parametrize("profile", [KNOWN, MEASURED, HardwareProfile(device="nothing known")])
def test_what_is_saved_is_loaded_exactly(tmp_path: Path, profile: HardwareProfile) -> None:
    profile.save(tmp_path / "machine.json")
    assert HardwareProfile.load(tmp_path / "machine.json") == profile
    saved = json.loads((tmp_path / "machine.json").read_text())
    assert saved == {
        "bascule": "hardware profile",
        "version": 1,
        **dataclasses.asdict(profile),
    }
    # Another tool may write it: keys in another order.
    (tmp_path / "other.json").write_text(json.dumps(dict(reversed(saved.items()))))
    assert HardwareProfile.load(str(tmp_path / "other.json")) == profile


def test_a_cluster_has_the_numbers_of_the_profile() -> None:
    assert KNOWN.cluster(2, 8) == Cluster(2, 8, 544e12, 80e9, 180e9, 25e9, 10e-6)
    with pytest.raises(ConfigError, match="two cores has no matmul_flops_per_s, memory_bytes"):
        MEASURED.cluster(1, 2)


def test_attention_is_predicted_by_the_fit_or_by_rates() -> None:
    assert MEASURED.attention_latency(64) is FIT
    seq_len, num_heads, head_dim = 3000, 8, 64
    rates = {"attention_flops_per_s": 2e12, "intra_bytes_per_s": 0.5e9, "launch_s": 7e-6}
    profile = dataclasses.replace(KNOWN, source="given", **rates)
    latency = profile.attention_latency(head_dim)
    dense = even_load((1, 1), seq_len=seq_len, num_heads=num_heads, head_dim=head_dim)
    flops = 2 * 2 * seq_len**2 * num_heads * head_dim  # two products, two FLOPs a term
    assert latency(dense) == pytest.approx(flops / 2e12 + 7e-6)
    sent, passed = AttentionLoad(2, 1, 0.0, 1e6, 0.0), AttentionLoad(1, 2, 0.0, 0.0, 1e6)
    assert latency(sent) == pytest.approx(2 * 7e-6 + 1e6 / 0.5e9 + 7e-6)
    assert latency(passed) == pytest.approx(7e-6 + 1e6 / 0.5e9 + 7e-6)
    with pytest.raises(ConfigError, match="nothing has no attention_flops_per_s"):
        HardwareProfile(device="nothing").attention_latency(64)


def test_it_says_whether_anybody_measured_it() -> None:
    assert str(KNOWN).endswith("10 us a launch; assumed from a data sheet, not measured")
    assert "544 TFLOP/s, 180 GB/s in a node, 25 GB/s between nodes" in str(KNOWN)
    assert str(MEASURED) == "two cores: attention fitted with an error of 33.3%; measured"
    assert str(dataclasses.replace(KNOWN, source="given")).endswith("given, not measured")
    assert str(HardwareProfile(device="new")) == "new: no numbers; given, not measured"


@pytest.mark.parametrize("value", NO_NUMBERS, ids=title)
def test_values_that_are_no_numbers_in_range(value: Any) -> None:
    for name in RATES:
        if value is not None:
            told = refusal(lambda name=name: HardwareProfile(device="x", **{name: value}))
            assert f"HardwareProfile({name}" in told
    if not isinstance(value, str):
        refused(
            lambda: HardwareProfile(device=value),
            lambda: HardwareProfile(device="x", note=value),
        )
    refused(
        lambda: HardwareProfile(device="x", source=value),
        lambda: KNOWN.cluster(value, 8),
        lambda: KNOWN.attention_latency(value),
    )
    if value is not None:
        refused(lambda: HardwareProfile(device="x", attention=value))


def test_other_sources_are_refused() -> None:
    told = refusal(lambda: HardwareProfile(device="x", source="guessed"))
    assert "measured, datasheet, published, given" in told


@pytest.mark.parametrize("path", [*UNREADABLE, None, 5, ["h100-datasheet"], "h100"], ids=title)
def test_paths_that_are_none(path: Any) -> None:
    refused(lambda: HardwareProfile.load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launch_s": -1.0}, r"launch_s=-1\.0\): must be finite"),
        ({"launch_s": "1e-5"}, "launch_s='1e-5'"),
        ({"launch_s": [1.0]}, r"launch_s=\[1\.0\]"),
        ({"launch_s": True}, "launch_s=True"),
        ({"intra_bytes_per_s": 0}, "intra_bytes_per_s=0"),
        ({"intra_bytes_per_s": math.nan}, "intra_bytes_per_s=nan"),
        ({"memory_bytes": math.inf}, "memory_bytes=inf"),
        ({"device": None}, "device"),
        ({"version": 2}, "no hardware profile of version 1"),
        ({"bascule": "plan"}, "no hardware profile of version 1"),
        ({"flops": 1.0}, "flops; it must hold device, source, .*, note"),
        ({"attention": {}}, "AttentionLatency holds no fields; it must hold all_to_all_latency_s"),
        ({"attention": [1]}, "AttentionLatency holds no fields"),
        ({"attention": dataclasses.asdict(FIT) | {"launch_s": -1.0}}, "launch_s=-1"),
        ({"attention": dataclasses.asdict(FIT) | {"p2p_s_per_byte": math.nan}}, "p2p_s_per_byte=n"),
        ({"attention": dataclasses.asdict(FIT) | {"fit_error": "small"}}, "fit_error='small'"),
    ],
)
def test_a_file_with_other_fields(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "machine.json"
    KNOWN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message) as error:
        HardwareProfile.load(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "cannot read"),
        (b"[1, 2]", "no hardware profile"),
        (b"{}", "no hardware profile"),
        (b'{"bascule": "hardware profile", "version": 1}', "HardwareProfile holds no fields"),
    ],
)
def test_a_file_that_holds_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        HardwareProfile.load(path)
    assert str(path) in str(error.value)
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json"):
        HardwareProfile.load(tmp_path / "missing.json")


@pytest.mark.parametrize("command", ["plan", "topology", "simulate"])
def test_an_extreme_number_is_named_by_file_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """Not by what is computed of it: a step has three passes of the launches, for example."""
    path = tmp_path / "mine.json"
    values = HardwareProfile.load("h100-knapformer").to_dict()
    arguments = {
        "plan": ("--topology", "g2n1", "--wires"),
        "topology": (),
        "simulate": ("--topologies", "none", "g2n1"),
    }[command]
    refused = 0
    for name, (least, most) in LIMITS.items():
        for value in (least / 3, least, most, most * 3):
            path.write_text(json.dumps(values | {name: value}))
            given = ("--lengths", "90/50", *arguments, "--profile", str(path))
            code, _, err = run(capsys, command, *given)
            assert code == (0 if least <= value <= most else 2), err
            if code:
                assert err.startswith(f"bascule: {path}: HardwareProfile({name}="), err
                assert f"at least {least:g} and at most {most:g}" in err
                refused += 1
    assert refused >= len(LIMITS)


def test_options_of_a_machine_have_the_limits_of_its_profile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, value in (("--tflops", "1e13"), ("--intra-gbs", "1e-10"), ("--latency-us", "1e13")):
        code, _, err = run(capsys, "topology", "--lengths", "90/50", option, value)
        assert code == 2 and err.startswith(f"bascule: {option} {float(value)}: must be finite")
    code, _, err = run(capsys, "plan", "--lengths", "9/5", "--kb-per-token", "1e9")
    assert code == 2 and "hold no token: give a smaller number, or --memory-gb" in err


def test_a_name_that_is_no_profile() -> None:
    with pytest.raises(ConfigError, match=r"there is no profile 'h200': give a file, or .*h200-da"):
        HardwareProfile.load("h200")


def test_profiles_of_data_sheets() -> None:
    """Each says that nobody measured it, and plans and simulates."""
    assert len(KNOWN_PROFILES) == 6
    for name in KNOWN_PROFILES:
        known = HardwareProfile.load(name)
        assert "not measured" in str(known) and known.numbers and known.note
        assert known.cluster(2, 8).num_ranks == 16
        if known.source == "datasheet":
            assert name.endswith("-datasheet") and known.peak_flops_per_s is not None
            sustained = known.matmul_flops_per_s
            assert sustained == pytest.approx(0.55 * known.peak_flops_per_s, rel=1e-3)
            assert f"{known.peak_flops_per_s / 1e12:g} TFLOP/s" in known.note
    h100 = HardwareProfile.load("h100-datasheet")
    assert (h100.matmul_flops_per_s, h100.intra_bytes_per_s) == (544e12, 180e9)
    with pytest.raises(ConfigError, match="l40s-datasheet"):
        HardwareProfile.of_dict({}, "mine")
