"""What the sections of the config have in common, so that each looks and refuses alike."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from shards.remote import is_remote, shown

# Marks a field that decides what is learned: on resume it must match the checkpoint's, or be accepted by name.
TRAJECTORY: dict[str, Any] = {"resume": "must match"}


def trajectory(default: Any, description: str, **limits: Any) -> Any:
    """A field that must match on resume."""
    return Field(default, description=description, json_schema_extra=TRAJECTORY, **limits)


class Section(BaseModel):
    """Frozen, and refuses what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def require_no_secrets(name: str, location: Path | str | None) -> None:
    """Refuse an address with what may be secret: the config is written into the run folder and every checkpoint."""
    if isinstance(location, str) and is_remote(location) and shown(location) != location:
        raise ValueError(
            f"{name}: {shown(location)} has a user, password or query; these belong in the environment or in ~/.netrc"
        )


def _location(value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise PydanticCustomError("location_type", "a path or an address")
    return Path(value) if isinstance(value, str) and not is_remote(value) else value


# A folder here, or an address, which stays a text.
Location = Annotated[Path | str, BeforeValidator(_location)]
