"""YAML and ``section.field=value`` to a validated config. Works with any pydantic model, which it only duck-types."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shards.errors import ConfigError


class _Model(Protocol):
    @classmethod
    def model_validate(cls, obj: Any) -> Any: ...


M = TypeVar("M", bound=_Model)


def load_settings(model: type[M], path: Path | None, overrides: Sequence[str] = ()) -> M:
    """The config in ``path``, or the defaults, with ``overrides`` on top.

    Raises:
        ConfigError: file absent or not a YAML mapping, an override without ``=``, an unknown key (the nearest known
            one is named), a value of the wrong kind; every finding stands in the one message.
    """
    values = {} if path is None else read_yaml(path)
    for text in overrides:
        apply_override(values, text)
    where = "the config" if path is None else str(path)
    return validate(model, values, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a YAML file, see configs/"
        raise ConfigError(f"{path}: there is no such file{hint}", path=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a YAML file: {error}", path=path) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}", path=path) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, expected `section:` blocks; see configs/", path=path
        )
    return values


def apply_override(values: dict[str, Any], text: str) -> None:
    """Set one ``section.field=value`` in nested ``values``; the value is read as YAML, such as 3, true or [a, b]."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"argument {text!r}: expected section.field=value, for example train.seed=7")
    *sections, field = name.strip().split(".")
    block = values
    for section in sections:
        inner = block.setdefault(section, {})
        if inner is None:
            inner = block[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"argument {text!r}: {section} is a value ({inner!r}), not a section")
        block = inner
    try:
        block[field] = yaml.safe_load(value)
    except yaml.YAMLError:
        block[field] = value
    if isinstance(block[field], str) and _is_float(block[field]):
        block[field] = float(block[field])  # YAML reads 1e-4 as text, people mean a number


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return any(c.isdigit() for c in text) and "e" in text.lower()


def validate(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """``values`` as a ``model``, or one ConfigError that lists everything wrong with them."""
    try:
        return model.model_validate(values)  # type: ignore[no-any-return]
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        findings = [_finding(model, item) for item in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(dict.fromkeys(findings))) from None


def _finding(model: Any, item: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = sorted(_fields(_section(model, item["loc"][:-1])))
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        parent = ".".join(str(part) for part in item["loc"][:-1])
        hint = f"did you mean {f'{parent}.' if parent else ''}{near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{name} is not a setting; {hint}"
    if item["type"] == "missing":
        return f"{name} is missing; set it in the file or with {name}=..."
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error":
        return message if not name or name in message else f"{name}: {message}"
    return f"{name} is {item['input']!r}, expected {message}"


def _section(model: Any, loc: Sequence[Any]) -> Any:
    for part in loc:
        field = _fields(model).get(str(part))
        if field is None:
            return model
        model = next((a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if _fields(a)), model)
    return model


def _fields(model: Any) -> Mapping[str, Any]:
    return getattr(model, "model_fields", {})
