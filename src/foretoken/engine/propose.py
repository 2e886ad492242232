"""Call the drafter: compute the budgets, check the proposals, and find the request that a failure belongs to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretoken.core.check import check
from foretoken.core.draft import NO_DRAFT, Draft, PointMass
from foretoken.core.errors import RequestError
from foretoken.core.protocols import Budget, Context
from foretoken.core.stop_rule import StopRule
from foretoken.core.tree import ROOT, TokenTree
from foretoken.drafters.copies_first import COPIES
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.history_only import ROW_COST, OwnPastRule
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError, OverlapRule
from foretoken.engine.faults import Faults
from foretoken.engine.features.feature_backlog import FeatureBacklog
from foretoken.engine.recipe import MAX_NODES, Recipe
from foretoken.engine.request import Request
from foretoken.models.language_model import LanguageModel


class Proposer:
    """Calls one engine's drafter for all requests together.

    Args:
        recipe: the drafter, and how long its drafts may be.
        target: its sizes, which drafts must fit.
        max_length: of the target's cache, in rows.
        controller: selects the requests that get drafts, if the recipe may skip drafting, and sets an adaptive draft
            length; except for requests with their own rule.
        own_nodes: draft nodes of a request with ``history_only``.
        own_rows: rows after the root that are reserved for such a request: its nodes and their probes.
        node_cost: of one drafted and verified token, in plain steps.
        faults: ends a request if its draft fails.
        backlog: steps that the drafter sees before it is called.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: LanguageModel,
        max_length: int,
        controller: Controller,
        faults: Faults,
        backlog: FeatureBacklog,
        *,
        own_nodes: int,
        own_rows: int,
        node_cost: float,
    ) -> None:
        self._recipe = recipe
        self._target = target
        self._max_length = max_length
        self._controller = controller
        self._faults = faults
        self._backlog = backlog
        self._own_nodes = own_nodes
        self._own_rows = own_rows
        self._node_cost = node_cost

    def kept(self, request: Request) -> int:
        """Rows for drafts that are reserved for a request, whichever others run."""
        return self._own_rows if request.history_only else 0

    def propose(
        self, decoding: Sequence[Request], spare_rows: int, failed: list[Request], *, queued: bool = False
    ) -> list[Draft]:
        """The drafter's drafts, or copies of predicted outputs; without either, the tokens that a constraint forces.

        A copy that promises a token or more goes first, since it costs no drafting, any other where the drafter has
        nothing. Arguments and result are those of :meth:`_drafts`.
        """
        copies = self._copies(decoding, spare_rows)
        if copies:
            drafts = self._beside_copies(copies, decoding, spare_rows, failed, queued)
        else:
            drafts = self._drafts(decoding, spare_rows, failed, queued)
        spare = spare_rows - sum(map(len, drafts))
        for place, request in enumerate(decoding):
            constraint = request.laws.constraint
            if constraint is None or len(drafts[place]) or request.finished or not self._may_force(request):
                continue
            limit = min(request.tokens_left - 1, spare, self._max_length - len(request.tokens))
            forced = constraint.forced(limit)
            if forced:
                drafts[place] = Draft(
                    TokenTree(forced), PointMass(), sources=("grammar",) * len(forced), by_engine=True
                )
                spare -= len(forced)
        if self._recipe.drafter.offers.portfolio is not None:
            usual = "batch" if spare_rows < len(decoding) else self._recipe.drafter.offers.portfolio or "slower"
            for request, draft in zip(decoding, drafts, strict=True):
                request.off = "" if len(draft) else self._why_off(request, usual)
        return drafts

    def _beside_copies(
        self,
        copies: dict[int, Draft],
        decoding: Sequence[Request],
        spare_rows: int,
        failed: list[Request],
        queued: bool,
    ) -> list[Draft]:
        """The drafts of a step in which some requests have copies of their predictions."""
        first = {place for place, copy in copies.items() if copy.promise >= 1.0}
        others = [request for place, request in enumerate(decoding) if place not in first]
        taken = sum(self._own_rows if decoding[place].history_only else len(copies[place]) for place in first)
        found = iter(self._drafts(others, spare_rows - taken, failed, queued))
        drafts = [copies[place] if place in first else next(found) for place in range(len(decoding))]
        for place in copies.keys() - first:
            if not len(drafts[place]) and sum(map(len, drafts)) + len(copies[place]) <= spare_rows:
                drafts[place] = copies[place]
        return drafts

    def _why_off(self, request: Request, usual: str) -> str:
        """The code of why a request has no draft, see docs/methods/auto.md.

        Args:
            usual: the code where nothing of the request itself is the reason.
        """
        if request.max_draft == 0:
            return "switched_off"
        if min(request.tokens_left - 1, self._max_length - len(request.tokens)) < 1:
            return "context"
        seeded = usual == "slower" and request.params.repeatable and not request.history_only
        return "seeded" if seeded and self._recipe.promise != "same stream" else usual

    def _copies(self, decoding: Sequence[Request], spare_rows: int) -> dict[int, Draft]:
        """Copies of the predictions of requests, by place; empty ones are left out."""
        found = {}
        spare = spare_rows - sum(map(self.kept, decoding))
        for place, request in enumerate(decoding):
            if request.prediction is None or request.finished:
                continue
            limit = self._own_nodes if request.history_only else min(self._recipe.num_nodes or MAX_NODES, spare)
            limit = min(limit, request.tokens_left - 1, self._max_length - len(request.tokens))
            limit = limit if request.max_draft is None else min(limit, request.max_draft)
            copy = _within(request.prediction.draft(request.tokens, request.num_prompt, limit), request)
            if len(copy):
                found[place] = copy
                spare -= 0 if request.history_only else len(copy)
        return found

    def _may_force(self, request: Request) -> bool:
        """Whether a draft of forced tokens may be verified: the rule accepts point masses, and the drafter, which gets
        no message about it, reads the accepted tokens by itself."""
        recipe = self._recipe
        kind = recipe.verifier is None or request.params.greedy or PointMass in recipe.drafter.laws
        informed = recipe.evidence_for(request.params) is not None or recipe.drafter.needs.hidden_layers is not None
        return kind and not informed and not recipe.takes_turns and request.max_draft != 0 and not request.history_only

    def _drafts(self, decoding: Sequence[Request], spare_rows: int, failed: list[Request], queued: bool) -> list[Draft]:
        """Ask the drafter; if it fails, ask for one request at a time, so that only the culprit ends.

        The random streams of the others are rewound, so that they draw the same numbers again.

        Args:
            decoding: the requests to draft for.
            spare_rows: rows of the step in addition to the roots.
            failed: requests that end here are added.
            queued: whether others wait for their places.
        Returns:
            one draft for each of ``decoding``.
        """
        if self._recipe.num_nodes == 0 or not decoding:
            return [NO_DRAFT] * len(decoding)
        rules: dict[int, StopRule | None] = {}
        if self._recipe.may_skip_drafting:
            newest = max(request.request_id for request in decoding)
            if not self._controller.rests(len(decoding), newest):
                rules = self._chosen(decoding, queued)
            if not rules and not any(request.history_only for request in decoding):
                return [NO_DRAFT] * len(decoding)  # nearly every step, where drafting does not pay
        budgets = self._budgets(decoding, spare_rows, rules)
        if not any(budget.limit for budget in budgets):
            return [NO_DRAFT] * len(decoding)
        self._backlog.show()
        marks = [(request, request.streams.mark()) for request in decoding if request.params.repeatable]
        try:
            drafts = self._ask(decoding, budgets)
            self._controller.proposed(decoding, drafts)
            return drafts
        except Exception as error:
            if len(decoding) == 1:
                self._faults.fail(decoding[0], error)
                failed.append(decoding[0])
                return [NO_DRAFT]
        for request, mark in marks:
            request.streams.rewind(mark)
        drafts = []
        for request, budget in zip(decoding, budgets, strict=True):
            try:
                drafts += self._ask([request], [budget])
            except Exception as error:
                self._faults.fail(request, error)
                failed.append(request)
                drafts.append(NO_DRAFT)
        # Drafts of separate calls may resume at different depths, and one forward continues from one depth only.
        depth = next((draft.resume.depth for draft in drafts if draft.resume is not None), 0)
        return [NO_DRAFT if draft.resume is not None and draft.resume.depth != depth else draft for draft in drafts]

    def node_budgets(self, decoding: Sequence[Request], spare_rows: int) -> list[int]:
        """Nodes that each request may draft if all of them get drafts."""
        num_own = sum(request.history_only for request in decoding)
        shared = self._shared(num_own, len(decoding) - num_own, spare_rows)
        limits = [self._own_nodes if request.history_only else shared for request in decoding]
        most = [
            limit if each.max_draft is None else each.max_draft for limit, each in zip(limits, decoding, strict=True)
        ]
        return list(map(min, limits, most))

    def ahead(
        self, shadows: Sequence[AssumedContext], limits: Sequence[int], stopped: Callable[[], bool]
    ) -> list[DraftOrError]:
        """Let the drafter continue pending drafts; a request that it fails for gets the error in place of a draft."""
        budgets = [self._budget_ahead(shadow, limit, stopped) for shadow, limit in zip(shadows, limits, strict=True)]
        if not any(budget.max_nodes for budget in budgets):
            return [NO_DRAFT] * len(shadows)
        marks = [(shadow.streams, shadow.streams.mark()) for shadow in shadows if shadow.params.repeatable]
        try:
            return [*self._ask_for_chains(shadows, budgets)]
        except Exception as error:
            if len(shadows) == 1:
                return [error]
        for streams, mark in marks:
            streams.rewind(mark)
        found: list[DraftOrError] = []
        for shadow, budget in zip(shadows, budgets, strict=True):
            try:
                found += self._ask_for_chains([shadow], [budget])
            except Exception as error:
                found.append(error)
        return found

    def _budget_ahead(self, shadow: AssumedContext, limit: int, stopped: Callable[[], bool]) -> Budget:
        """The budget of one shadow: the guess is the next root, not a draft row; only the tokens after it are."""
        depth = min(shadow.tokens_left - 1, limit)
        most = min(limit, self._max_length - len(shadow.tokens)) if depth > 0 else 0
        rule: StopRule | None = None
        if self._recipe.adaptive:
            request = shadow.request
            request.ahead_rule = request.ahead_rule or OwnPastRule(ROW_COST)
            rule = OverlapRule(request.ahead_rule, _never if shadow.history_only else stopped)
        return Budget(max(0, most), max(0, depth), rule, history_only=shadow.history_only)

    def _ask_for_chains(self, shadows: Sequence[AssumedContext], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self._ask(shadows, budgets)
        if not all(draft.tree.is_chain and draft.resume is None for draft in drafts):
            raise RequestError(
                f"drafter '{self._recipe.method}' drafts ahead, but proposed more than a chain of tokens: nothing can "
                "be cut off its front; use executor='serial'"
            )
        return drafts

    def _shared(self, num_own: int, sharing: int, spare_rows: int) -> int:
        """Nodes for each of the requests that share the rows which are not reserved."""
        return min(self._recipe.num_nodes, max(0, spare_rows - self._own_rows * num_own) // max(1, sharing))

    def _chosen(self, decoding: Sequence[Request], queued: bool) -> dict[int, StopRule | None]:
        """The controller's rules for the requests that it drafts for, by request; None: by a second drafter only."""
        both = self._recipe.drafter.offers.portfolio is not None
        shared = [each for each in decoding if (both or each.shown) and not each.history_only and each.max_draft != 0]
        rules = self._controller.choose(shared, len(decoding), queued=queued)
        if not self._controller.drafts and not any(rules):
            return {}
        return {
            each.request_id: rule
            for each, rule in zip(shared, rules, strict=True)
            if rule is not None or self._controller.second(each) is not None
        }

    def _budgets(
        self, decoding: Sequence[Request], spare_rows: int, rules: Mapping[int, StopRule | None]
    ) -> list[Budget]:
        recipe = self._recipe
        num_own = sum(request.history_only for request in decoding)
        sharing = len(rules) if recipe.may_skip_drafting else len(decoding) - num_own
        shared_nodes = self._shared(num_own, sharing, spare_rows)
        both = recipe.may_skip_drafting and recipe.drafter.offers.portfolio == ""
        budgets = []
        for request in decoding:
            own = request.history_only
            if own:
                nodes = self._own_nodes
            elif recipe.may_skip_drafting and request.request_id not in rules:
                nodes = 0
            else:
                nodes = shared_nodes
            if request.max_draft is not None:
                nodes = min(nodes, request.max_draft)
            stop_rule: StopRule | None = None
            if recipe.adaptive and own:
                stop_rule = request.own_rule = request.own_rule or OwnPastRule(self._node_cost)
            elif recipe.adaptive:
                stop_rule = rules.get(request.request_id)
            # The last token of a request never needs a draft after it: one token of the target is always emitted,
            # unless the drafter may write that one, too.
            depth = min(request.tokens_left - (not recipe.takes_turns), nodes)
            # A tree may be wider than deep: all of its rows must fit into the cache.
            most = min(nodes, self._max_length - len(request.tokens)) if depth else 0
            budget = Budget(most, depth, stop_rule, recipe.evidence_for(request.params), own)
            if both and not own:
                second, found = Budget(0, 0), self._controller.second(request)
                if found is not None:
                    second = replace(budget, stop_rule=found[0], rate=found[1])
                budget = replace(budget, max_nodes=most if stop_rule is not None else 0, second=second)
            if request.source == COPIES:
                budget = replace(budget, second=Budget(0, 0))
            elif request.source is not None:
                budget = replace(budget, max_nodes=0, second=budget if budget.second is None else budget.second)
            budgets.append(budget)
        return budgets

    def _ask(self, requests: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """The drafter's proposals, refused if they would break the forward of all requests, or bias the output."""
        drafts = self._recipe.drafter.propose(requests, budgets)
        if not _are_drafts(drafts, len(requests)):
            raise RequestError(
                f"drafter '{self._recipe.method}' gave {drafts!r:.80}: propose gives a list of one Draft for each of "
                f"{len(requests)} requests"
            )
        for request, draft, budget in zip(requests, drafts, budgets, strict=True):
            tokens = draft.tree.tokens
            if not tokens:
                continue
            for token in tokens:
                if type(token) is not int:
                    raise RequestError(
                        f"drafter '{self._recipe.method}' proposed the token {token!r}: tokens must be integers"
                    )
            if len(tokens) > budget.limit or min(tokens) < 0 or max(tokens) >= self._target.vocab_size:
                raise RequestError(
                    f"drafter '{self._recipe.method}' proposed {len(tokens)} tokens, {min(tokens)} to {max(tokens)}: "
                    f"at most {budget.limit} below {self._target.vocab_size} may be"
                )
            confidence = draft.confidence
            if confidence and not (len(confidence) == len(tokens) and all(0.0 <= each <= 1.0 for each in confidence)):
                raise RequestError(
                    f"drafter '{self._recipe.method}' gave the confidences {confidence} for {len(tokens)} tokens: "
                    "one probability for each, or none at all"
                )
            self._check_company(draft)
            self._check_resume(draft)
            self._check_law(request, draft)
        depths = {draft.resume.depth for draft in drafts if draft.resume is not None}
        if len(depths) > 1:
            raise RequestError(
                f"drafter '{self._recipe.method}' left drafts that resume at different depths, {sorted(depths)}: one "
                "forward goes on from one of them"
            )
        return [_within(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def _check_company(self, draft: Draft) -> None:
        """Refuse what could not be counted of a draft, once its tokens have been emitted."""
        sources, moved = draft.sources, draft.moved_bytes
        named = type(sources) is tuple and all(type(each) is str for each in sources)
        if not named or len(sources) not in (0, len(draft)):
            raise RequestError(
                f"drafter '{self._recipe.method}' named the sources {sources} of {len(draft)} tokens: one word for "
                "each, or none at all"
            )
        if type(moved) is not int or moved < 0:
            raise RequestError(f"drafter '{self._recipe.method}' moved {moved!r} bytes: an integer from 0 up")

    def _check_resume(self, draft: Draft) -> None:
        """Refuse hidden states that the target's layers cannot go on from."""
        resume, target = draft.resume, self._target
        if resume is None:
            return
        method, hidden_TD, depth = self._recipe.method, resume.hidden_TD, resume.depth
        if hidden_TD.shape != (1 + len(draft), target.width):
            raise RequestError(
                f"drafter '{method}' left hidden states of the shape {list(hidden_TD.shape)} with {len(draft)} tokens: "
                f"a resume point has one row for the root and one for each token, each {target.width} wide"
            )
        if not hidden_TD.is_floating_point():
            raise RequestError(f"drafter '{method}' left hidden states of {hidden_TD.dtype}: they must be floating")
        if type(depth) is not int or not 0 <= depth <= target.num_layers:
            raise RequestError(
                f"drafter '{method}' resumes at depth {depth!r}: it must be an integer from 0 to {target.num_layers}"
            )

    def _check_law(self, request: Context, draft: Draft) -> None:
        """Refuse a draft if its distribution is not of the declared kinds (the verifier was chosen for those), or is
        not a distribution.
        """
        drafter, kind = self._recipe.drafter, type(draft.law)
        # At temperature 0 the kind does not matter: every rule walks along the argmax.
        if not request.params.greedy and kind not in drafter.laws:
            declared = ", ".join(law.__name__ for law in drafter.laws)
            raise RequestError(
                f"drafter '{self._recipe.method}' proposed a draft of kind {kind.__name__}, but declares {declared}"
            )
        try:
            check(draft.law, draft.tree, self._target.vocab_size)
        except ValueError as error:
            raise RequestError(
                f"drafter '{self._recipe.method}' proposed a draft with a distribution "
                f"({kind.__name__}) that cannot be right: {error}"
            ) from error


def _are_drafts(found: Any, count: int) -> bool:
    """Whether a drafter, perhaps of a third party, returned one draft for each request."""
    if not isinstance(found, Sequence) or len(found) != count:
        return False
    return all(isinstance(each, Draft) and isinstance(each.tree, TokenTree) for each in found)


def _within(draft: Draft, request: Context) -> Draft:
    """A draft without the nodes that the request's constraint forbids: verifying them would be wasted.

    Of point masses only: nodes drawn from q stay, since leaving out drawn nodes would change their distribution. q has
    passed through the same constraint, so that hardly any of its nodes is forbidden.
    """
    constraint, tree = request.laws.constraint, draft.tree
    if constraint is None or not isinstance(draft.law, PointMass) or draft.resume is not None or not len(draft):
        return draft
    place, kept = {ROOT: ROOT}, list[int]()
    for node, parent in enumerate(tree.parents):
        if parent in place and constraint.possible([tree.tokens[each] for each in tree.path_to(node)]):
            place[node] = len(kept)
            kept.append(node)
    if len(kept) == len(tree):
        return draft
    if not kept or draft.evidence is not None:
        return NO_DRAFT
    return Draft(
        TokenTree([tree.tokens[node] for node in kept], [place[tree.parents[node]] for node in kept]),
        draft.law,
        tuple(draft.confidence[node] for node in kept if draft.confidence),
        sources=tuple(draft.sources[node] for node in kept if draft.sources),
    )


def _never() -> bool:
    return False
