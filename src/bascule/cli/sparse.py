"""`bascule sparse`: what balancing block-sparse attention is worth. A mesh (4, 2) is U4R2."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bascule.cli.inputs import MachineOptions
from bascule.errors import ConfigError
from bascule.options import Outputs, Range, flag, refuse

if TYPE_CHECKING:
    from bascule.arrays import Bools, Ints
    from bascule.sim.sparse_study import Mesh

_TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)  # of kept plans, on the page
_REWARDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the paper's greedy, on the page


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Outputs, MachineOptions):
    """Show how uneven block-sparse attention is on a mesh, and what each way of planning gains.

    Masks come from a file or are drawn at random in the likeness of a video model.

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
        ranks: Ranks; without degrees, all meshes of so many are compared that the heads allow.
        head_dim: Values of a head.
        itemsize: Bytes of a value, as it travels.
        target: Imbalance that minimal_move is to reach.
        reward: For staying at home, of the paper's greedy.
        tolerance: A plan is kept while its imbalance is at most 1 + tolerance.
        head: Head whose mask is drawn on the page.
    """

    masks: Path | None = None
    model: str | None = None
    density: float | None = None
    layers: Annotated[int | None, Range(1, 1000)] = None
    steps: Annotated[int | None, Range(1, 1000)] = None
    seed: int = 0
    block: Annotated[int, Range(1, 2**31 - 1)] = 64
    ulysses: Annotated[int | None, Range(1, 2**15)] = None
    ring: Annotated[int | None, Range(1, 2**9)] = None
    ranks: Annotated[int | None, Range(1, 2**15)] = None
    head_dim: Annotated[int, Range(1, 2**16)] = 128
    itemsize: Annotated[int, Range(1, 16)] = 2
    target: Annotated[float, Range()] = 1.005
    reward: Annotated[float, Range()] = 2.0
    tolerance: Annotated[float, Range()] = 0.05
    head: int = 0

    @property
    def meshes(self) -> "tuple[Mesh, ...]":
        """All that are to be compared, those with the largest Ulysses degree first."""
        from bascule.plan.topology import all_degrees

        if self.ranks is None:
            if self.ulysses is None and self.ring is None:
                raise ConfigError(
                    "give a mesh with --ulysses and --ring, or --ranks to compare all meshes"
                )
            return ((self.ulysses or 1, self.ring or 1),)
        legal = all_degrees(self.ranks)
        fitting = [x for x in legal if self.ulysses in (None, x[0]) and self.ring in (None, x[1])]
        if not fitting:
            degrees = {"--ulysses": self.ulysses, "--ring": self.ring}
            words = ", ".join(f"{name} {value}" for name, value in degrees.items() if value)
            known = ", ".join(f"{ulysses} x {ring}" for ulysses, ring in legal)
            raise ConfigError(
                f"{words} and --ranks {self.ranks}: the ranks are Ulysses x ring, one of {known}"
            )
        return tuple(fitting)


@dataclass(frozen=True)
class _Source:
    """Masks of a file or a model."""

    name: str  # for titles
    num_heads: int  # of a layer
    num_layers: int  # to look at
    num_steps: int  # to look at
    q_lens: "Ints"  # tokens of each query block
    kv_lens: "Ints"  # tokens of each key block
    masks: "Callable[[int, int], Bools]"  # of a layer in a step

    def layers(self, advance: Callable[[], None]) -> "Iterator[Iterator[Bools]]":
        """Yield masks of each step of each layer, read or drawn when they are looked at."""
        for layer in range(self.num_layers):
            yield (self.masks(layer, step) for step in range(self.num_steps))
            advance()


def run(options: SparseOptions, arguments: list[str]) -> None:
    """Plan in all ways, and publish the comparison."""
    from bascule.cli.command import progress, publish
    from bascule.plan.sparse import check_degrees
    from bascule.report.reports import of_sparse
    from bascule.sim.sparse_study import Setting, study

    meshes, machine = options.meshes, options.hardware()
    if (options.masks is None) == (options.model is None):
        number = "neither" if options.masks is None else "both"
        raise ConfigError(f"give one of --masks and --model, not {number}")
    source = _synthetic(options) if options.masks is None else _of_file(options, options.masks)
    if not 0 <= options.head < source.num_heads:
        raise ConfigError(f"--head {options.head}: there are heads 0 to {source.num_heads - 1}")
    if options.report is None:
        refuse(options, ("head",), "drawn on the page alone; give --report, too")
    fitting = tuple(mesh for mesh in meshes if mesh[0] <= source.num_heads)
    if not fitting:
        raise ConfigError(
            f"{source.name}: {source.num_heads} heads for {meshes[-1][0]} Ulysses ranks, which "
            f"take one each at least: use --ulysses {source.num_heads} at most, and --ring"
        )
    for mesh in fitting:
        check_degrees(*mesh)
    setting = Setting(
        fitting,
        source.q_lens,
        source.kv_lens,
        machine.attention_latency(options.head_dim),
        options.head_dim,
        options.itemsize,
        options.target,
        options.reward,
        options.tolerance,
    )
    swept = () if options.report is None else (_TOLERANCES, _REWARDS)
    with progress("layers", source.num_layers) as advance:
        result = study(source.name, source.layers(advance), setting, *swept)
    publish(options, of_sparse(result, options.head, [f"Predicted for {machine}."]))


def _of_file(options: SparseOptions, path: Path) -> _Source:
    import numpy as np

    from bascule.workload import load_masks

    refuse(options, ("density", "seed"), "only for --model; masks are as given")
    masks = load_masks(path)
    num_steps, num_layers, num_heads = masks.shape[:3]
    for name, size in (("steps", num_steps), ("layers", num_layers)):
        if (getattr(options, name) or 0) > size:
            raise ConfigError(f"{flag(name)} {getattr(options, name)}: {path} has {size}")

    def of_layer(layer: int, step: int) -> "Bools":
        one = masks[step, layer]
        if not one.any():
            raise ConfigError(
                f"{path}: nothing is computed in step {step} of layer {layer}: look at fewer with "
                "--steps or --layers, or save ~masks if they say what is hidden"
            )
        return one

    q_lens, kv_lens = (np.full(size, options.block) for size in masks.shape[3:])
    looked_at = options.layers or num_layers, options.steps or num_steps
    return _Source(path.name, num_heads, *looked_at, q_lens, kv_lens, of_layer)


def _synthetic(options: SparseOptions) -> _Source:
    from bascule.workload.masks import COGVIDEOX15, WAN21, synthetic_masks

    models = {"wan2.1": WAN21, "cogvideox1.5": COGVIDEOX15}
    model = models.get(options.model or "")
    if model is None:
        raise ConfigError(f"--model {options.model!r}: there are {' and '.join(models)}")
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
