"""YAML and ``section.field=value`` to a validated config. Works with any pydantic model, which it only duck-types."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin

from shards.errors import ConfigError, counted


class _Model(Protocol):
    @classmethod
    def model_validate(cls, obj: Any) -> Any: ...


M = TypeVar("M", bound=_Model)

_OR_NULL = ", or null"
_SHOWN_CHARS = 120  # of a value that is refused
# What pydantic calls wrong values, in the words of a YAML file.
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "path_type": "a path",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with its own settings",
    "invalid_key": "a name; put quotes around one that YAML takes for a number",
}


def load_settings(model: type[M], path: Path | None, overrides: Sequence[str] = ()) -> M:
    """The config in ``path``, or the defaults, with ``overrides`` on top.

    Raises:
        ConfigError: file absent or not a YAML mapping, an override without ``=``, an unknown key (the nearest known
            one is named), a value of the wrong kind; every finding stands in the one message.
    """
    values = {} if path is None else read_yaml(path)
    for text in overrides:
        apply_override(values, text, model)
    where = "the config" if path is None else str(path)
    return validate(model, values, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.load(text, Loader=_loader())
        doubled = next(_doubled_keys(yaml.compose(text, Loader=yaml.SafeLoader), ""), None) if values else None
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a YAML file, see configs/"
        raise ConfigError(f"{path}: there is no such file{hint}", path=path) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text in UTF-8"
        raise ConfigError(
            f"{path}: cannot be read as a YAML file: {why}; give the path of one, see configs/", path=path
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}", path=path) from None
    if doubled:
        raise ConfigError(f"{path}: {doubled}; keep one of them", path=path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, expected `section:` blocks; see configs/", path=path
        )
    return values


@cache
def _loader() -> Any:
    """YAML's safe loader, to which 1e3 and 1e-4 are numbers too, as in YAML 1.2; PyYAML reads 1.1, which wants a point."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _doubled_keys(node: Any, prefix: str) -> Iterator[str]:
    """Says of each key that stands twice in its mapping where; YAML would silently take the last."""
    if node.id != "mapping":
        for value in node.value if node.id == "sequence" else ():
            yield from _doubled_keys(value, prefix)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            yield f"{name} is set twice, in lines {lines[name]} and {line}"
        lines[name] = line
        yield from _doubled_keys(value, f"{name}.")


def apply_override(values: dict[str, Any], text: str, model: Any = None) -> None:
    """Set one ``section.field=value`` in nested ``values``.

    A field of ``model`` that is a text, a path or a list of them takes the value as it stands, unless it begins with a
    bracket where a list may stand; an empty one or null means none. For every other the value is read as YAML, such as 3,
    true or [a, b].
    """

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
    block[field] = _text_value(model, (*sections, field), value)


def _text_value(model: Any, path: Sequence[str], value: str) -> Any:
    import yaml

    annotation = _annotation(model, path)
    kinds = _kinds(annotation)
    listed = value.startswith("[") and any(map(_is_list, _members(annotation)))
    if kinds & {str, Path} and not listed:
        none = value in ("", "null") and (type(None) in kinds or (not value and Path in kinds))
        return None if none else value
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        # A pattern such as [*.q_proj], whose * means something else in YAML.
        return [part.strip() for part in value[1:-1].split(",")] if listed and value.endswith("]") else value
    if any(map(_fields, _members(annotation))) and read is not None and not isinstance(read, dict):
        return value  # a section that may be given as one text, such as a path
    if isinstance(read, str):
        whole = value.strip()
        if whole[:1] not in "\"'":
            read = whole  # YAML cuts ` #3` off as a remark
        if _is_float(read):
            return float(read)  # YAML reads 1e-4 as text, people mean a number
    return read


def _annotation(model: Any, path: Sequence[str]) -> Any:
    """The type of the field at ``path``, None where there is no such field."""
    field = _fields(_section(model, path[:-1])).get(path[-1])
    return None if field is None else field.annotation


def _kinds(annotation: Any) -> set[Any]:
    """What a field may hold as one value: str, Path, None; empty if it may hold anything else, which YAML can tell."""
    members = [m for m in _members(annotation) if not _is_list(m)]
    kinds = {Path if isinstance(m, type) and issubclass(m, PurePath) else m for m in members}
    return kinds if kinds <= {str, Path, type(None)} else set()


