"""The command line: parses, calls the library, prints. Heavy imports wait until they are needed."""

import sys
from typing import Annotated

import tyro
from rich.console import Console

import bascule
from bascule.bench.doctor_options import DoctorOptions
from bascule.bench.options import BenchOptions
from bascule.calibrate.options import CalibrateOptions
from bascule.cli.plan import PlanOptions
from bascule.cli.simulate import SimulateOptions
from bascule.cli.sparse import SparseOptions
from bascule.cli.topology import TopologyOptions
from bascule.cli.trace import TraceOptions
from bascule.errors import CommError, ConfigError, PlanError
from bascule.generate.generate_options import GenerateOptions
from bascule.train.train_options import TrainOptions

Command = (
    Annotated[PlanOptions, tyro.conf.subcommand("plan")]
    | Annotated[TopologyOptions, tyro.conf.subcommand("topology")]
    | Annotated[SimulateOptions, tyro.conf.subcommand("simulate")]
    | Annotated[SparseOptions, tyro.conf.subcommand("sparse")]
    | Annotated[TraceOptions, tyro.conf.subcommand("trace")]
    | Annotated[BenchOptions, tyro.conf.subcommand("bench")]
    | Annotated[TrainOptions, tyro.conf.subcommand("train")]
    | Annotated[GenerateOptions, tyro.conf.subcommand("generate")]
    | Annotated[DoctorOptions, tyro.conf.subcommand("doctor")]
    | Annotated[CalibrateOptions, tyro.conf.subcommand("calibrate")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 2 for a user's error, 1 if a rank or a check failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        sys.stdout.write(f"bascule {bascule.__version__}\n")
        return
    try:
        options = tyro.cli(Command, prog="bascule", description=_DESCRIPTION, args=arguments)  # pyright: ignore
        if isinstance(options, PlanOptions):
            from bascule.cli.plan import plan

            plan(options)
        elif isinstance(options, TopologyOptions):
            from bascule.cli.topology import topology

            topology(options)
        elif isinstance(options, SimulateOptions):
            from bascule.cli.simulate import simulation

            simulation(options)
        elif isinstance(options, SparseOptions):
            from bascule.cli.sparse import sparse

            sparse(options)
        elif isinstance(options, TraceOptions):
            from bascule.cli.trace import trace

            trace(options)
        elif isinstance(options, DoctorOptions):
            from bascule.cli.doctor import doctor

            if doctor(options, arguments):
                sys.exit(1)
        elif isinstance(options, CalibrateOptions):
            from bascule.cli.calibrate import calibrate

            if not calibrate(options, arguments):
                sys.exit(1)
        elif isinstance(options, GenerateOptions):
            from bascule.cli.generate import generate

            generate(options, arguments)
        elif isinstance(options, TrainOptions):
            from bascule.cli.train import train

            train(options, arguments)
        else:
            from bascule.cli.bench import bench

            bench(options, arguments)
    except (ConfigError, PlanError) as error:
        _fail(str(error), 2)
    except CommError as error:
        _fail(str(error), 1)


_DESCRIPTION = (
    "Give every GPU the same work: plan batches, and measure what balancing is worth. "
    "bascule --version tells the version."
)


_LONGEST = 1200


def _fail(message: str, code: int) -> None:
    """One sentence on one line, whatever of the input it quotes."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    if len(text) > _LONGEST:  # what is wrong stands first, the advice last
        text = f"{text[: _LONGEST // 2]} .. {text[-_LONGEST // 2 :]}"
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    console.print(f"bascule: {text}", markup=False)
    sys.exit(code)
