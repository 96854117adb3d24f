"""KnapFormer's Table 1 (FLUX on 32 H100) against the simulator; four of its rows were fitted."""

import json

import numpy as np
import pytest

from bascule.plan.costs import TransformerCost
from bascule.plan.machine import TRAINING, HardwareProfile, in_passes
from bascule.plan.topology_search import suggest_topology
from bascule.sim.seconds import Sharding
from bascule.sim.simulation import SimulatedRun, SimulationOptions, simulate
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from tests.helpers.pages import ROOT

FLUX = TransformerCost(3072, gamma=0.426, num_layers=57)
LOW = "g32b32i256f1s0"
MIXED = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"
NAMES = ("none", "g1n32", "g2n16", "g4n8", "g8n4")
WIR = {LOW: (1.22, 1.00, 1.00, 1.00, 1.00), MIXED: (17.14, 3.92, 1.27, 1.01, 1.00)}
FBL = {LOW: (3.13, 2.95, 3.30, 3.51, 4.30), MIXED: (4.64, 4.62, 2.92, 2.62, 2.52)}
TPS = {
    LOW: (147.63, 156.48, 139.77, 131.63, 107.28),
    MIXED: (58.58, 58.95, 93.08, 103.74, 108.06),
}
HFU = {LOW: (24.72, 26.20, 23.40, 22.04, 17.96), MIXED: (14.54, 14.63, 23.10, 25.74, 26.81)}
FITTED = {LOW: ("none", "g1n32", "g8n4"), MIXED: ("none",)}
TIE = 0.005
"""What the model calls equally fast."""


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[SimulatedRun, ...]]:
    topologies = ["none", *(f"knapsack {name}" for name in NAMES[1:])]
    options = SimulationOptions(num_steps=50, sharding=Sharding(11_900_000_000, 8))
    return {
        data: simulate(
            data, profile="h100-knapformer", model=FLUX, topologies=topologies, options=options
        ).runs
        for data in (LOW, MIXED)
    }


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_every_printed_cell(rows: dict[str, tuple[SimulatedRun, ...]], data: str) -> None:
    """WIR within 3 %; seconds of held-out cells within 5 %, of fitted ones within 2 %."""
    for place, (name, run) in enumerate(zip(NAMES, rows[data], strict=True)):
        within = 0.02 if name in FITTED[data] else 0.05
        assert run.wir == pytest.approx(WIR[data][place], rel=0.03), name
        assert run.fbl_s == pytest.approx(FBL[data][place], rel=within), name
        assert run.tokens_per_s == pytest.approx(TPS[data][place] * 1e3, rel=0.05), name
        assert run.hfu == pytest.approx(HFU[data][place] / 100, rel=0.05), name


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_the_order_of_the_topologies(rows: dict[str, tuple[SimulatedRun, ...]], data: str) -> None:
    """As printed, up to pairs that the model calls equally fast."""
    seconds = dict(zip(NAMES, (run.fbl_s for run in rows[data]), strict=True))
    printed = dict(zip(NAMES, FBL[data], strict=True))
    order = sorted(NAMES, key=printed.__getitem__)
    for place, faster in enumerate(order):
        for slower in order[place + 1 :]:
            assert seconds[faster] <= seconds[slower] * (1 + TIE), (faster, slower)


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_bascule_topology_ranks_as_the_table_does(data: str) -> None:
    cluster = HardwareProfile.load("h100-knapformer").cluster(4, 8)
    cost, cluster = in_passes(FLUX, cluster, TRAINING)
    codes = parse_data_codes(data)
    batches = [seq_lens(sample_lengths(codes, seed=0, step=step)) for step in range(20)]
    ranked = [row.spec for row in suggest_topology(batches, cost, cluster).rows]
    printed = sorted(NAMES[1:], key=lambda name: FBL[data][NAMES.index(name)])
    assert [name for name in ranked if name in NAMES] == printed


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_the_table_agrees_with_itself(data: str) -> None:
    """Its seconds times tokens a second are the tokens of the data codes, and HFU their FLOPs."""
    codes = parse_data_codes(data)
    lens = [
        np.concatenate([np.array(one) for one in seq_lens(sample_lengths(codes, seed=0, step=k))])
        for k in range(50)
    ]
    tokens = np.mean([one.sum() for one in lens])
    flops = np.mean([4e12 * TransformerCost(3072, num_layers=57)(one).sum() for one in lens])
    for fbl, tps, hfu in zip(FBL[data], TPS[data], HFU[data], strict=True):
        assert fbl * tps * 1e3 == pytest.approx(tokens, rel=0.01)
        assert fbl * hfu / 100 * 32 * 989e12 == pytest.approx(flops, rel=0.02)


def test_the_page_quotes_the_results() -> None:
    """Every row of its table, the constants, and how large the errors are at most."""
    page = (ROOT / "docs" / "simulate.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "simulate.json").read_text())
    known = HardwareProfile.load("h100-knapformer")
    assert results["constants"] == {name: getattr(known, name) for name in results["constants"]}
    for name, value in results["fitted_again"].items():
        assert results["constants"][name] == pytest.approx(value, rel=2e-3)
    rows = [line.split("|")[2:-1] for line in page.splitlines() if " | fitted |" in line]
    rows += [line.split("|")[2:-1] for line in page.splitlines() if " | held out |" in line]
    cells = sorted(results["table_1"], key=lambda cell: not cell["is_fitted"])
    for row, cell in zip(rows, cells, strict=True):
        name, is_fitted, wir, _, fbl, printed, error, tps = (text.strip() for text in row)
        assert (name, is_fitted == "fitted") == (cell["balancer"], cell["is_fitted"])
        assert (wir, fbl) == (f"{cell['wir']:.2f}", f"{cell['fbl_s']:.2f}")
        assert float(printed) == cell["fbl_s_printed"]
        assert float(error.rstrip(" %")) == pytest.approx(100 * cell["fbl_s_error"], abs=0.06)
        for column in ("tokens_per_s", "hfu"):
            found = 100 * cell[f"{column}_error"]
            assert float(tps.rstrip(" %")) == pytest.approx(found, abs=0.2)
    held = [abs(cell["fbl_s_error"]) for cell in cells if not cell["is_fitted"]]
    assert max(held) < 0.05
    found = results["growth"]
    assert found["the same, seconds of a core"] <= 10
    assert all(value < 1.2 for name, value in found.items() if name.startswith("exponent"))
