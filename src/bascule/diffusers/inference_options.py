"""What is seldom changed of a model or pipeline over ranks."""

from dataclasses import dataclass
from typing import Literal, get_args

from bascule.attention.api import AttentionOptions
from bascule.comm.failures import shared
from bascule.comm.wire import Wire
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """How `parallelize` works, where the defaults do not fit.

    Attributes:
        vae: Who decodes and encodes images where the VAE of a pipeline has tiling enabled. "all":
            the ranks share the tiles, and every rank gets the pixels. "first": likewise, and only
            the first rank of a replica gets them. "own": every rank computes all tiles itself.
        text_encoders: "own": every rank encodes all prompts itself. "all": the ranks share the
            prompts of a batch; that pays for several long prompts, and never for one.
        kernel: Name of attention's kernel, as in `AttentionOptions`, and so are the next two.
        overlap: Whether Ulysses exchanges while it computes; None: where it measures faster.
        double_buffer: Whether a ring attends while keys and values travel.

    Raises:
        ConfigError: A value is none of those.
    """

    vae: Literal["all", "first", "own"] = "all"
    text_encoders: Literal["all", "own"] = "own"
    kernel: str | None = None
    overlap: bool | None = None
    double_buffer: bool = True

    @shared("InferenceOptions")  # ranks that go on to compute do not wait for this one
    def __post_init__(self) -> None:
        for name in ("vae", "text_encoders"):
            field = InferenceOptions.__annotations__[name]
            if getattr(self, name) not in (known := get_args(field)):
                raise ConfigError(
                    f"InferenceOptions({name}={getattr(self, name)!r}): choose one of "
                    + ", ".join(map(repr, known))
                )
        self.of_attention(None)

    def of_attention(self, wire: Wire | None) -> AttentionOptions:
        """Those of attention, whose rows travel by this wire."""
        return AttentionOptions(None, self.kernel, wire, self.overlap, self.double_buffer)
