"""SPRINTER: a draft model continues while a small trained head approves of its tokens.

    1  read x          the draft model reads the newest token: its last hidden state h, its distribution q
    2 sample y ~ q     y is part of the draft, whatever the head decides
    3  v               pre          head(h): before y is sampled, so without y
                       drawn        head(h, q, y)
                       post         head(h) of y's own state, in the next round, which has read y
                       confidence   q(y), without a head: the baseline of a trained one
    4  stop            if v < threshold, or at max_draft tokens; else x = y and again from 1

The token at which drafting stops is the last of the draft, and the rule `sprinter` tests only this token.

Letters: M rows, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Approvals, Draft, GreedyLaws, Law, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Offers
from foretoken.core.protocols import Budget, Context
from foretoken.core.threads import one_thread
from foretoken.core.tree import ROOT
from foretoken.drafting.draft_runner import DRAFT_CHECKPOINT, DraftRunner, Rows, RunnerBuilder
from foretoken.drafting.learned_part import find
from foretoken.methods.sprinter.network import SprinterHead, facts_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.last_states import LastStates
from foretoken.options.option import Checked, Option

_STOPS = ("head", "confidence")


class SprinterDrafter(DraftRunner):
    """Drafts a chain with a second model until its head decides to stop, or the cap is reached.

    Paper:   Zhong, Teku and Tandon 2025, arXiv:2502.04557; head, threshold and cap are those of the released code.
    Exact:   chains carry the q of their samples (a point mass at temperature 0). The stop depends on the text before
             the last token (`pre`), or on that token too; the token is kept in any case and tested, so under a lossless
             verifier this is a draft model with a learned stop rule. Its own verifier, `sprinter`, is lossy.
    Differs: batches (requests stop one by one); the draft stops at the request's last token, which is then tested as
             at the cap. ``stop="confidence"`` is ours, a baseline: v = q(y).
    """

    name = "sprinter"
    laws: tuple[type[Law], ...] = (Sampled,)
    declared = Declared(
        draft_model=True, own_verifier="sprinter", learned_part="foretoken.methods.sprinter.network:SprinterHead"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of SPRINTER."""

        model: Annotated[str, DRAFT_CHECKPOINT]
        head: Annotated[
            str | Path | None,
            Option(
                "A folder of `foretoken train sprinter`; None: `sprinter` in the folder of the draft's weights. Its "
                "kind is pre, drawn or post."
            ),
        ] = None
        stop: Annotated[
            str,
            Option(
                "head: v is the head's estimate of the acceptance probability; confidence: v is the draft's own "
                "probability of the token, without a head.",
                choices=_STOPS,
            ),
        ] = "head"
        threshold: Annotated[
            float,
            Option(
                "Drafting stops if v is below this. 0 never stops, 1 nearly always: one token a step, tested.",
                least=0,
                most=1,
            ),
        ] = 0.5
        max_draft: Annotated[int, Option("Most tokens of a draft.", least=1, most=256)] = 20

        def check_together(self) -> None:
            if self.stop == "confidence" and self.head is not None:
                raise ConfigError(f"head={self.head!r} does nothing with stop=confidence: leave one of them out")

    def __init__(self, config: Config, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        super().__init__(config.model if draft is None else draft, target)
        self.config = config
        self.offers = Offers(evidence=(Approvals, GreedyLaws), length=config.max_draft)
        self.head = None if config.stop == "confidence" else find(SprinterHead, config.head, target, self.model)
        self._last = None if self.head is None else LastStates(self.model)
        if self._last is not None:
            self.span = self._last.span
        self._judges = config.stop if self.head is None else self.head.config.feature
        self._judged: dict[int, list[float]] = {}  # request -> v of its draft's judged nodes
        self._others: dict[
            int, list[Tensor]
        ] = {}  # request -> tokens that the head would approve at each node, bool [V]

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Draft one chain per request: the rounds of steps 1 to 4 above, of at most ``max_draft`` tokens.

        The draft runner performs step 1; it passes each round's rows to :meth:`_expand`, which performs steps 2 to 4.
        """
        most = self.config.max_draft
        bounded = [
            Budget(min(each.max_nodes, most), min(each.max_depth, most), evidence=each.evidence) for each in budgets
        ]
        self._judged = {context.request_id: [] for context in contexts}
        self._others = {context.request_id: [] for context in contexts}
        return super().propose(contexts, bounded)

    def judge(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[float]:
        """Step 3: v of one token for each draft: the next one (pre), or the newest one (drawn, post, confidence)."""
        if self.head is None:
            return [draft.confidence[-1] for draft in drafts]
        assert self._last is not None
        x_MD = self._last.of(rows[0].output, [each.start for each in rows])
        if self._judges == "drawn":
            q_MV = torch.stack([_drawn_from(draft, its) for draft, its in zip(drafts, rows, strict=True)])
            token_M = torch.tensor([draft.tokens[-1] for draft in drafts], device=q_MV.device)
            x_MD = torch.cat([x_MD.float(), facts_of(q_MV, token_M)], dim=-1)
        return self.head.judge(x_MD).tolist()

    def _keep_others(self, draft: RunnerBuilder, its: Rows, node: int, approved: bool) -> None:
        """Record the tokens that would be accepted untested at a node, if the verifier needs them."""
        if draft.context.params.greedy or draft.budget.evidence is not Approvals:
            return
        q_V = draft.q_rows[-1]
        if not draft.has_room(node):  # the last possible token is always tested
            others_V = torch.zeros_like(q_V, dtype=torch.bool)
        elif self.head is None:
            others_V = q_V >= self.config.threshold
        else:
            assert self._last is not None
            hidden_1D = self._last.of(its.output, [its.start])
            others_V = self.head.judge_all(hidden_1D, q_V[None])[0] >= self.config.threshold
        others_V[draft.tokens[node]] = approved and draft.has_room(node)
        self._others[draft.context.request_id].append(others_V)

    def _expand(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        """Perform steps 2 to 4 of one round; return the drafts that continue."""
        if self._judges == "post":
            return self._expand_after_reading(drafts, rows)
        # 3. pre: v before the token is sampled
        before = self.judge(drafts, rows) if self._judges == "pre" else None
        # 2. sample y ~ q
        nodes = [draft.draw(its.output, its.start, self.config.model) for draft, its in zip(drafts, rows, strict=True)]
        drawn = [i for i, node in enumerate(nodes) if node is not None]  # None: no token is possible
        # 3. drawn, confidence: v of the sampled token
        if before is not None:
            judged = [before[i] for i in drawn]
        else:
            judged = self.judge([drafts[i] for i in drawn], [rows[i] for i in drawn]) if drawn else []
        # 4. continue after approved tokens
        for draft in drafts:
            draft.frontier = []
        going_on = []
        for i, v in zip(drawn, judged, strict=True):
            draft, node = drafts[i], nodes[i]
            assert node is not None
            self._judged[draft.context.request_id].append(v)
            if before is None:
                self._keep_others(draft, rows[i], node, v >= self.config.threshold)
            if draft.has_room(node) and v >= self.config.threshold:
                draft.frontier = [node]
                going_on.append(draft)
        return going_on

    def _expand_after_reading(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        """Perform steps 3 and 4, then 2, for ``post``: its v belongs to the token that this round has read."""
        going_on = []
        # 3. v of the token that this round has read
        for draft, its, v in zip(drafts, rows, self.judge(drafts, rows), strict=True):
            # 4. stop if it is too small; the root is not judged
            if draft.frontier != [ROOT]:
                self._judged[draft.context.request_id].append(v)
                if v < self.config.threshold:
                    draft.frontier = []
                    continue
            # 2. sample y ~ q
            node = draft.draw(its.output, its.start, self.config.model)
            draft.frontier = [node] if node is not None and draft.has_room(node) else []
            if draft.frontier:
                going_on.append(draft)
        return going_on

    def _finish(self, draft: RunnerBuilder) -> Draft:
        judged = self._judged.pop(draft.context.request_id)
        others = self._others.pop(draft.context.request_id)
        if not draft.tokens:
            return NO_DRAFT
        draft.confidence[: len(judged)] = judged
        approved: list[bool | None] = [v >= self.config.threshold for v in judged]
        approved += [None] * (len(draft.tokens) - len(judged))  # post: the last token at the cap was not read
        finished = draft.finish(Sampled)
        if finished.evidence is not None:  # the verifier compares distributions and does not need approvals
            return finished
        with one_thread():  # torch's other threads would spin on the cores of the next forward
            others_NV = torch.stack(others) if others else None
        evidence = Approvals(tuple(approved), self._judges != "pre", others_NV)
        return replace(finished, evidence=evidence)


def _drawn_from(draft: RunnerBuilder, its: Rows) -> Tensor:
    """Return the distribution of a draft's newest token, float32 [V]; for greedy requests at temperature 1."""
    if not draft.context.params.greedy:
        return draft.q_rows[-1]
    logits_1V = its.output.logits_MV[its.start : its.start + 1]
    if not draft.context.laws.trivial:
        logits_1V = draft.process(logits_1V, its.output.columns)
    return torch.softmax(logits_1V[0].float(), dim=-1)
