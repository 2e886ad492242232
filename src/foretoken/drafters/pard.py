"""PARD: a draft model trained on mask tokens fills a whole draft in one forward.

    rows      … b  c  m  m  m      c is the root, m the mask token; causal, at consecutive positions
    draft           1  2  3  4     row k gives the distribution of draft token k, given the text alone

The rows of mask tokens are dropped, and accepted tokens are read again, as tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from foretoken.core.draft import Draft, Law, Sampled
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.needs import Declared, Variant
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_runner import DRAFT_CHECKPOINT, DRAFT_DTYPE, DraftRunner, Rows, RunnerBuilder
from foretoken.forward.batch import PackedBatch
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Checked, Option

MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")  # of config.json


class PardDrafter(DraftRunner):
    """Drafts a chain with one forward of the draft model.

    Paper:   PARD, arXiv:2504.18583.
    Exact:   each token is drawn from the distribution of its own row, which the draft carries (a point mass at
             temperature 0); no distribution depends on the drafted tokens, but for penalties, which follow the path.
             Lossless under any lossless verifier of these draft kinds.
    Differs: the adaptive controller may end a draft before its next token is drawn, depending on q alone.
    """

    name = "pard"
    laws: tuple[type[Law], ...] = (Sampled,)
    branches = False
    declared = Declared(draft_model=True, variants=(Variant(options={"mask_token": 6, "slots": 4}),))

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of PARD."""

        model: Annotated[str, DRAFT_CHECKPOINT]
        slots: Annotated[int, Option("Most tokens of a draft.", least=1, most=64)] = 12
        mask_token: Annotated[
            int | None, Option("Id of the mask token; None: `pard_token` of the checkpoint's config.", least=0)
        ] = None
        draft_vocab: Annotated[str | Path | None, draft_vocabulary.OPTION] = None
        dtype: Annotated[str | None, DRAFT_DTYPE] = None

    def __init__(self, config: Config, target: LanguageModel) -> None:
        self.config = config
        super().__init__(config.model, target, top=1, draft_vocab=config.draft_vocab, dtype=config.dtype)
        self.offers = replace(self.offers, ahead=config.draft_vocab is None)
        said = (getattr(self.model.config, key, None) for key in MASK_KEYS)
        mask = config.mask_token if config.mask_token is not None else next((each for each in said if each), None)
        if mask is None:
            raise ModelError(
                f"'{self.model.name}' has no {MASK_KEYS[0]} in its config.json, so it is no PARD checkpoint: use "
                "method='draft_model', or name the token with mask_token"
            )
        if type(mask) is not int or not 0 <= mask < self.model.vocab_size:
            raise ConfigError(f"mask_token={mask!r}: '{self.model.name}' has {self.model.vocab_size} tokens")
        self._mask = mask

    def _forward_roots(self, drafts: Sequence[RunnerBuilder]) -> list[Rows]:
        """Read the text up to the root, and a mask token for every further token of the draft."""
        batch, counts = PackedBatch(), []
        for draft in drafts:
            begin, budget = self.cache.lengths[draft.state.slot], draft.budget
            rest, count = draft.text[begin:], min(self.config.slots, budget.max_nodes, budget.max_depth)
            self.cache.reserve(draft.state.slot, len(rest) + count - 1)
            batch.add_chunk(draft.state.slot, begin, [*rest, *[self._mask] * (count - 1)], wanted=count)
            counts.append(count)
        output, start, found = self._forward(batch), 0, []
        for draft, count in zip(drafts, counts, strict=True):
            state, tokens = draft.state, draft.text
            begin = self.cache.lengths[state.slot]
            self.cache.commit(state.slot, range(len(tokens) - begin))
            state.tokens += tokens[begin:]
            found.append(self._rows(draft, output, start, start + count))
            start += count
        return found

    def _expand(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        """Draw the whole chain; nothing goes on."""
        for draft, its in zip(drafts, rows, strict=True):
            for row in range(its.start, its.stop):
                node = draft.draw(its.output, row, self.config.model, if_it_pays=True)
                if node is None or not draft.has_room(node):
                    break
                draft.frontier = [node]
        return []

    def _finish(self, draft: RunnerBuilder) -> Draft:
        return draft.finish(Sampled)
