"""Every error keepstep raises.

    Error
    ├── ConfigError       a setting is unknown, malformed or cannot work together with another
    ├── KeeperError       the keeper cannot be started, reached, or refuses what was asked
    ├── CaptureError      the state holds a value that cannot be captured exactly
    ├── IntegrityError    bytes do not match their checksum
    └── RecoveryError     state of this run exists, or should, and cannot be restored

Save-side faults never raise out of `take` (training goes on): they are counted, logged and shown.
Restore-side faults always raise. `hint` is what to do next; the command line prints it as `try:`.
"""

from __future__ import annotations

_CONTROLS = str.maketrans({chr(code): "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"})


def printable(text: str) -> str:
    """Text of another process without the characters that a terminal obeys."""
    return text if text.isprintable() else text.translate(_CONTROLS)


class Error(Exception):
    """What happened, and in `hint` what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = printable(message)
        self.hint = printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


# The hint of errors that another attempt cures: the launcher makes it by itself.
RESTART_CURES = "the launcher restarts the job"


def restart_cures(error: BaseException) -> bool:
    """Whether the same call may succeed in a next start, without any change of the program or of the state."""
    return isinstance(error, KeeperError) or (isinstance(error, Error) and error.hint == RESTART_CURES)


class ConfigError(Error):
    """A setting is unknown, malformed or contradicts another one."""


class KeeperError(Error):
    """The keeper cannot be started, cannot be reached, or refuses the request."""


class CaptureError(Error):
    """The state holds a value that cannot be captured and restored exactly."""


class IntegrityError(Error):
    """Bytes do not match their checksum."""


class RecoveryError(Error):
    """State of this run exists, or should, and cannot be restored."""


# Error classes by name: a refusal crosses the socket by name and is raised again as the same class.
KINDS: dict[str, type[Error]] = {
    cls.__name__: cls for cls in (ConfigError, KeeperError, CaptureError, IntegrityError, RecoveryError)
}
