"""InferenceOptions."""

import pytest

from bascule import ConfigError, InferenceOptions


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="InferenceOptions\\(vae='none'\\): choose one of 'all'"):
        InferenceOptions(vae="none")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="text_encoders='first'"):
        InferenceOptions(text_encoders="first")  # pyright: ignore[reportArgumentType]
