"""Every error that Miles raises on purpose. Each carries the exit code that the command line ends with."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class MilesError(Exception):
    """Root of all Miles errors. `str(error)` is what a user reads: what, where, what exists, what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *details: str) -> None:
        super().__init__("\n  ".join((message, *details)))


class UserError(MilesError, ValueError):
    """The user asked for something that cannot be: bad usage, config or data (exit code 2)."""

    exit_code = EXIT_USAGE


class ConfigError(UserError):
    """A run config that is malformed, incomplete or contradictory."""


class DataError(UserError):
    """A data set with a bad row, no rows, or too few rows."""


class PluginError(UserError):
    """A plugin that is broken, missing, incompatible, or in conflict with another."""


class RuntimeMissing(MilesError):
    """The environment lacks a library, a device or a resource that was asked for (exit code 3)."""

    exit_code = EXIT_ENVIRONMENT


class ContractError(MilesError):
    """A component broke the contract of its interface, for example returned the wrong number of scores."""


class RunFailed(MilesError):
    """A run that started and could not go on."""


class WorkerDied(RunFailed):
    """A worker process ended while it was needed; the message names role, index, signal and log."""


class EngineFailed(RunFailed):
    """An engine replica refused or failed a request; the pool may send it to another replica."""


class WeightSyncFailed(RunFailed):
    """Engines did not all receive and verify a weight version; names engine and phase."""


class Interrupted(MilesError):
    """The run was asked to stop (SIGTERM, SIGINT) and saved a complete checkpoint first."""

    exit_code = EXIT_INTERRUPTED
