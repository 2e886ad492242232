"""RASD: a drafter's tree and retrieved trees, pruned by draft probabilities, fused, verified in one forward.

a thread    history of the text ──► tree        datastore ──► tree
meanwhile   drafter (a draft model, an EAGLE head, …) ──► chain or tree
then        union by longest prefix ──► the draft model reads the retrieved nodes: q at each ──► the best part
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from foretoken import catalog
from foretoken.core.draft import NO_DRAFT, Coupled, Draft, Law, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome, Verifier
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict
from foretoken.drafting.draft_runner import DraftRunner
from foretoken.drafting.outer import Outer, OuterOptions, inner_of
from foretoken.methods.rasd.estimate import Estimates
from foretoken.methods.rasd.fuse import DATASTORE, DRAFT, PROMPT, Selection, Union
from foretoken.options.option import Option

_TOP = 10  # tokens of the draft model that a retrieved one must be among
_SOURCES = {PROMPT: "suffix", DATASTORE: "rest"}  # source -> the method that retrieves from it


@dataclass(slots=True)
class _Request:
    """The state of one request.

    Attributes:
        estimates: shared by all requests, or the request's own if its drafts must depend on its history only.
        num_tokens: length of its text when the union was made.
        union: of the last step.
        selection: the proposed part of the union.
        draft: the inner drafter's draft.
        scored: whether the inner drafter has rows of the whole union.
        features: the target's states of the last draft, until the verdict is known.
    """

    estimates: Estimates
    num_tokens: int = 0
    union: Union | None = None
    selection: Selection | None = None
    draft: Draft = NO_DRAFT
    scored: bool = False
    features: Features | None = None


class RasdDrafter(Outer):
    """Fuses a drafter's proposals with continuations from the prompt and from a datastore.

    Paper:   Quan et al. 2025, RASD: Retrieval-Augmented Speculative Decoding, arXiv:2503.03434 (retrieval tree from
             input and datastore, pruned by draft probabilities, fused with EAGLE-2's tree by longest prefix).
    Exact:   drafts are point masses, or coupled to the noise of ``match``: a function of the history, of fixed stores,
             and of that noise. Children of a node differ. Lossless under any lossless verifier of these draft kinds.
             A store with answers to the same seed is only for ``match`` and greedy decoding.
    Differs: the paper drops retrieved branches that the draft model finds unlikely; its code is not published, and
             others describe a test of the first token against the ten most probable. ``pruning=top`` is that test, at
             every node that was drafted. By default one more forward of the draft model gives its probability of every
             retrieved node. Logistic units combine this probability and the frequency of the continuation into one
             estimate per node, and learn from emitted tokens; the best part of the union goes to the target. An inner
             drafter other than a draft model (an EAGLE head) gives no probabilities of retrieved nodes. The prompt's
             source is ``suffix``, the datastore's ``rest``. Chains by default; the paper has 60 nodes.
    """

    name = "rasd"
    declared = Declared(
        draft_model=True,
        datastore=True,
        variants=(
            Variant(options={"coupled": True}),
            Variant(options={"coupled": False}, laws=(PointMass,)),
            Variant(options={"drafter": "ngram"}, laws=(PointMass,), one_rule=True),
        ),
    )
    laws: tuple[type[Law], ...] = (Coupled,)
    branches = True

    @dataclass(frozen=True, kw_only=True)
    class Config(OuterOptions):
        """Options of fusing."""

        datastore: Annotated[
            str | Path | None,
            Option(
                "Folder of `foretoken datastore build` with the target's tokenizer; None: the request's own text only."
            ),
        ] = None
        prompt: Annotated[bool, Option("Retrieve from the request's own text.")] = True
        retrieved: Annotated[int, Option("Maximum nodes of each source per step.", least=1, most=256)] = 16
        pruning: Annotated[
            str,
            Option(
                "How a draft model prunes retrieved nodes. learned: it reads them all, for an estimate that learns "
                "from emitted tokens; top: those outside its ten most probable tokens go, after nodes that it drafted "
                "(the paper's, as others describe it); none: by their frequency alone.",
                choices=("learned", "top", "none"),
            ),
        ] = "learned"
        min_score: Annotated[
            float,
            Option(
                "Retrieved nodes with a lower estimated probability of acceptance are pruned.",
                least=0,
                below=1,
                remedy="use 0 to prune nothing",
            ),
        ] = 0.02

        def check_together(self) -> None:
            if self.datastore is None and not self.prompt:
                raise ConfigError(
                    "prompt=False without a datastore leaves nothing to retrieve from: give datastore=DIR"
                )
            self.check_drafter("rasd", "suffix_first", *_SOURCES.values())

    @classmethod
    def settle(cls, config: Config, verifier: Verifier | None) -> Config:
        coupled = verifier is None or Coupled in verifier.laws
        return replace(config, coupled=coupled) if config.coupled is None else config

    def __init__(self, config: Config, target: Any) -> None:
        kinds = (
            (PointMass,) if config.coupled is False else (Coupled, PointMass)
        )  # one draft may have tokens of both kinds
        super().__init__(inner_of(config, catalog.find(config.inner, "drafter").load(), kinds, target))
        self.config = config
        self._scorer = self._pruner = None
        if isinstance(self._inner, DraftRunner):
            self._inner.keeps_laws = config.pruning != "none"
            self._scorer = self._inner if config.pruning == "learned" else None
            self._pruner = self._inner if config.pruning == "top" else None
        self._sources = {
            name: _source(method, config, target)
            for name, method in _SOURCES.items()
            if (config.prompt if name == PROMPT else config.datastore is not None)
        }
        self._estimates = Estimates()  # shared by all requests
        self._requests: dict[int, _Request] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retrieval")

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Retrieve on a thread while the drafter drafts; score in one more forward, and propose the best part of
        both.
        """
        retrieving = self._thread.submit(self._retrieve, contexts, budgets)
        try:
            drafts = self._inner.propose(contexts, budgets)
        finally:
            retrieved = retrieving.result()  # also after a failure: it must not run during the next call
        requests = []
        for row, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            request = self._requests.get(context.request_id)
            if request is None:
                own = Estimates() if budget.history_only else self._estimates
                request = self._requests[context.request_id] = _Request(own)
            _learn(request, context.tokens)
            request.draft, request.scored, request.features = drafts[row], False, None
            union = Union({DRAFT: drafts[row]} | {name: found[row] for name, found in retrieved.items()})
            if self._pruner is not None:
                union.pruned = self._pruner.unlikely(context.request_id, union.tree, _TOP)
            request.union = union
            request.num_tokens = len(context.tokens)
            requests.append(request)
        if self._scorer is not None:
            self._score(self._scorer, contexts, budgets, requests)
        return [self._select(each, budget) for each, budget in zip(requests, budgets, strict=True)]

    def on_forward(self, features: Sequence[Features]) -> None:
        """Forward the target's states, those of a draft after its verdict, as if they had been read without a draft."""
        plain = []
        for each in features:
            request = self._requests.get(each.context.request_id)
            if len(each.draft) and request is not None:
                request.features = each
            else:
                plain.append(each)
        self._inner.on_forward(plain)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report the outcomes to the drafter, in the numbers of its own nodes, for the nodes that it has read."""
        theirs, stood = [], []
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is None or request.selection is None or request.union is None:
                continue
            if request.features is not None:
                stood.append(request.features.standing(outcome.verdict.path))
                request.features = None
                continue
            path = [request.selection.nodes[node] for node in outcome.verdict.path]
            draft = Draft(request.union.tree) if request.scored else request.draft
            known = [node for node in path if node < len(draft)]
            tokens = outcome.tokens[: len(known) + 1]
            if len(draft):
                theirs.append(Outcome(outcome.request_id, draft, Verdict(tuple(known), tokens[-1]), tokens))
        if stood:
            self._inner.on_forward(stood)
        if theirs:
            self._inner.observe(theirs)

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        for drafter in (self._inner, *self._sources.values()):
            drafter.release(request_id)

    def _retrieve(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> dict[str, list[Draft]]:
        most = self.config.retrieved
        bounded = [
            Budget(most if each.max_nodes else 0, min(each.max_depth, most), history_only=each.history_only)
            for each in budgets
        ]
        return {name: source.propose(contexts, bounded) for name, source in self._sources.items()}

    def _score(
        self, scorer: DraftRunner, contexts: Sequence[Context], budgets: Sequence[Budget], requests: Sequence[_Request]
    ) -> None:
        unions = [request.union for request in requests]
        trees = [union.tree for union in unions if union is not None]
        found = scorer.score(contexts, budgets, trees)
        for request, union, probabilities in zip(requests, unions, found, strict=True):
            if probabilities is not None and union is not None:
                union.score(DRAFT, probabilities)
                request.scored = True

    def _select(self, request: _Request, budget: Budget) -> Draft:
        assert request.union is not None
        selection = request.union.select(request.estimates.of, budget, self.config.min_score)
        request.selection = selection
        if not selection.nodes:
            return NO_DRAFT
        return Draft(selection.tree, self.law, selection.confidence, sources=selection.sources)


def _source(method: str, config: RasdDrafter.Config, target: Any) -> Drafter:
    source_class = catalog.find(method, "drafter").load()
    options = {"datastore": config.datastore} if source_class.declared.datastore else {}
    return source_class(source_class.Config(min_score=config.min_score, **options), target)


def _learn(request: _Request, tokens: Sequence[int]) -> None:
    """Update the estimates: compare the last union with the emitted tokens, as far as they agree."""
    union, node = request.union, ROOT
    if union is None:
        return
    for token in tokens[request.num_tokens :]:
        children = union.tree.children.get(node, ())
        for child in children:
            request.estimates.learn(union.evidence[child], union.tree.tokens[child] == token)
        found = union.child(node, token)
        if found is None:
            break
        node = found
    request.union = None
