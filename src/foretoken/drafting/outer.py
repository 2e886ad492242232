"""A drafter around another one: how the inner one is configured, and how it observes drafts that are not its own.

    outer      proposes tokens of its own, or passes on the inner drafter's       suffix_first, rasd
    inner      a draft model, an EAGLE head, n-grams, …

The outer drafter's own tokens are point masses, or coupled to the noise of `match` where the inner drafter's are. The
inner drafter's proposals may be of another kind only if a draft never mixes the two: a draft has one distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.draft import Coupled, Law, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Needs
from foretoken.core.protocols import Drafter
from foretoken.drafting.published.folder import method_for
from foretoken.drafting.published.layouts import DRAFT_MODEL
from foretoken.options.option import Checked, Option

_GIVEN = ("model", "head", "draft_vocab")


@dataclass(frozen=True, kw_only=True)
class OuterOptions(Checked):
    """Options of every such drafter."""

    drafter: Annotated[str, Option("The inner method.")] = "draft_model"
    model: Annotated[
        str | None, Option("Its draft checkpoint, if it takes one: zoo:NAME, a local folder, or a hub id.")
    ] = None
    head: Annotated[
        str | Path | None, Option("Its trained head, if it takes one; None: the one next to the target's weights.")
    ] = None
    draft_vocab: Annotated[str | Path | None, Option("Its draft vocabulary, if it takes one; None: all tokens.")] = None
    coupled: Annotated[
        bool | None,
        Option(
            "A draft model draws its chain with the noise of `match`, so that a seed keeps its tokens; "
            "None: by the verifier."
        ),
    ] = None

    @property
    def inner(self) -> str:
        """The inner method: by default the one that drafts with ``model``."""
        return method_for(self.model) if self.drafter == DRAFT_MODEL and self.model else self.drafter

    def check_drafter(self, *refused: str) -> None:
        """Refuse drafters that cannot be the inner one, by name.

        Raises:
            ConfigError: it is one of them, or no name.
        """
        if not isinstance(self.drafter, str) or self.drafter in refused:
            raise ConfigError(f"drafter={self.drafter!r} must name another method: it drafts next to this one here")


class Outer(Drafter):
    """Base of drafters around another one; passes the calls that only concern the inner drafter on to it.

    Args:
        inner: the inner drafter.
    Raises:
        ConfigError: it cannot be one.
    """

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        if inner.offers.resumes:
            raise ConfigError(
                f"drafter={inner.name!r} begins inside the target, where tokens of others have no rows: "
                "use draft_model or eagle"
            )
        own: type[Law] = Coupled if Coupled in self._inner.laws else PointMass
        self.laws: tuple[type[Law], ...] = tuple(dict.fromkeys((own, *self._inner.laws)))

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The inner drafter's, which may change from step to step."""
        return self._inner.needs

    @property
    def flops(self) -> float | None:
        """Of the inner drafter's models; looking tokens up has none."""
        return self._inner.flops

    @property
    def explanation(self) -> str:  # type: ignore[override]
        """The inner drafter's."""
        return self._inner.explanation

    @property
    def law(self) -> Law:
        """Of tokens that the outer drafter proposes."""
        return Coupled() if Coupled in self.laws else PointMass()

    def reading_flops(self, num_tokens: int) -> float:
        """The inner drafter's."""
        return self._inner.reading_flops(num_tokens)

    def adapt(self, adapter: Any, folder: str) -> bool:
        return self._inner.adapt(adapter, folder)

    def attach(self, cache: Any) -> None:
        self._inner.attach(cache)

    def close(self) -> None:
        self._inner.close()


def inner_of(options: OuterOptions, inner: type[Any], kinds: Sequence[type[Law]], target: Any) -> Drafter:
    """Make the inner drafter.

    Args:
        options: the resolved options.
        inner: the class of ``options.inner``.
        kinds: of q that it may propose by, the best first: it is set to the first that it has.
        target: the model that is drafted for.
    Raises:
        ConfigError: it cannot be one, or lacks an option.
    """
    return inner(_settings(options, inner, kinds), target)


def _settings(options: OuterOptions, inner: type[Drafter], kinds: Sequence[type[Law]]) -> Any:
    """The inner drafter's options, and of its shapes the one that proposes by the first kind of q that it has.

    Raises:
        ConfigError: it has no such shape, or not an option that was given.
    """
    name = options.inner
    known = {each.name for each in fields(inner.Config)}
    shapes = {(each.laws or inner.laws): each.options for each in reversed(inner.declared.variants)}
    shape = next((shapes[(law,)] for law in kinds if (law,) in shapes), None)
    if shape is None:
        raise ConfigError(
            f"drafter={name!r} draws from a distribution of its own, which tokens of others next to "
            f"its own would change: use "
            "draft_model, eagle or ngram"
        )
    if inner.declared.draft_model and options.model is None:
        raise ConfigError(f"drafter '{name}' needs a draft checkpoint: give model=zoo:NAME, a folder or a hub id")
    given = {key: value for key in _GIVEN if (value := getattr(options, key)) is not None}
    if "model" not in known and "head" in known and options.model is not None and method_for(options.model) == name:
        given = {"head": given.pop("model"), **given}
    for key, value in given.items():
        if key not in known and key != "model":  # a default of the command line
            raise ConfigError(f"{key}={value!r}: drafter '{name}' has no such option; leave it out")
    try:
        return inner.Config(**shape, **{key: value for key, value in given.items() if key in known})
    except TypeError as error:
        raise ConfigError(f"drafter '{name}': {str(error).split('__init__() ')[-1]}") from None
