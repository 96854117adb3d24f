"""The command line: import only the module of the given command, run it, and report errors."""

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

COMMANDS = {  # the module is `bascule.cli.NAME`, "_" for "-", and its `run` takes the options
    "inspect": "Show how bascule reads the table of a data set.",
    "plan": "Plan one batch and show who computes what.",
    "topology": "Rank the topologies of a cluster for a stream of batches.",
    "simulate": "Predict training steps, balanced and as they are today.",
    "simulate-requests": "Predict how fast bascule serve would finish requests.",
    "sparse": "Show how uneven block-sparse attention is on a mesh.",
    "trace": "Read the traces that torch.profiler wrote, one per rank.",
    "bench": "Train on the same batches without and with balancing.",
    "generate": "Make images or videos with a pipeline of diffusers.",
    "serve": "Serve a pipeline of diffusers over HTTP, in OpenAI's form.",
    "route": "Send calls of clients to several jobs of bascule serve.",
    "doctor": "Check the ranks before a run: versions, links and speed.",
    "calibrate": "Measure this machine, and save a profile for predictions.",
}

_LONGEST = 1200  # characters of an error


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit with 2 for a user's error, 1 if a rank or a check failed."""
    try:
        try:
            status = _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if status:
        sys.exit(status)


def _run(arguments: list[str]) -> int | None:
    from bascule.errors import CommError, ConfigError, PlanError, QuestionError

    name = arguments[0] if arguments else "--help"
    if name == "--version":
        import bascule

        print(f"bascule {bascule.__version__}")
    elif name in ("-h", "--help"):
        print(_usage())
    elif name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        return _fail(f"there is no command {name!r}; {advice}", 2)
    else:
        from bascule.options import check_options

        try:
            command, options = parse(arguments)
            check_options(options)
            return command(options, arguments)
        except QuestionError as question:
            command = shlex.join(["bascule", *arguments])
            for option, value in question.options.items():
                name = f"--{option.replace('_', '-')}"
                command = re.sub(rf" ('{name}=[^']*'|{name}[ =]('[^']*'|\S*))", "", command)
                command += f" {name} {shlex.quote(str(value))}"
            return _fail(f"{question}. For example: {command}", 2)
        except (ConfigError, PlanError) as error:
            return _fail(str(error), 2)
        except CommError as error:
            return _fail(str(error), 1)
    return None


def parse(arguments: list[str]) -> tuple[Callable[..., int | None], Any]:
    """Return a command's function and its options; ConfigError if an option is malformed."""
    from bascule.cli.parser import read_options

    module = importlib.import_module(f"bascule.cli.{arguments[0].replace('-', '_')}")
    return module.run, read_options(module, arguments)


def _usage() -> str:
    lines = "\n".join(f"  {name:19}{line}" for name, line in COMMANDS.items())
    return (
        "usage: bascule COMMAND [OPTIONS]\n\n"
        "Give every GPU the same work: plan batches, and measure what balancing is worth.\n\n"
        f"{lines}\n\n"
        "bascule COMMAND --help lists its options; bascule --version prints the version."
    )


def _fail(message: str, status: int) -> int:
    """Print an error on one line, also if it quotes control characters; return the status."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    if len(text) > _LONGEST:  # the fault stands first, the advice last
        text = f"{text[: _LONGEST // 2]} .. {text[-_LONGEST // 2 :]}"
    print(f"bascule: {text}", file=sys.stderr)
    return status
