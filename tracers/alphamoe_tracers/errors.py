"""One base class for every mistake that a user can mend."""


class AlphaMoEError(Exception):
    """A failure told in one line, with the way out.

    Attributes:
        exit_code: what the command line exits with (1 failure, 2 usage or CONFIG_ERROR, 3 INCONCLUSIVE).
        hint: what to do about it, or an empty string.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(AlphaMoEError):
    """The request itself is wrong: nothing was run and nothing was written."""

    exit_code = 2


class EvidenceError(AlphaMoEError):
    """A file that should hold evidence is missing, cut or malformed."""

    exit_code = 3
