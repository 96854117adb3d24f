"""Errors of bascule: one class for wrong arguments, another for failed ranks."""


class ConfigError(ValueError):
    """An argument is wrong: the message names the value, the limit and the fix."""


class QuestionError(ConfigError):
    """A data set's table can be read in several ways; `options` choose the likeliest way."""

    def __init__(self, text: str, **options: str | float) -> None:
        super().__init__(text)
        self.options = options


class PlanError(ValueError):
    """No plan can place the items within the limits: names an item and the limit that it misses."""


class CommError(RuntimeError):
    """Ranks disagree, a collective failed, or a rank is gone: it names collective, step, ranks."""


class RemoteConfigError(CommError, ConfigError):
    """One rank has bad input; all ranks raise this before any exchange that depends on the input.

    It is a `CommError` because it arrived through an agreement between ranks, and a `ConfigError`
    because the fix is in the input of the rank that it names.
    """
