"""`bascule sparse`: what balancing block-sparse attention is worth, for masks that you have or not.

A mesh is (U, R): Ulysses and ring degree, shown as U4R2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from bascule.arrays import Bools, Ints
from bascule.cli.inputs import MachineOptions
from bascule.cli.sparse_tables import show
from bascule.cli.writing import check_outputs, write_report
from bascule.errors import ConfigError
from bascule.plan.checks import number, whole
from bascule.plan.sparse import check_degrees
from bascule.plan.sparse.baselines import REWARD
from bascule.plan.sparse.choose import all_degrees
from bascule.plan.sparse.partition import TARGET
from bascule.report.reports import of_sparse
from bascule.sim.sparse_study import Mesh, Setting, study
from bascule.workload import load_masks
from bascule.workload.masks import COGVIDEOX15, WAN21, synthetic_masks

MODELS = {"wan2.1": WAN21, "cogvideox1.5": COGVIDEOX15}

TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Of kept plans, in the report."""

REWARDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Of the paper's greedy, in the report."""

_MOST = {
    "layers": 1000,
    "steps": 1000,
    "block": 2**31 - 1,
    "ulysses": 2**15,
    "ring": 2**9,
    "ranks": 2**15,
    "head_dim": 2**16,
    "itemsize": 16,
}
"""Largest values of options: of masks, what is planned within hours."""


@dataclass(frozen=True, kw_only=True)
class SparseOptions(MachineOptions):
    """Show how uneven block-sparse attention is on a mesh, and what each way of planning gains.

    Masks come from a file or are drawn at random in the likeness of a video model; planning is real
    either way. Predicted times are of a machine that was measured, or that the options describe.

    Attributes:
        masks: File of bool masks (heads, q_blocks, kv_blocks), .npy or .npz; layers, or steps and
            layers, may stand before.
        model: Synthetic masks instead: wan2.1 or cogvideox1.5.
        density: Share of the blocks that synthetic masks compute; 0.41 by default.
        layers: Layers to look at; all of a file, 1 of a model by default.
        steps: Denoising steps to look at; all of a file, 1 of a model by default.
        seed: Of synthetic masks.
        block: Tokens of a block.
        ulysses: Ulysses degree: ranks that share the heads.
        ring: Ring degree: ranks that pass keys and values around.
        ranks: Ranks; with neither degree given, all meshes of so many are compared, but for those
            with more Ulysses ranks than heads.
        head_dim: Values of a head.
        itemsize: Bytes of a value, as it travels.
        target: Imbalance that minimal_move is to reach.
        reward: For staying at home, of the paper's greedy.
        tolerance: A plan is kept while its imbalance is at most 1 + tolerance.
        report: Where to write a page of it all, .html.
        head: Head whose mask is drawn there.
    """

    masks: Path | None = None
    model: str | None = None
    density: float | None = None
    layers: int | None = None
    steps: int | None = None
    seed: int = 0
    block: int = 64
    ulysses: int | None = None
    ring: int | None = None
    ranks: int | None = None
    head_dim: int = 128
    itemsize: int = 2
    target: float = TARGET
    reward: float = REWARD
    tolerance: float = 0.05
    report: Path | None = None
    head: int = 0

    def check(self) -> None:
        """Refuse what nothing else would.

        Raises:
            ConfigError: A value is out of range.
        """
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None:
                whole(_flag(name), value, 1, most)
        for name in ("target", "reward"):
            number(_flag(name), getattr(self, name))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """All that are to be compared, those with the largest Ulysses degree first.

        Raises:
            ConfigError: None is given, or the degrees do not make the ranks.
        """
        if self.ranks is None:
            if self.ulysses is None and self.ring is None:
                raise ConfigError(
                    "give a mesh with --ulysses and --ring, or --ranks to compare all meshes"
                )
            return ((self.ulysses or 1, self.ring or 1),)
        found = all_degrees(self.ranks)
        fitting = [x for x in found if self.ulysses in (None, x[0]) and self.ring in (None, x[1])]
        if not fitting:
            given = {"--ulysses": self.ulysses, "--ring": self.ring}
            told = ", ".join(f"{name} {value}" for name, value in given.items() if value)
            known = ", ".join(f"{ulysses} x {ring}" for ulysses, ring in found)
            raise ConfigError(
                f"{told} and --ranks {self.ranks}: the ranks are Ulysses x ring, one of {known}"
            )
        return tuple(fitting)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class _Source:
    """Where masks come from.

    Attributes:
        name: For titles.
        num_heads: Heads of a layer.
        num_layers: Layers to look at.
        num_steps: Steps to look at.
        q_lens: Tokens of each query block.
        kv_lens: Tokens of each key block.
        masks: Those of a layer in a step.
    """

    name: str
    num_heads: int
    num_layers: int
    num_steps: int
    q_lens: Ints
    kv_lens: Ints
    masks: Callable[[int, int], Bools]

    def layers(self) -> Iterator[Iterator[Bools]]:
        """Masks of each step of each layer, read or drawn when they are looked at."""
        for layer in range(self.num_layers):
            yield (self.masks(layer, step) for step in range(self.num_steps))


