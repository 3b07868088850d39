"""What a caller's function brings along: traced arrays in it would get no gradient, or leak out of their trace."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_OPAQUE = (jax.Array, np.ndarray, type, types.ModuleType)


def holds_tracer(fun: Callable[..., Any] | None) -> bool:
    """True where a traced array hides in a function: in its closure, its defaults, its partial or bound arguments.

    Of an object, such as the ``self`` of a method, only the attributes count that the code names.
    """
    return fun is not None and _function_holds(fun, {})


def _function_holds(fun: Any, seen: dict[Any, Any]) -> bool:
    identity = (id(fun.__self__), id(fun.__func__)) if isinstance(fun, types.MethodType) else id(fun)
    if identity in seen:
        return False
    seen[identity] = fun  # kept, so that nothing else can have this id
    if isinstance(fun, functools.partial):
        values, inner = [*fun.args, *fun.keywords.values()], fun.func
    elif isinstance(fun, types.MethodType):
        values, inner = [fun.__self__], fun.__func__
    elif not hasattr(fun, "__code__"):  # a compiled function, or an object that can be called
        values, inner = [fun], getattr(fun, "__wrapped__", inspect.getattr_static(type(fun), "__call__", None))
    else:
        values, inner = _values(fun), getattr(fun, "__wrapped__", None)
    names = _names(getattr(fun, "__code__", None)) | _names(getattr(inner, "__code__", None))
    return any(_holds(x, names, seen) for x in values) or (inner is not None and _function_holds(inner, seen))


def _values(fun: Any) -> list[Any]:
    """Defaults and closure of a plain function."""
    values = [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]
    for cell in fun.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # the name of a function that is still being defined
            continue
    return values


def _names(code: Any) -> set[str]:
    """Attributes that a function's code names, and the functions that are defined in it."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names(x) for x in code.co_consts if isinstance(x, types.CodeType)))


def _holds(x: Any, names: set[str], seen: dict[Any, Any]) -> bool:
    if _is_function(x):
        return _function_holds(x, seen)
    if hasattr(x, "__dict__") and not hasattr(x, "__jax_array__") and not isinstance(x, _OPAQUE):
        members = [inspect.getattr_static(x, name, None) for name in names]
        x = [types.MethodType(y, x) if isinstance(y, types.FunctionType) else y for y in members]
    return any(
        isinstance(leaf, jax.core.Tracer) or (_is_function(leaf) and _function_holds(leaf, seen))
        for leaf in jax.tree.leaves(x)
    )


def _is_function(x: Any) -> bool:
    return isinstance(x, (types.FunctionType, types.MethodType, functools.partial))
