"""Errors of bascule: a wrong argument is one class, a failed peer another."""


class ConfigError(ValueError):
    """An argument is wrong: the message names the value, the limit and the fix."""


class QuestionError(ConfigError):
    """The table of a data set can be read in several ways; `options` choose the likeliest."""

    def __init__(self, text: str, **options: str | float) -> None:
        super().__init__(text)
        self.options = options


class PlanError(ValueError):
    """Legal items that no plan can place within the limits: names the item and the miss."""


class CommError(RuntimeError):
    """Ranks disagree, a collective failed, or a rank is gone: names collective, step and ranks."""


class RemoteConfigError(CommError, ConfigError):
    """Bad input met by one rank and raised on all of them, before any exchange that depends on it.

    It is a `CommError` because it arrived through an agreement between ranks, and a `ConfigError`
    because the fix is in the input of the rank that it names.
    """
