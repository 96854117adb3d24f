"""The shape of an MM-DiT."""

from dataclasses import dataclass

from bascule.errors import ConfigError
from bascule.plan.checks import each, fields, number, rate, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTConfig:
    """Sizes of a packed MM-DiT; `MMDiTConfig.flux` gives those of FLUX.1."""

    in_channels: int  # width of an image token, in and out
    text_dim: int  # width of a text token (the text encoder's embeddings)
    vec_dim: int  # width of the pooled text vector, one a sample
    d_model: int  # width of the residual stream
    num_heads: int  # query heads; `d_model // num_heads` is the head width
    num_kv_heads: int | None = None  # key and value heads, a divisor of `num_heads`; None: as many
    num_double: int  # blocks with separate weights for text and image tokens
    num_single: int  # blocks with shared weights
    mlp_ratio: float = 4.0  # MLP width over `d_model`
    axes_dim: tuple[int, ...]  # head width of each axis of a position; even, a whole head together
    theta: float = 10_000.0  # base of the rotary frequencies
    guidance: bool = False  # a sample also carries a guidance scale (distilled models)

    def __post_init__(self) -> None:
        one = (whole, 1)
        fields(self, in_channels=one, text_dim=one, vec_dim=one, d_model=one, num_heads=one)
        fields(self, num_kv_heads=one, num_double=whole, num_single=whole, theta=rate)
        fields(self, mlp_ratio=(number, 1 / self.d_model), axes_dim=(each, whole, 2))
        if self.d_model % self.num_heads:
            raise ConfigError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}")
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}"
            )
        if sum(self.axes_dim) != self.head_dim or any(dim % 2 for dim in self.axes_dim):
            raise ConfigError(
                f"axes_dim {self.axes_dim} must be even and add up to the head width, "
                f"{self.head_dim}, not to {sum(self.axes_dim)}"
            )

    @classmethod
    def flux(cls, *, guidance: bool = True) -> "MMDiTConfig":
        """FLUX.1, 12 billion parameters (`guidance=False` is FLUX.1-schnell)."""
        return cls(
            in_channels=64,
            text_dim=4096,
            vec_dim=768,
            d_model=3072,
            num_heads=24,
            num_double=19,
            num_single=38,
            axes_dim=(16, 56, 56),
            guidance=guidance,
        )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, as a number."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def qkv_dim(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Hidden width of an MLP."""
        return int(self.d_model * self.mlp_ratio)