def run(options: SparseOptions, arguments: list[str]) -> None:
    """Plan, print and draw.

    Raises:
        ConfigError: The options are wrong, or do not fit the masks.
    """
    options.check()
    meshes, machine = options.meshes, options.hardware()
    check_outputs(masks=options.masks, report=options.report)
    source = _source(options)
    if not 0 <= options.head < source.num_heads:
        raise ConfigError(f"--head {options.head}: there are heads 0 to {source.num_heads - 1}")
    setting = Setting(
        _with_heads(meshes, source),
        source.q_lens,
        source.kv_lens,
        machine.attention_latency(options.head_dim),
        options.head_dim,
        options.itemsize,
        options.target,
        options.reward,
        options.tolerance,
    )
    errors = Console(stderr=True)
    layers = track(source.layers(), "layers", source.num_layers, console=errors, transient=True)
    swept = () if options.report is None else (TOLERANCES, REWARDS)
    found = study(source.name, layers, setting, *swept)
    console = Console()
    show(console, found)
    console.print(f"predicted for {machine}", markup=False)
    if options.report is not None:
        write_report(console, options.report, of_sparse(found, options.head, str(machine)))


def _with_heads(meshes: tuple[Mesh, ...], source: _Source) -> tuple[Mesh, ...]:
    """Those whose Ulysses ranks can have a head each.

    Raises:
        ConfigError: There is no mask, or one is too large.
    """
    fitting = tuple(mesh for mesh in meshes if mesh[0] <= source.num_heads)
    if not fitting:
        raise ConfigError(
            f"{source.name}: {source.num_heads} heads for {meshes[-1][0]} Ulysses ranks, which "
            f"take one each at least: use --ulysses {source.num_heads} at most, and --ring"
        )
    for mesh in fitting:
        check_degrees(*mesh)
    return fitting


def _source(options: SparseOptions) -> _Source:
    if (options.masks is None) == (options.model is None):
        given = "neither" if options.masks is None else "both"
        raise ConfigError(f"give one of --masks and --model, not {given}")
    return _synthetic(options) if options.masks is None else _of_file(options, options.masks)


def _of_file(options: SparseOptions, path: Path) -> _Source:
    if options.density is not None:
        raise ConfigError(f"--density {options.density}: only --model has one, masks are as given")
    masks = load_masks(path)
    num_steps, num_layers, num_heads = masks.shape[:3]
    for name, size in (("steps", num_steps), ("layers", num_layers)):
        if (getattr(options, name) or 0) > size:
            raise ConfigError(f"--{name} {getattr(options, name)}: {path} has {size}")

    def of_layer(layer: int, step: int) -> Bools:
        found = masks[step, layer]
        if not found.any():
            raise ConfigError(
                f"{path}: nothing is computed in step {step} of layer {layer}: look at fewer with "
                "--steps or --layers, or save ~masks if they say what is hidden"
            )
        return found

    q_lens, kv_lens = (np.full(size, options.block) for size in masks.shape[3:])
    return _Source(
        path.name,
        num_heads,
        options.layers or num_layers,
        options.steps or num_steps,
        q_lens,
        kv_lens,
        of_layer,
    )


def _synthetic(options: SparseOptions) -> _Source:
    model = MODELS.get(options.model or "")
    if model is None:
        raise ConfigError(f"--model {options.model!r}: there are {' and '.join(MODELS)}")
    density = model.density if options.density is None else options.density
    drawn = replace(model, density=density, block=options.block)
    return _Source(
        f"{options.model}, synthetic",
        drawn.num_heads,
        options.layers or 1,
        options.steps or 1,
        drawn.block_lens,
        drawn.block_lens,
        lambda layer, step: synthetic_masks(drawn, layer=layer, step=step, seed=options.seed),
    )
