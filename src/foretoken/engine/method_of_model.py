"""The method of a draft model or head that is named without one."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from foretoken import catalog
from foretoken.drafting.published.folder import method_for

_OF_ONE_DRAFTER = {"extend", "executor", "lane", "verifier"}  # recipe options that a portfolio may not take


def method_of_model(model: Any, options: Iterable[str] = ()) -> str:
    """Return the method of a draft model or head that is named without one.

    It is `auto`, which drafts with the model, by copies, or not at all. It is the model's own method where drafts of
    that cannot be mixed with copies, or where an option of it is given that `auto` does not have.

    Args:
        options: names of the recipe's options.
    Raises:
        ModelError: the folder's layout is unknown, or refused.
    """
    own = method_for(model)
    drafters = {entry.name: entry for entry in catalog.entries("drafter")}
    if own not in drafters:  # the head of a verifier, say
        return own
    drafter, auto = drafters[own].load(), drafters["auto"].load()
    only = {each.name for each in fields(drafter.Config)} - {each.name for each in fields(auto.Config)}
    named = {each.removeprefix(f"{own}.") for each in options} & (only | _OF_ONE_DRAFTER)
    return own if named or drafter.offers.resumes or drafter.declared.own_verifier is not None else "auto"
