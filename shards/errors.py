"""Errors that a user can cause. Each message says where, what was found and expected, and what to do."""

from pathlib import Path


class UserError(Exception):
    """Root of every error that is shown as one paragraph, without a traceback; each package has one base class."""

    exit_code = 1

    def __init__(
        self, message: str, *, path: str | Path | None = None, key: str | None = None, step: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.key = key
        self.step = step


class ConfigError(UserError, ValueError):
    """Wrong usage or config: the job was never started. Exit code 2."""

    exit_code = 2


class ShardsError(UserError):
    """Base of what goes wrong with a shard folder."""


class FormatError(ShardsError):
    """A file of the shard folder is missing, damaged, or not what the manifest says."""


class DamagedSampleError(FormatError):
    """One sample's bytes are not those that were written; ``key`` names it."""


class DuplicateKeyError(ShardsError):
    """A key that is already in the dataset was written again."""
