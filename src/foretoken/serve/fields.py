"""Pydantic fields of a request, from the declarations of options (options/option.py)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field, create_model

from foretoken.options.option import Declared, declared


def request_of(options: type, base: type[BaseModel]) -> Any:
    """Create a body with a field for each option that HTTP requests may set; each may be null or absent.

    Args:
        options: a dataclass; its fields carry an Option.
        base: base class of the body.
    """
    fields: dict[str, Any] = {each.name: (_typed(each), None) for each in declared(options) if each.option.over_http}
    return create_model(f"Declared{options.__name__}", __base__=base, __module__=__name__, **fields)


def _typed(each: Declared) -> Any:
    """Return a field's type, with the bounds of its numbers, which appear in JSON schemas."""
    option = each.option
    bounds = {"ge": option.least, "le": option.most, "gt": option.above, "lt": option.below}
    kinds = [kind for kind in map(_of_json, each.kinds) if kind is not None]
    if not {int, float} & set(kinds):
        bounds = {}
    given: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    union: Any = kinds[0]
    for kind in (*kinds[1:], None):
        union |= kind
    return Annotated[union, Field(description=f"{option.help} {option.more}".rstrip(), **given)]


def _of_json(kind: Any) -> Any:
    """Return the JSON form of a Python type; None: it has no special form."""
    if get_origin(kind) is Sequence:
        return list[get_args(kind)[0]]  # type: ignore[misc]
    if get_origin(kind) is Mapping:
        return dict[str, get_args(kind)[1]]  # type: ignore[misc]
    return kind if kind in (bool, int, float, str) else None
