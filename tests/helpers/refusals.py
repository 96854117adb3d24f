"""The sentence of a refusal."""

from collections.abc import Callable

import pytest

from bascule.errors import ConfigError


def refusal(call: Callable[[], object]) -> str:
    """The sentence of a ConfigError: on one line, and not long."""
    with pytest.raises(ConfigError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and 10 < len(text) < 500
    return text
