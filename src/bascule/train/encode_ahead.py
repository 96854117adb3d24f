"""Encodes the samples of a step while the step before trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bascule.comm.failures import shared
from bascule.train.flow import FlowBatch
from bascule.train.stopwatch import Lap, Stopwatch


@dataclass(frozen=True, slots=True)
class Encoded:
    """The samples of a step, ready for the model.

    Attributes:
        flows: Of its microbatches, with their noise.
        moved: What its encoders moved, as plain values; empty without encoders.
        laps: What another thread took to encode them.
    """

    flows: Sequence[FlowBatch]
    moved: Mapping[str, Any]
    laps: Sequence[Lap] = ()


class EncodeAhead:
    """Encodes for another thread than that which trains, and on CUDA beside it, on its own stream.

    Args:
        watch: Of the encoders alone.
        device: Where they compute.
    """

    def __init__(self, watch: Stopwatch, device: torch.device) -> None:
        self._watch = watch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights are there

    def run(self, encode: Callable[[], Encoded]) -> Callable[[], Encoded]:
        """Encode a step; returns when that is done.

        Returns:
            What gives it to the thread that trains.

        Raises:
            As `encode`. What this rank alone meets ends the others, too.
        """
        with shared("encoding ahead"), torch.cuda.stream(self._stream):  # nothing without a stream
            encoded = encode()
            if self._stream is not None:
                self._stream.synchronize()
        encoded = replace(encoded, laps=self._watch.take())

        def hand_over() -> Encoded:
            for flow in encoded.flows if self._stream is not None else ():
                flow.use_on(torch.cuda.current_stream())
            return encoded

        return hand_over
