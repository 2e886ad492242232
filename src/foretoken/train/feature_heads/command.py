"""What the commands that train a head over hidden states share: where text comes from, and the run that is then served.

Without torch until it runs, as help imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import WIDEST, Continued, Judged, Loop, Session

if TYPE_CHECKING:
    from foretoken.train.recipe import Recipe

TARGET = Option("The model to draft for: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Loop, Judged):
    """Options of every such command; a subclass adds the head's shape, and ``own_words`` with its own default."""

    target: Annotated[str, TARGET]
    features: Annotated[
        Path | None, Option("Train from what foretoken train features stored instead.", metavar="DIR")
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target writes itself; default: 0.5.")] = None
    own_words_else = 0.5

    @property
    def share(self) -> float:
        """Of the text, or of its last stage, what the target writes; stored features are of text that there is."""
        if self.features is not None:
            return 0.0
        return self.own_words_else if self.own_words is None else self.own_words

    def check_together(self) -> None:
        if self.features is not None and (self.data is not None or self.corpus or self.own_words is not None):
            raise ConfigError("--features holds its text already: leave out --data, --corpus and --own-words")


@dataclass(frozen=True, kw_only=True)
class UnrolledOptions(HeadOptions, Continued):
    """Options of a head of decoder layers, which training unrolls as deep as it is to draft (unroll.py)."""

    draft_vocab_size: Annotated[int | None, Option("Tokens that it scores; default: 2048.", metavar="N", least=1)] = (
        None
    )
    mlp_width: Annotated[
        int | None,
        Option("Channels of a layer's MLP; default: a quarter of the target's.", metavar="N", least=32, most=WIDEST),
    ] = None
    steps: Annotated[int, Option("Steps that training unrolls.", metavar="N", least=1, most=64)] = 4


def train_and_serve(
    config: HeadOptions,
    session: Session,
    *,
    title: str,
    recipe: Recipe,
    run: Callable[..., Any],
    chain: Mapping[str, Any],
    served: str | None = None,
) -> dict[str, Any]:
    """Train a head, and let the engine draft chains with it for the held-out prompts.

    Args:
        title: of the progress, as in "training an EAGLE head".
        recipe: of the run.
        run: (sources, out, ``prompts``, ``features``, what a loop takes, ``start`` if one is given) -> the record.
        chain: a ``speculative_config`` that drafts as many tokens a step as training unrolled.
        served: the checkpoint that drafts; None: the one that was trained for.
    Returns:
        the record, with ``acceptance`` added.
    Raises:
        ForetokenError: see train/feature_heads/run.py.
    """
    from foretoken.train import acceptance
    from foretoken.train.recipe import add_to_record

    prompts = session.prompts(config.suite)
    text = config.sources(recipe.sources) if config.features is None else []
    start = {"start": config.start} if isinstance(config, Continued) else {}
    with session.training(title) as report:
        run(
            text,
            config.out,
            prompts=prompts,
            features=config.features,
            **start,
            **config.loop(recipe.bounds, report, session),
        )
    return add_to_record(config.out, {"acceptance": acceptance.measure(served or config.target, chain, prompts)})
