"""Run a benchmark and write its result: `python benchmarks/run.py NAME [options]`.

A benchmark is a function of that name in a module beside this one. Its keyword parameters are the
options. It measures, prints verdicts, and returns what `results/NAME.json` holds beside command,
commit, date and device; so sources must be committed first. With `--quick` it measures less, and
nothing is written. Without a name, the benchmarks are listed.
"""

import importlib
import sys

import tyro
from measuring import uncommitted, write_results

MODULES = {
    "host": ("overhead", "route", "plan_ahead", "flux"),
    "tables": ("tables",),
    "planning": ("solver", "planner", "at_size", "fit"),
    "paper": ("simulate",),
    "loader": ("loader",),
    "inference": ("inference", "inference_compiled"),
    "pipelines": ("pipeline",),
    "ablation": ("ablation",),
    "sparse": ("sparse", "sparse_rho", "sparse_kernel", "sparse_plan"),
    "sparse_model": ("sparse_model", "sparse_cogvideox"),
    "trained": ("sparse_trained",),
    "baselines": ("baselines",),
    "training": ("wallclock", "stages", "trace", "calibrate", "diffusers_training", "topologies"),
    "models": ("models",),
    "encoders": ("encoders", "tiles"),
    "vlm": ("vlm",),
    "serving": ("requests", "policies"),
    "server": ("server", "recovery", "memory"),
    "router": ("router",),
    "batching": ("batching",),
    "wire": ("ring", "quantize"),
    "plugins": ("plugins",),
}


def main() -> None:
    """Run the benchmark that the command line names."""
    names = {name: module for module, of_module in MODULES.items() for name in of_module}
    name, *options = sys.argv[1:] or ["--help"]
    if name not in names:
        for one, module in names.items():
            text = getattr(importlib.import_module(module), one).__doc__
            print(f"{one:20}{text.strip().partition(chr(10))[0]}")
        sys.exit(0 if name == "--help" else f"there is no benchmark {name!r}")
    if "--quick" not in options and (changes := uncommitted()):
        sys.exit(f"commit these first, since a result names its commit, or use --quick:\n{changes}")
    function = getattr(importlib.import_module(names[name]), name)
    results = tyro.cli(function, prog=f"benchmarks/run.py {name}", args=options)
    if "--quick" not in options:
        print("written:", write_results(name, results))


if __name__ == "__main__":
    main()