def _is_list(member: Any) -> bool:
    """Whether it is a list of texts, which on the command line begins with a bracket."""
    return get_origin(member) is tuple and {m for a in get_args(member)[:1] for m in _members(a)} <= {str, Path}


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type: itself, or the members of a union, without what Annotated adds."""
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if (
        origin is Literal
        or not arguments
        or (isinstance(origin, type) and origin.__name__ not in ("Union", "UnionType"))
    ):
        return [annotation]
    return [member for argument in arguments for member in _members(argument)]


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
        findings = _other_command(model, values) or _findings(model, error.errors())
        raise ConfigError(f"{where}: " + "; ".join(findings)) from None


def _other_command(model: Any, values: Mapping[str, Any]) -> list[str]:
    """The one thing to say of a file whose sections are mostly not ours."""
    known = _fields(model)
    unknown = [name for name in values if name not in known]
    if len(unknown) < 2 or 2 * len(unknown) <= len(values):
        return []
    return [
        f"its sections are {', '.join(map(str, values))}, expected {', '.join(known)}; it looks like the config of another "
        "command: configs/build.yaml is for building shards, the others are for training"
    ]


def _findings(model: Any, items: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence a setting; what the alternatives of a type expect is joined by "or"."""
    expected: dict[str, list[str]] = {}
    places = [_loc(model, item["loc"]) for item in items]
    for item, place in zip(items, places, strict=True):
        if any(len(other) > len(place) and other[: len(place)] == place for other in places):
            continue  # what is wrong inside says more: a list of bad values is then short of good ones, too
        start, what = _finding(model, item)
        if what not in expected.setdefault(start, []):
            expected[start].append(what)
    return [start + _joined(list(filter(None, what))) for start, what in expected.items()]


def _joined(alternatives: Sequence[str]) -> str:
    null = _OR_NULL if any(text.endswith(_OR_NULL) for text in alternatives) else ""
    return " or ".join(text.removesuffix(_OR_NULL) for text in alternatives) + null


def _finding(model: Any, item: Mapping[str, Any]) -> tuple[str, str]:
    """What was found, and what was expected; the second is empty where that is all in one sentence."""
    loc = [part for part in _loc(model, item["loc"]) if part != "[key]"]
    name = ".".join(map(str, loc))
    if item["type"] == "extra_forbidden":
        known = sorted(_fields(_section(model, loc[:-1])))
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        parent = ".".join(map(str, loc[:-1]))
        meant = [f"{parent}.{near[0]}" if parent else near[0]] if near else _elsewhere(model, str(loc[-1]))
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"known here: {', '.join(known)}"
        return f"{name} is not a setting; {hint}", ""
    if item["type"] == "missing" and isinstance(loc[-1], int):
        return f"{'.'.join(map(str, loc[:-1]))} has {counted(len(item['input']), 'value')}, expected more", ""
    if item["type"] == "missing" and (section := _section(model, loc)) is not _section(model, loc[:-1]):
        return (
            f"{name} is missing; write that section in the file, or give {name}.{next(iter(_fields(section)))}=...",
            "",
        )
    if item["type"] == "missing":
        return f"{name} is missing; set it in the file or with {name}=...", ""
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error":
        return (message if not name or name in message else f"{name}: {message}"), ""
    if item["type"] == "string_pattern_mismatch":
        message = f"a text like {item['ctx']['pattern'].strip('^$')}"
        if simple := re.fullmatch(r"\^\[([^]]+)\]\+\$", item["ctx"]["pattern"]):
            message = f"a text of {' '.join(re.findall('.-.|.', simple[1]))} only"
    if item["type"] in ("too_short", "too_long"):
        least, most = (item["ctx"].get(end) for end in ("min_length", "max_length"))
        unit = "character" if isinstance(item["input"], str) else "value"
        message = f"at least {counted(least, unit)}" if least is not None else f"at most {counted(most, unit)}"
    empty = _OR_NULL if type(None) in _members(_annotation(model, list(map(str, loc)))) else ""
    return f"{name} is {_shortened(repr(item['input']))}, expected ", f"{_EXPECTED.get(item['type'], message)}{empty}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def _loc(model: Any, loc: Sequence[Any]) -> list[Any]:
    """A place as people write it: without the names that pydantic gives to the alternatives of a type."""
    names: list[Any] = []
    after_union = False
    for part in loc:
        if after_union and not isinstance(part, int):
            after_union = False
            continue
        names.append(part)
        members = [m for m in _members(_annotation(model, [str(n) for n in names])) if m is not type(None)]
        after_union = len(members) > 1
    return names


def _section(model: Any, loc: Sequence[Any]) -> Any:
    for part in loc:
        field = _fields(model).get(str(part))
        if field is None:
            return model
        model = next((a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if _fields(a)), model)
    return model


def _elsewhere(model: Any, name: str) -> list[str]:
    """Where a setting of this name is, if in another section."""
    return [f"{section}.{name}" for section in _fields(model) if name in _fields(_section(model, [section]))]


def _fields(model: Any) -> Mapping[str, Any]:
    return getattr(model, "model_fields", {})
