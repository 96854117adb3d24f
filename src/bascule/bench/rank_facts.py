"""What each rank is: host, device, memory and versions; told to all ranks in one gather."""

import importlib.metadata
import json
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.cuda.nccl
import torch.distributed as dist

from bascule.bench.measured import RankFacts
from bascule.calibrate.timed import device_name, memory_bytes
from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup, timeout_of

_CAPACITY = 128  # 1 KiB of text; the ranks gather a second time where one has more
_ABSENT = "none"


def own_facts(group: RankGroup, device: torch.device) -> RankFacts:
    """What this rank is. No collective."""
    timeout = timeout_of(group, torch.device("cpu"))
    return RankFacts(
        host=socket.gethostname(),
        device=device_name(device),
        memory_bytes=memory_bytes(device),
        num_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        bascule=importlib.metadata.version("bascule"),
        numpy=np.__version__,
        cuda=torch.version.cuda or _ABSENT,
        nccl=_nccl_version(device),
        backend=dist.get_backend_config(group.process_group),
        timeout_s=None if timeout is None else timeout.total_seconds(),
    )


def gather_facts(
    group: RankGroup,
    facts: RankFacts | None,
    settings: Mapping[str, str],
    error: Exception | None = None,
) -> tuple[RankFacts, ...]:
    """What all ranks are, in their order. One all-gather, two where a text is long.

    Args:
        group: The ranks.
        facts: Of this rank; None where it met an error.
        settings: What all ranks must have been told alike.
        error: What went wrong on this rank; all ranks then raise it.

    Raises:
        RemoteConfigError: A rank met bad input.
        CommError: A rank met another error, was told something else, or did not come.
    """
    text = "" if facts is None else json.dumps(asdict(facts))
    facts_of_rank = {"values": _to_integers(text), "capacity": _CAPACITY}
    found = agree(group, settings, error, what="bascule doctor", **facts_of_rank)
    return tuple(_facts_of(_from_integers(one)) for one in found)


def _facts_of(given: Mapping[str, Any]) -> RankFacts:
    """What another version of bascule does not tell is None, and so differs."""
    known: dict[str, Any] = {field.name: given.get(field.name) for field in fields(RankFacts)}
    return RankFacts(**known)


def _to_integers(text: str) -> npt.NDArray[np.int64]:
    encoded = text.encode()  # ASCII, as json.dumps writes; padded by what JSON ignores
    return np.frombuffer(encoded.ljust(-(-len(encoded) // 8) * 8), dtype="<i8").astype(np.int64)


def _from_integers(values: npt.NDArray[np.int64]) -> dict[str, Any]:
    return json.loads(values.astype("<i8").tobytes())


def _nccl_version(device: torch.device) -> str:
    if device.type != "cuda":
        return _ABSENT
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found))
