"""What costs, machines, meshes and simulations are made from."""

# pyright: reportArgumentType=false

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bascule import HardwareProfile, Sequences, TransformerCost, plan_batch, simulate
from bascule.costs import PolynomialCost
from bascule.machine.cluster import TRAINING, BagShape, Passes, Work, passes_of
from bascule.machine.fits import fit_item_latency, fit_iterations, fit_latency
from bascule.machine.mesh_choice import DenoisingStep, choose_mesh
from bascule.sim import SimulationOptions
from bascule.sim.seconds import EncoderStage, Sharding
from tests.helpers.calibrations import calibrated

H100 = HardwareProfile.load("h100-datasheet")
NEW = HardwareProfile(device="new")
LACKING = replace(H100, source="given", inter_bytes_per_s=None, launch_s=None)
CLUSTER = H100.cluster(1, 4)
NEAR, FAR = (BagShape.aligned(1, num, 2) for num in (2, 4))
STEP = DenoisingStep(99, 8, 64, 2)

MADE = calibrated()
assert MADE.calibration is not None
CALIBRATION, CURVE = MADE.calibration, MADE.calibration.fits[0]
MANY, FASTER = [1.0] * 1001, {"matmul_flops_per_s": 1e15}


def simulating(**changes: Any) -> Callable[[], object]:
    """A call of simulate with one wrong argument."""
    right = {"data": [[[1]]], "profile": H100, "model": TransformerCost(8), "topologies": ["none"]}
    return partial(simulate, **right | changes)


def planned(num: int, topology: str, cost: Any) -> Callable[[], object]:
    return partial(plan_batch, [[1]] * num, topology, cost, cluster=CLUSTER)


POLYNOMIAL = PolynomialCost(1, 1, 1)
RUN = simulate([[[1]]], profile=H100, model=TransformerCost(8), topologies=["none"]).runs[0]

Case = tuple[str, Callable[[], object], tuple[str, ...]]


def changed(one: Any, name: str, value: Any, *words: str) -> Case:
    """A row for a field of a dataclass, which must be named with its value."""
    kind = type(one).__name__
    said = f"{kind}({name}={value!r})"
    return (f"{kind}.{name} {value!r}", partial(replace, one, **{name: value}), (said, *words))


