"""Files for Kubernetes and SkyPilot: parsers take their commands, and probes tell the truth.

`make kubernetes` and `make sky` check the files themselves by the tools of their platforms.
"""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bascule.errors import ConfigError
from tests.helpers.clusters import (
    KUBERNETES,
    SKY,
    documents,
    of_kind,
    parsed,
    probe,
    served_by,
    torchrun_of,
    words_of,
)


def served(_: Path) -> list[str]:
    return words_of(served_by(KUBERNETES / "serve.yaml"), POD_INDEX="1")


def trained(_: Path) -> list[str]:
    return words_of(of_kind("TrainJob", KUBERNETES / "train.yaml")["spec"]["trainer"])


def sky_served(home: Path) -> list[str]:
    return torchrun_of(documents(SKY / "serve.yaml")[0]["run"], home)


def sky_trained(home: Path) -> list[str]:
    return torchrun_of(documents(SKY / "train.yaml")[0]["run"], home)


@pytest.mark.parametrize("command", [served, trained, sky_served, sky_trained])
def test_a_command_has_no_option_that_its_parsers_lack(
    command: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    words = command(tmp_path)
    launched = parsed(words)
    if command is not trained:  # there the runtime says it by PET_ variables
        assert (launched.nnodes, launched.nproc_per_node) == ("2", "8")
    if command is served:
        assert (launched.master_addr, launched.node_rank) == ("images-0.images-ranks", 1)
    if command in (sky_served, sky_trained):
        assert (launched.master_addr, launched.node_rank) == ("10.0.0.1", 1)
    for option in [word for word in words if word.startswith("--")]:
        misspelt = option.replace("--", "--un", 1)
        with pytest.raises((ConfigError, SystemExit)):  # of bascule's parser, or of argparse
            parsed([misspelt if word is option else word for word in words])


def test_probes_ask_the_first_pod_alone() -> None:
    """A pod that answers 503 lives and is not ready; one that does not answer is neither."""
    status = [503]

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/health" else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        proxied = {"http_proxy": "http://127.0.0.1:1", "POD_NAME": "images-0"}
        try:
            assert probe("live", port, **proxied) and not probe("ready", port, **proxied)
            status[0] = 200
            assert probe("ready", port, **proxied) and probe("ready", port)
        finally:
            server.shutdown()
            thread.join()
    assert not probe("live", port) and not probe("ready", port, POD_NAME="images-0")
    assert probe("ready", port, POD_NAME="images-10") and probe("live", port, POD_NAME="a-1")
