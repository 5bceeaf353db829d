"""Where a command is told to write: looked at before the work begins, and named with the setting that says it."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.atomic import aside
from shards.errors import ConfigError

# What is wrong with the machine rather than with what it was told.
_NOT_OF_THE_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


def require_folder(path: Path, setting: str) -> None:
    """Check that a folder can be made at a path, or written in if it is there. Leaves nothing behind.

    Raises:
        ConfigError: it cannot; a full or failing disk stays an OSError.
    """
    with _named(path, setting, "choose another"):
        nearest = next(p for p in (path, *path.absolute().parents) if _is_there(p))
        if nearest.is_symlink() and not nearest.exists():
            raise _wrong(path, setting, nearest, f"is a link to {nearest.readlink()}, which does not exist")
        if not nearest.is_dir():
            raise _wrong(path, setting, nearest, "is a file, expected a folder")
        with tempfile.TemporaryFile(dir=nearest):  # rights alone do not tell: /proc says yes and takes no file
            pass


def require_file(path: Path, setting: str, *, parents: bool = False) -> None:
    """Check that a file can be written at a path, or where it leads as a link. Leaves nothing behind.

    ``parents``: its folder may still be made.

    Raises:
        ConfigError: it cannot; a full or failing disk stays an OSError.
    """
    advice = "give a file in a folder that is there"
    with _named(path, setting, advice):
        if path.is_dir():
            raise ConfigError(f"{setting} is {path}, that is a folder; {advice}", path=path)
        if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout
            return
        target = path.resolve()
        _is_there(aside(target))  # a name that is too long
        if parents and not target.parent.is_dir():
            require_folder(target.parent, setting)
        elif not target.parent.is_dir():
            missing = target.parent if path.parent.is_dir() else path.parent
            raise ConfigError(f"{setting} is {path}, there is no folder {missing}; {advice}", path=path)
        else:
            with tempfile.TemporaryFile(dir=target.parent):
                pass


def _is_there(path: Path) -> bool:
    """Also if it is a link to nothing. Raises OSError: that cannot be told, as the name is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _wrong(path: Path, setting: str, nearest: Path, what: str) -> ConfigError:
    where = f"which {what}" if nearest == path else f"but {nearest} {what}"
    return ConfigError(f"{setting} is {path}, {where}; choose another", path=path)


@contextmanager
def _named(path: Path, setting: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # Path.resolve calls a circle of links a RuntimeError
        number = getattr(error, "errno", None) or errno.ELOOP
        if number in _NOT_OF_THE_PLACE:
            raise
        rights = ", or give this user the right to it" if number in (errno.EACCES, errno.EPERM) else ""
        raise ConfigError(
            f"{setting} is {path}, where nothing can be written ({os.strerror(number)}); {advice}{rights}", path=path
        ) from None
