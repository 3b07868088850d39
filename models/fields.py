"""Whether the values of a configuration have the types that its fields are annotated with.

What always holds: a value that passes can be compared, hashed and written as JSON, so the rules about values need not
look at types again. Nothing is converted: a number that was written as text may be meant as text.
"""

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Collection
from typing import Any, Literal

_WORDS = {int: "an int", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}
_NO_VALUE = object()


def wrong_types(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name of every field whose value is none that it may hold -> `value, rule; fix`; nested ones, too."""
    found = {}
    for field in dataclasses.fields(config):
        name, value, kind = prefix + field.name, getattr(config, field.name), _kinds(type(config))[field.name]
        found |= _wrong(name, value, kind, field.default)
    return found


def is_count(*values: Any) -> bool:
    """Whether these are numbers of things: ints of at least 1."""
    return all(_is(value, int) and value >= 1 for value in values)


def nearest(name: str, choices: Collection[str]) -> str:
    """`; did you mean 'x'?` for the closest choice, or the empty string."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _wrong(name: str, value: Any, kind: Any, default: Any) -> dict[str, str]:
    if dataclasses.is_dataclass(kind) and isinstance(value, typing.cast(type, kind)):
        return wrong_types(value, f"{name}.")
    if isinstance(value, tuple) and dataclasses.is_dataclass(inner := _inner(kind)):
        parts = [_wrong(f"{name}.{index}", part, inner, dataclasses.MISSING) for index, part in enumerate(value)]
        return {name: problem for part in parts for name, problem in part.items()}
    if _is(value, kind):
        return {}
    choices = [str(choice) for choice in _choices(kind)]
    if choices:
        return {name: f"{name}={value!r} must be one of {', '.join(choices)}{nearest(str(value), choices)}"}
    return {name: f"{name}={value!r} must be {_words(kind)}; write {_instead(value, kind, default)}"}


def _members(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one that it is."""
    kind = kind.__value__ if isinstance(kind, typing.TypeAliasType) else kind
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _inner(kind: Any) -> Any:
    """What a tuple of any length holds; None for what is no tuple."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _choices(kind: Any) -> tuple[Any, ...]:
    kind = _members(kind)[0]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _is(value: Any, kind: Any) -> bool:
    members = _members(kind)
    if len(members) > 1:
        return any(_is(value, member) for member in members)
    kind = members[0]
    if choices := _choices(kind):
        return isinstance(value, str) and value in choices
    if (inner := _inner(kind)) is not None:
        return isinstance(value, tuple) and all(_is(part, inner) for part in value)
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    if (inner := _inner(kind)) is not None:
        return f"a tuple, each entry {_words(inner)}"
    return " or ".join(_WORDS.get(member) or f"a {member.__name__}" for member in _members(kind))


def _instead(value: Any, kind: Any, default: Any) -> str:
    """What to write in place of a value: what it was likely meant as, the default, or the kind in words."""
    made = _converted(value, kind)
    if made is not _NO_VALUE:
        return repr(made)
    if dataclasses.is_dataclass(kind):
        return f"{typing.cast(type, kind).__name__}(...)"
    if default is dataclasses.MISSING:
        default = {int: 1, float: 1.0, str: "..."}.get(_members(kind)[0])
        default = round(value) if default == 1 and isinstance(value, float) and math.isfinite(value) else default
    return f"{default!r}, say"


def _converted(value: Any, kind: Any) -> Any:
    """The value as one of this kind, where nothing gets lost; else `_NO_VALUE`."""
    if len(members := _members(kind)) > 1:
        return next(
            (made for made in (_converted(value, kind) for kind in members) if made is not _NO_VALUE), _NO_VALUE
        )
    if (inner := _inner(kind)) is not None:
        parts = list(value) if isinstance(value, list | tuple) else [value]
        made = [part if _is(part, inner) else _converted(part, inner) for part in parts]
        return _NO_VALUE if any(part is _NO_VALUE for part in made) else tuple(made)
    try:
        if kind is int and float(value) == int(value):
            return int(value)
        if kind is float and math.isfinite(float(value)):
            return float(value)
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower(), _NO_VALUE)
        if kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
    except (TypeError, ValueError, OverflowError):
        pass
    return _NO_VALUE
