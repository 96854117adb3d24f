"""Commands of files for clusters, as a pod or a node starts them, and what parsers say of them."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from torch.distributed.run import get_args_parser  # pyright: ignore[reportPrivateImportUsage]

from bascule.cli import parse
from tests.helpers.pages import ROOT

KUBERNETES, SKY = ROOT / "examples" / "kubernetes", ROOT / "examples" / "sky"
NODE = {  # what SkyPilot sets on the second of two nodes
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
    "BASCULE_KEY": "0123456789abcdef",
    "MODEL": "flux",
}


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def of_kind(kind: str, path: Path) -> dict[str, Any]:
    """The one document of a kind."""
    (document,) = [document for document in documents(path) if document["kind"] == kind]
    return document


def served_by(path: Path) -> dict[str, Any]:
    """The container of a StatefulSet."""
    (container,) = of_kind("StatefulSet", path)["spec"]["template"]["spec"]["containers"]
    return container


def words_of(container: dict[str, Any], **values: str) -> list[str]:
    """The command of a container, with the values of variables as Kubernetes puts them in."""
    words = [*container["command"], *container["args"]]
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def torchrun_of(script: str, home: Path, **values: str) -> list[str]:
    """What bash gives to torchrun in the script of a task of SkyPilot."""
    (home / "bascule" / "bin").mkdir(parents=True, exist_ok=True)
    (home / "bascule" / "bin" / "activate").touch()
    before = "set -euo pipefail\ntorchrun() { printf '%s\\0' torchrun \"$@\"; }\n"
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"} | NODE | values
    bash = ("bash", "-c", before + script)
    ran = subprocess.run(bash, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.split("\0")[:-1]


class _ParsedError(Exception):
    pass


def parsed(words: list[str]) -> argparse.Namespace:
    """Torchrun's options, once its own parser and the parser of what it starts took the words."""
    assert words[0] == "torchrun"
    launched = get_args_parser().parse_args(words[1:])
    if launched.module:
        assert launched.training_script == "bascule"
        parse(launched.training_script_args)
        return launched
    path = ROOT / launched.training_script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    takes = argparse.ArgumentParser.parse_args

    def take(parser: argparse.ArgumentParser) -> None:
        takes(parser, launched.training_script_args)
        raise _ParsedError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", take):
        try:
            module.main()
        except _ParsedError:
            return launched
    raise AssertionError(f"{path} reads no options")


def probe(kind: str, port: int, **environment: str) -> bool:
    """Whether the probe of the image passes."""
    command = (sys.executable, KUBERNETES / "healthy.py", kind, str(port))
    return subprocess.run(command, env=environment).returncode == 0