GOOD = [[[100, 200], [300]]] * 4
MEASURED: list[tuple[Any, Any, tuple[str, ...]]] = [
    (GOOD[:2], [1.0, 1.0], ("2 measurements",)),
    *((GOOD, wrong, ("shape",)) for wrong in ([1.0] * 3, np.ones((4, 3)), 1.0)),
    (GOOD, [[1.0], [1.0, 1.0], [1.0], [1.0]], ("cannot be read",)),
    (GOOD, ["a", "b", "c", "d"], ("real numbers",)),
    (GOOD, [1.0, math.nan, 1.0, 1.0], ("seconds[1] is nan",)),
    (GOOD, [[1.0, 1.0]] * 3 + [[1.0, -1.0]], ("seconds[3, 1]",)),
    (GOOD, np.full((4, 2), math.nan), ("0 measurements",)),
    ([*GOOD[:3], [[100]]], [1.0] * 4, ("iteration 3: 1 lists",)),
    ([*GOOD[:3], [[100], [-5]]], [1.0] * 4, ("iteration 3: rank 1", "-5")),
    *((nothing, [1.0] * 4, ("has a token",)) for nothing in ([[[0], []]] * 4, [[]] * 4)),
    # As a log interval longer than the warm-up gives them; zeros fit perfectly.
    (GOOD, [1.0, 0.0, 1.0, 1.0], ("iteration 1 took 0 s",)),
    (GOOD, np.zeros((4, 2)), ("iteration 0, rank 0 took 0 s",)),
]
LATENCIES = [
    ([100] * 3, [1.0, 1.1, 0.9], "different lengths"),
    ([100, 200], [1.0], "one latency for each length"),
    ([[100, 200]], [[1.0, 2.0]], "one latency for each length"),
    ([100, 200, 300], [1.0, 2.0, math.nan], "positive and finite"),
    ([0, 200, 300], [1.0, 2.0, 3.0], "positive and finite"),
]
CASES: list[Case] = [
    *(
        (f"measured {n}", partial(fit_iterations, lens, seconds), ("fit_iterations", *words))
        for n, (lens, seconds, words) in enumerate(MEASURED)
    ),
    *(
        (f"latencies {n} {name}", partial(fit, lens, seconds), (name, words))
        for n, (lens, seconds, words) in enumerate(LATENCIES)
        for name, fit in (
            ("fit_latency", partial(fit_latency, d_model=8)),
            ("fit_item_latency", fit_item_latency),
        )
    ),
    changed(TransformerCost(64), "d_model", 3072.0, "an integer"),
    changed(TransformerCost(64), "num_layers", 0, "at least 1"),
    changed(POLYNOMIAL, "overhead", -1e-12, "at least 0"),
    changed(POLYNOMIAL, "constant", "1", "finite"),
    ("seconds of FLOPs", partial(TransformerCost(64).seconds, [1]), ("fit_latency",)),
    changed(CLUSTER, "num_nodes", True, "an integer"),
    changed(CLUSTER, "ranks_per_node", 1.5, "an integer"),
    ("too many ranks", partial(replace, CLUSTER, num_nodes=2**17), ("524288 ranks", "131072")),
    ("another world", planned(3, "g1n3", TransformerCost(8)), ("4 ranks, not 3",)),
    ("no width", planned(4, "g4n1", np.sqrt), ("no model width", "TransformerCost")),
    changed(CLUSTER, "passes", "step", "a Passes(..)"),
    *(changed(H100, name, True, "finite") for name in H100.numbers),
    changed(H100, "device", 5, "a text"),
    changed(H100, "note", None, "a text"),
    ("no such profile", partial(HardwareProfile.load, "h200"), ("'h200'", "h200-datasheet")),
    ("a cluster", partial(NEW.cluster, 1, 2), ("new has no matmul_flops_per_s, memory_bytes",)),
    ("near", partial(LACKING.forward_seconds, [Work()], NEAR), ("no launch_s: ",)),
    ("far", partial(LACKING.forward_seconds, [Work()], FAR), (", inter_bytes_per_s",)),
    changed(STEP, "num_tokens", 0, "at least 1"),
    changed(STEP, "num_passes", 1.5, "an integer"),
    ("a mesh of no ranks", partial(choose_mesh, STEP, 0), ("num_ranks is 0",)),
    ("no mesh", partial(choose_mesh, STEP, 16, max_ring_degree=1), ("raise max_ring_degree",)),
    ("no rate", partial(choose_mesh, STEP, 2, profile=NEW), ("has no matmul_flops_per_s",)),
    ("passes of nothing", partial(Passes, 0.0, 1.0, 1.0, ""), ("linear=0.0", "at least")),
    ("no such passes", partial(passes_of, "both"), ("'both'", "step-without-recompute")),
    ("polynomial", partial(TRAINING.cost, POLYNOMIAL), ("a TransformerCost",)),
    changed(CURVE, "what", 5, "a text"),
    changed(CURVE, "unit", "words", '"tokens" or "bytes"'),
    ("too many sizes", partial(replace, CURVE, sizes=MANY), ("1001 entries", "at most 1000")),
    ("a size of nothing", partial(replace, CURVE, sizes=[0.0] * 9), ("sizes[0]=0.0", "at least")),
    ("a coefficient less", partial(replace, CURVE, coefficients=(1.0, 2.0)), ("2 coefficients",)),
    ("a size less", partial(replace, CURVE, sizes=CURVE.sizes[:-1]), ("8 sizes",)),
    ("nothing fitted", partial(replace, CURVE, held_out=(True,) * 9), ("fit some of them",)),
    changed(CALIBRATION, "num_ranks", 0, "at least 1"),
    changed(CALIBRATION, "d_model", 1.5, "an integer"),
    ("edited", partial(replace, MADE, **FASTER), ('take "calibration" out and say',)),
    changed(EncoderStage("T5"), "name", 5, "a text"),
    changed(EncoderStage("T5"), "sample_s", -1.0, "at least 0"),
    changed(Sharding(), "num_params", 0, "at least 1"),
    changed(Sharding(), "shard_ranks", 1.5, "an integer"),
    ("shards", partial(Sharding(1, 3).seconds, TransformerCost(8), CLUSTER), ("4 ranks are no",)),
    changed(SimulationOptions(), "num_steps", 0, "at least 1"),
    changed(SimulationOptions(), "accumulate", 0.5, "an integer"),
    ("steps", partial(SimulationOptions, num_steps=10**5, accumulate=2), ("more than 100000",)),
    *(
        (f"stages {names}", partial(SimulationOptions, stages=names), ("must differ",))
        for names in ((EncoderStage("vae"),) * 2, (EncoderStage("compute"),))
    ),
    *(
        (f"simulate {words[0]}", simulating(**changes), words)
        for changes, words in (
            ({"data": []}, ("no batches",)),
            ({"data": [[]]}, ("no batches, or no ranks",)),
            ({"data": [[[]]]}, ("no tokens",)),
            ({"data": [[[1]], [[1], [2]]]}, ("2 lists",)),
            ({"data": [[[-1]]]}, ("-1",)),
            ({"data": 5}, ("data are 5",)),
            ({"data": "g1"}, ("'g1'",)),
            ({"topologies": []}, ("no topologies",)),
            ({"topologies": "none"}, ("topologies are 'none'",)),
            ({"topologies": ["lpt g1n1"]}, ("'lpt g1n1'",)),
            ({"topologies": ["g2n1"]}, ("g2n1", "2 ranks")),
            ({"topologies": [None]}, ("topologies: each is None",)),
            ({"model": PolynomialCost(1, 1, 1)}, ("model is", "a TransformerCost")),
            ({"profile": NEW}, ("new has no matmul_flops_per_s",)),
            ({"profile": "none such"}, ("none such",)),
            ({"options": 5}, ("options is 5",)),
            ({"options": SimulationOptions(accumulate=2)}, ("1 batches are no whole steps",)),
            ({"options": SimulationOptions(num_ranks=3)}, ("num_ranks=3", "are of 1 ranks")),
            ({"data": [[Sequences([5], "causal")]]}, ("batch 0 has masks",)),
            ({"data": [[Sequences([5], None, [3])]]}, ("masks or contexts",)),
        )
    ),
    ("no such kind", lambda: RUN.spent_on("nope"), ("kind is 'nope'", '"encoders"')),  # type: ignore
]
