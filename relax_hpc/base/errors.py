"""Errors that end a process, each with the exit code that a scheduler acts on."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_RETRY = 75
EXIT_CONFIG = 78
EXIT_NO_PROGRESS = 93
EXIT_INTERRUPTED = 130
"""Exit code of a command that the user interrupted, like a program that ends by SIGINT."""


class RelaxError(Exception):
    """Base of all errors of this package; ``exit_code`` is what the process ends with."""

    exit_code = EXIT_RETRY


class ConfigError(RelaxError):
    """The user asked for something impossible; trying again cannot help. One line a mistake."""

    exit_code = EXIT_CONFIG

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


def find_start_error(error: BaseException | None) -> str:
    """Text of the error that kept a child program from starting, in ``error`` or one of its causes.
    Empty: it is another error.

    If the next start fails with the same text, a further one cannot help.
    """
    while error is not None:
        text = getattr(error, "start_error", "")
        if text:
            return str(text)
        error = error.__cause__
    return ""


class Mistakes:
    """Mistakes in several places, to be said at once: a block ends at its first mistake, and the
    next one begins.

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
        """Raise ConfigError with all of them, if there are any."""
        if self.texts:
            raise ConfigError(*self.texts)


class NoProgressError(RelaxError):
    """The run is going in circles (crash loop, everything filtered); it stops instead of burning
    nodes."""

    exit_code = EXIT_NO_PROGRESS


class ProgrammingError(RelaxError):
    """A role failed by a programming error in a plug-in before it had done any work. It ends the
    run unless the run has made progress, which the supervisor knows."""


class FencedError(RelaxError):
    """A newer incarnation of this group exists; this process may change nothing any more."""


class StoppedError(RelaxError):
    """Ended early in good order: asked to, or because the time limit leaves no room. Not a
    failure."""


class DeadlineError(RelaxError):
    """A wait ran past its deadline; the message names the peer, since when, and the log to open."""


class RefusedError(RelaxError):
    """The queue controller refused a request; the message is the controller's."""
