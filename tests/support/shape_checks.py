"""Checks of types and shapes in tests, a third cheaper than jaxtyping's own.

pytest's option `--jaxtyping-packages` decorates every function of the package with `jaxtyping.jaxtyped`. For each call
that decorator binds the arguments to the signature and checks them twice, so that its messages can tell arguments from
results. `jaxtyped` here checks the same annotations once, and gives the letters of shapes a scope only where there are
shapes. `conftest.py` replaces the decorator before the package is imported.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping

decorate = jaxtyping.jaxtyped
letters = decorate("context")  # one letter has one size within it


def jaxtyped(function: Any = None, *, typechecker: Any = None) -> Any:
    """Decorate a function; whatever else the hook finds is left to jaxtyping."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    annotations = getattr(function, "__annotations__", {}).values()
    has_letters = any(map(has_shape, annotations))
    if (
        not inspect.isfunction(function)
        or any(isinstance(annotation, str) for annotation in annotations)  # of a name that is defined later
        or (has_letters and inspect.isgeneratorfunction(function))
    ):
        return decorate(function, typechecker=typechecker)
    return checked_with_letters(function, typechecker) if has_letters else checked(function, typechecker)


def has_shape(annotation: Any) -> bool:
    """Whether an annotation or a part of it is a shape of jaxtyping."""
    parts = get_args(annotation)
    if not parts and inspect.isclass(annotation):
        return issubclass(annotation, jaxtyping.AbstractArray)
    return any(map(has_shape, parts))


def at_first_call(function: Callable[..., Any], typechecker: Any) -> Callable[[], Callable[..., Any]]:
    """What gives the checked function. Most functions are never called in a process, and each check is compiled."""
    return functools.cache(lambda: typechecker(function))


def checked(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    """A function whose types are checked."""
    check = at_first_call(function, typechecker)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return (function if jaxtyping.config.jaxtyping_disable else check())(*arguments, **keywords)

    return call


def checked_with_letters(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    """A function whose types and shapes are checked."""
    check = at_first_call(function, typechecker)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*arguments, **keywords)
        with letters:
            return check()(*arguments, **keywords)

    return call
