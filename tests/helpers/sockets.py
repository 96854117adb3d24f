"""Sockets on which processes of this machine listen."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listening(pids: Iterable[int]) -> dict[int, bool]:
    """Ports on which processes listen, and whether only this machine reaches them."""
    own = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed
                own.add(os.readlink(link))
    ports = dict[int, bool]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                # IPv4 in the host's order of bytes: 127.0.0.1 is 0100007F.
                is_local = address.endswith("7F") if name == "tcp" else address == f"{1 << 24:032X}"
                ports[int(port, 16)] = is_local
    return ports
