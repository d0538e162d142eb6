"""The ways in which a run ends early, each with the exit code of `oelm train`."""


class RunError(Exception):
    """A run ended early; what was saved stays valid."""

    exit_code = 1


class StoppedError(RunError):
    """A signal asked the run to stop; it has been saved and can be continued."""

    exit_code = 3


class NonFiniteError(RunError):
    """Too many steps had a loss or a gradient that is not finite."""

    exit_code = 4


class InUseError(RunError):
    """Another process holds the folder."""

    exit_code = 5
