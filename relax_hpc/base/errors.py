"""Errors that end a process. The scheduler decides by their exit codes."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_RETRY = 75
EXIT_CONFIG = 78
EXIT_NO_PROGRESS = 93
EXIT_INTERRUPTED = 130
"""Exit code of a command that the user interrupted, like a program that ends by SIGINT."""


class RelaxError(Exception):
    """Base of all errors of this package. ``exit_code``: exit code of a process that it ends."""

    exit_code = EXIT_RETRY


class ConfigError(RelaxError):
    """The configuration or a command is wrong, so that a retry cannot help. One line a mistake."""

    exit_code = EXIT_CONFIG

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


def find_start_error(error: BaseException | None) -> str:
    """Text of the error that prevented a child program from starting. Empty: another error.

    The text is an attribute of ``error`` or of one of its causes. If the next start fails with the
    same text, a further one cannot help.
    """
    while error is not None:
        text = getattr(error, "start_error", "")
        if text:
            return str(text)
        error = error.__cause__
    return ""


class Mistakes:
    """Collects mistakes, to report all of them together.

    A `with` block ends at its first ConfigError, which is added to the mistakes. The program
    continues after the block.

    >>> mistakes = Mistakes()
    >>> for value in ("x", "2", "y"):
    ...     with mistakes:
    ...         if not value.isdigit():
    ...             raise ConfigError(f"found {value}")
    >>> mistakes.texts
    ['found x', 'found y']
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> bool:
        if isinstance(error, ConfigError):
            self.add(*error.mistakes)
        return isinstance(error, ConfigError)

    def add(self, *texts: str) -> None:
        """Add mistakes, each of them once."""
        self.texts += [text for text in texts if text not in self.texts]

    def raise_if_any(self) -> None:
        """Raise ConfigError with all mistakes, if there are any."""
        if self.texts:
            raise ConfigError(*self.texts)


class NoProgressError(RelaxError):
    """The run makes no progress (crash loop, all rows filtered). It stops, to save node hours."""

    exit_code = EXIT_NO_PROGRESS


class ProgrammingError(RelaxError):
    """A role failed by a programming error in a plug-in before it had done any work. It ends the
    run unless the run has made progress, which the supervisor knows."""


class FencedError(RelaxError):
    """A newer incarnation of this group exists. This process must not change anything."""


class StoppedError(RelaxError):
    """The process ended early and cleanly: a stop was requested, or the time limit is near."""


class DeadlineError(RelaxError):
    """A wait timed out. The message names the peer, the time, and the log to read."""


class RefusedError(RelaxError):
    """The queue controller refused a request; the message is the controller's."""
