"""What imports torch and what must not: planning loads fast, and runs on machines without torch."""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import bascule
from tests.helpers.cli import modules_imported_by

SOURCE = Path(bascule.__file__).parents[1]


@pytest.mark.parametrize(
    "args",
    [
        ("-c", "import bascule"),
        ("-c", "import bascule.machine.fits, bascule.machine.mesh_choice"),
        ("-c", "import bascule.plan"),
        ("-c", "import bascule.workload.traces"),
        ("-c", "import bascule.sim.simulation, bascule.sim.sparse_study"),
        ("-c", "import bascule; bascule.simulate"),
        ("-c", "import bascule.report.step_picture"),
    ],
    ids=" ".join,
)
def test_loads_without_torch(args: tuple[str, ...]) -> None:
    modules = modules_imported_by(*args)
    assert "bascule" in modules
    assert "torch" not in modules


def test_the_check_sees_torch() -> None:
    modules = modules_imported_by("-c", "import bascule.comm")
    assert {"bascule.comm", "torch"} <= modules


def imports_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module imports as it is loaded, with the packages that are loaded on the way."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        named = {name for names in _names_of(ast.parse(source).body) for name in names}
        loaded = {name if name in sources else name.rpartition(".")[0] for name in named}
        loaded &= set(sources)
        parts = [name.split(".") for name in loaded]
        above = {".".join(part[:num]) for part in parts for num in range(1, len(part))}
        graph[module] = loaded | {one for one in above if not f"{module}.".startswith(f"{one}.")}
    return graph


def _names_of(body: list[ast.stmt]) -> Iterator[list[str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _names_of(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _names_of(getattr(node, field, []))


def circle_in(sources: Mapping[str, str]) -> list[str]:
    try:
        graphlib.TopologicalSorter(imports_of(sources)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_module_can_be_imported_first() -> None:
    """A circle of imports shows only to who begins at the wrong end of it; so there is none."""
    paths = {
        path: path.relative_to(SOURCE).with_suffix("")
        for path in (SOURCE / "bascule").rglob("*.py")
    }
    sources = {
        ".".join(name.parts).removesuffix(".__init__"): path.read_text()
        for path, name in paths.items()
    }
    assert {"bascule", "bascule.plan", "bascule.comm.route"} <= set(sources)
    assert circle_in(sources) == []


def test_a_circle_through_the_names_of_a_package_is_seen() -> None:
    sources = {
        "a": "from a.x import f",
        "a.x": "from b.y import g",
        "b": "from b.z import h",
        "b.y": "import os",
        "b.z": "from a.x import f",
    }
    assert {"a.x", "b", "b.z"} <= set(circle_in(sources))
    assert circle_in(sources | {"b.z": "def late():\n    from a.x import f"}) == []


def test_every_public_name_is_there() -> None:
    names = """AutoMesh BalancedEncoder BalancedLoader BalancedModel BalancedSampler CommError
    ConfigError HardwareProfile Limits LoaderOptions Pack Plan PlanError SequenceParallel Sequences
    Span SparseConfig Step TiledVAE TransformerCost context_parallel parallelize plan_batch simulate
    suggest_topology train_step"""
    assert dir(bascule) == sorted([*names.split(), "__version__"])
    assert all(hasattr(bascule, name) for name in dir(bascule))
