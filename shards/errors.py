"""Errors that a user can cause. Each message says where, what was found and expected, and what to do."""

import errno
from pathlib import Path

_ADVICE = {
    errno.EACCES: "give this user the right to it (`ls -ld` shows who has it), or choose another path",
    errno.EPERM: "give this user the right to it (`ls -ld` shows who has it), or choose another path",
    errno.EROFS: "choose a path on a disk that can be written to",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check the path",
    errno.EISDIR: "a folder stands where a file is expected; move it away, or choose another path",
    errno.ELOOP: "its symbolic links lead in a circle; check the path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOSPC: "free some space and run it again",
    errno.EDQUOT: "free some space and run it again",
    errno.EFBIG: "free some space, or raise the limit on the size of files, and run it again",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`) and run it again",
    errno.EIO: "the disk or its connection fails; check it, then run it again",
}


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


class Stopped(KeyboardInterrupt):
    """A signal ended what goes on from where it was when it is started again. Exit code 75.

    No Exception, so that libraries let it pass. Not the plain KeyboardInterrupt: where that has passed through ``exec`` of
    a text, as in a dataclass, Python ends by SIGINT after all.
    """


class ShardsError(UserError):
    """Base of what goes wrong with a shard folder."""


class FormatError(ShardsError):
    """A file of the shard folder is missing, damaged, or not what the manifest says."""


class DamagedSampleError(FormatError):
    """One sample's bytes are not those that were written; ``key`` names it."""


class UnknownKeyError(ShardsError):
    """No sample, or several, go by the name that was given: wrong usage, like a folder that is not there."""

    exit_code = 2


class DuplicateKeyError(ShardsError):
    """A key that is already in the dataset was written again."""


def describe(error: OSError) -> str:
    """An error of the system as where, what and what to do: ``train-000003.tar: No space left on device; free ...``."""
    where = str(error.filename or "system")
    folder, slash, name = where.rpartition("/")
    if name.startswith(".") and name.endswith(".tmp"):  # shards.atomic: what is written aside is meant for another name
        where = f"{folder}{slash}{name[1:].removesuffix('.tmp')}"
    advice = _ADVICE.get(error.errno or 0)
    return f"{where}: {error.strerror or error}" + (f"; {advice}" if advice else "")


def counted(number: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
