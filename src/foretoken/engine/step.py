"""The one loop: propose, verify, commit. Plain decoding is the empty draft.

work    = scheduler.next()                      requests join and leave at every step
drafts  = drafter.propose(decoding)             one token tree per request, possibly empty
logits  = target.forward(packed rows)           prompts, roots and drafts in one forward
verdict = verifier.verify(draft, laws)          per request
cache.commit(path); request.accept(tokens)      a list of tokens, cut where the request ends
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TypeVar, cast

import torch
from torch import Tensor

from foretoken.core.check import check
from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ForetokenError, RequestError
from foretoken.core.laws import Laws
from foretoken.core.protocols import BatchVerifier, Budget, BudgetedVerifier, Outcome, Plan, Seen, SelfDrafter, Verifier
from foretoken.core.tree import EMPTY_TREE
from foretoken.core.verdict import Verdict
from foretoken.engine.controller import Controller
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.resumed_forward import shared_forward
from foretoken.engine.scheduler import Scheduler
from foretoken.models.batch import PackedBatch
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.last_states import LastStates

log = logging.getLogger(__name__)
_News = TypeVar("_News", Outcome, Seen)


@dataclass(slots=True)
class _Case:
    """One request's draft before its verifier."""

    request: Request
    draft: Draft
    num_rows: int
    logits_MV: Tensor
    laws: Laws = field(init=False)
    verdict: Verdict | None = None


class Engine:
    """Runs requests to their end, several tokens per target call.

    Args:
        target: the model whose output is promised.
        recipe: drafter, verifier, and the plan of a step.
        max_slots: requests that run at once, at most.
        max_rows: rows of one forward, at most.
    """

    def __init__(self, target: LanguageModel, recipe: Recipe, *, max_slots: int, max_rows: int) -> None:
        self.target = target
        self.recipe = recipe
        self.cache = target.new_cache(max_slots)
        self.scheduler = Scheduler(self.cache, max_rows)
        self.controller = Controller()
        self._adaptive = recipe.adaptive and recipe.num_nodes > 0
        self._last: LastStates | None = None
        if (needs := getattr(recipe.verifier, "needs", None)) is not None:
            self._last = LastStates(target, normed=needs.normed)
        self._inside: SelfDrafter | None = None
        if hasattr(recipe.drafter, "sight"):
            self._inside = cast(SelfDrafter, recipe.drafter)
            self._inside.attach(self.cache)

    def add(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has a slot for it."""
        request.started = perf_counter()
        request.metrics.sparse = self.recipe.verification.sparse
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request now; what it has generated stays."""
        if not request.finished:
            request.finish_reason = "cancelled"
        self._leave(request)  # also one that ended in a step that was interrupted before it could leave

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.busy

    def step(self) -> list[Request]:
        """One round for everybody who runs. Returns the requests that got tokens or ended."""
        began = perf_counter()
        work = self.scheduler.next()
        if self.recipe.refresh is not None:
            self.recipe.refresh(self.cache, work.decoding)
        refreshed = perf_counter()
        failed: list[Request] = []
        drafts = self._propose(work.decoding, work.spare_rows, failed)
        drafted = perf_counter()

        batch = PackedBatch()
        jobs: list[tuple[Request, Draft, int]] = []  # request, draft, rows wanted
        cache = self.cache
        for request, draft in zip(work.decoding, drafts, strict=True):
            if request.finished:
                continue
            rows = 1 + len(draft)
            cache.reserve(request.slot, rows)
            batch.add_tree(request.slot, cache.lengths[request.slot], request.tokens[-1], draft.tree)
            jobs.append((request, draft, rows))
        for request, count in work.prefill:
            begin = cache.lengths[request.slot]
            last = begin + count == len(request.tokens)
            cache.reserve(request.slot, count)
            batch.add_chunk(request.slot, begin, request.tokens[begin : begin + count], wanted=int(last))
            jobs.append((request, NO_DRAFT, int(last)))
        if not jobs:
            return failed

        packed = perf_counter()
        output = self._compute(jobs, batch)
        computed = perf_counter()

        touched, tokens, nodes = self._decide(jobs, batch, output)
        ended = perf_counter()

        # Times are shared evenly by the requests of the step; a request alone gets its own exactly.
        share = 1.0 / len(jobs)
        draft_time, verify_time = (drafted - refreshed) * share, (computed - packed) * share
        other_time = (ended - began) * share - draft_time - verify_time
        for request, _, _ in jobs:
            metrics = request.metrics
            metrics.draft_seconds += draft_time
            metrics.verify_seconds += verify_time
            metrics.other_seconds += other_time
        if self._adaptive and not work.prefill:
            self.controller.measure(
                rows=len(batch),
                nodes=nodes,
                tokens=tokens,
                draft=drafted - refreshed,
                verify=computed - packed,
                total=ended - began,
            )
        return failed + touched

    def _compute(self, jobs: list[tuple[Request, Draft, int]], batch: PackedBatch) -> Output:
        """The target's forward; with the last hidden states of the wanted rows, if a verifier will look at a draft."""
        plan = self.recipe.plan(self.cache, batch)
        drafts = [draft for _, draft, _ in jobs]
        last = self._last if any(map(len, drafts)) else None
        if self._inside is None:
            if last is None:
                output = self.target.forward(batch, plan)
            else:
                output = self.target.forward(batch, plan, span=replace(last.span, tap_rows=batch.wanted))
            self._count_experts(jobs, batch, plan)
            return output
        output, pieces = shared_forward(
            self.target, self.cache, batch, drafts, plan, self._inside.sight, last=last is not None
        )
        seen = [
            Seen(request, piece.begin, draft, piece.hidden, piece.best)
            for (request, draft, _), piece in zip(jobs, pieces, strict=True)
        ]
        self._tell([request for request, _, _ in jobs], seen, self._inside.see)
        self._count_experts(jobs, batch, plan)
        return output

    def _count_experts(self, jobs: list[tuple[Request, Draft, int]], batch: PackedBatch, plan: Plan) -> None:
        """Note how many different experts a sparse verification read."""
        found = getattr(plan, "num_experts", None)
        if found is None:
            return
        for (request, _, _), segment in zip(jobs, batch.segments, strict=True):
            if segment.verification:
                request.metrics.experts_sum += found
                request.metrics.experts_steps += 1

    def _propose(self, decoding: list[Request], spare_rows: int, failed: list[Request]) -> list[Draft]:
        """Ask the drafter; if it fails, ask for one request at a time, so that only the culprit ends."""
        recipe = self.recipe
        if recipe.num_nodes == 0 or not decoding:
            return [NO_DRAFT] * len(decoding)
        nodes = min(recipe.num_nodes, spare_rows // len(decoding))
        patience = None
        if self._adaptive:
            self.controller.plan(len(decoding))
            patience = self.controller
        # The last token of a request never needs a draft behind it: one token is always emitted.
        budgets = []
        for request in decoding:
            depth = min(request.room - 1, nodes)
            # A tree may be wider than deep: all of its rows must find room in the cache.
            most = min(nodes, self.cache.max_length - len(request.tokens)) if depth else 0
            budgets.append(Budget(most, depth, patience, recipe.compares_laws))
        try:
            return self._ask(decoding, budgets)
        except Exception as error:
            if len(decoding) == 1:
                self._fail(decoding[0], error)
                failed.append(decoding[0])
                return [NO_DRAFT]
        drafts = []
        for request, budget in zip(decoding, budgets, strict=True):
            try:
                drafts += self._ask([request], [budget])
            except Exception as error:
                self._fail(request, error)
                failed.append(request)
                drafts.append(NO_DRAFT)
        # asked alone, they may have been begun to different depths; one forward goes on from one of them
        depth = next((draft.begun.depth for draft in drafts if draft.begun is not None), 0)
        return [NO_DRAFT if draft.begun is not None and draft.begun.depth != depth else draft for draft in drafts]

    def _ask(self, requests: list[Request], budgets: list[Budget]) -> list[Draft]:
        """The drafter's proposals, refused if they would break the forward of everybody, or bias what is emitted."""
        drafts = self.recipe.drafter.propose(requests, budgets)
        for request, draft, budget in zip(requests, drafts, budgets, strict=True):
            tokens = draft.tree.tokens
            if tokens and (len(tokens) > budget.max_nodes or min(tokens) < 0 or max(tokens) >= self.target.vocab_size):
                raise RequestError(
                    f"drafter '{self.recipe.method}' proposed {len(tokens)} tokens, {min(tokens)} to {max(tokens)}: "
                    f"at most {budget.max_nodes} below {self.target.vocab_size} may be"
                )
            if tokens:
                self._check_law(request, draft)
        return drafts

    def _check_law(self, request: Request, draft: Draft) -> None:
        """Refuse a draft whose law is not of the declared kinds (the verifier was chosen for those), or is no law."""
        drafter, kind = self.recipe.drafter, type(draft.law)
        # at temperature 0 the kind does not matter: every rule walks along the argmax
        if not request.params.greedy and kind not in drafter.laws:
            declared = ", ".join(law.__name__ for law in drafter.laws)
            raise RequestError(
                f"drafter '{self.recipe.method}' proposed a draft of kind {kind.__name__}, but declares {declared}"
            )
        try:
            check(draft.law, draft.tree, self.target.vocab_size)
        except ValueError as error:
            raise RequestError(
                f"drafter '{self.recipe.method}' proposed a draft whose law ({kind.__name__}) cannot be right: {error}"
            ) from error

    def _decide(
        self, jobs: list[tuple[Request, Draft, int]], batch: PackedBatch, output: Output
    ) -> tuple[list[Request], int, int]:
        """Verify every request, commit, and append. Returns requests that got tokens, tokens and nodes in all."""
        touched: list[Request] = []
        judged: list[Request] = []
        outcomes: list[Outcome] = []
        num_tokens = num_nodes = row = 0
        cases: list[_Case] = []
        for job, segment in zip(jobs, batch.segments, strict=True):
            request, draft, count = job
            rows = slice(row, row + count)
            row += count
            if count == 0:  # a chunk in the middle of a prompt
                self.cache.commit(request.slot, range(segment.num_rows))
                continue
            touched.append(request)
            cases.append(_Case(request, draft, segment.num_rows, output.logits_MV[rows]))
            try:
                if not all(map(math.isfinite, output.peaks[rows])):
                    raise RequestError(
                        "the model's logits are NaN or infinite: its weights or this dtype do not hold up"
                    )
                cases[-1].laws = self._laws(request, draft, output, rows)
            except Exception as error:
                self._fail(request, error)
                cases.pop()
        self._judge(cases)
        for case in cases:
            request, draft, verdict = case.request, case.draft, case.verdict
            if verdict is None:
                continue
            try:
                tokens = [draft.tree.tokens[node] for node in verdict.path]
                tokens.append(verdict.extra)
                path_rows = [0, *(node + 1 for node in verdict.path)]
                self.cache.commit(request.slot, range(case.num_rows) if draft is NO_DRAFT else path_rows)
                taken = request.accept(tokens)
                if request.logprobs is not None:
                    top = request.params.logprobs or 0
                    request.logprobs += _logprobs(case.logits_MV[path_rows[:taken]], tokens[:taken], top)
            except Exception as error:
                self._fail(request, error)
                continue
            metrics = request.metrics
            metrics.num_steps += 1
            metrics.num_tokens += taken
            for distortion in verdict.distortions[:taken]:  # one by one, as the rule counted them against its budget
                metrics.distortion_sum += distortion
            metrics.kl_sum += sum(verdict.divergences[:taken])
            num_tokens += taken
            if len(draft):
                num_nodes += len(draft)
                metrics.count_draft(draft.tree.depths, min(len(verdict.path), taken))
                judged.append(request)
                outcomes.append(Outcome(request.request_id, draft, verdict, tuple(tokens)))
                if self._adaptive:
                    self.controller.learn(draft, verdict)
        if outcomes:
            self._tell(judged, outcomes, self.recipe.drafter.observe)
        for request in touched:
            if request.finished:
                self._leave(request)
        return touched, num_tokens, num_nodes

    def _tell(self, requests: list[Request], news: Sequence[_News], learn: Callable[[Sequence[_News]], None]) -> None:
        """Let the drafter learn; if it fails, from one request at a time, so that only the culprit ends."""
        try:
            learn(news)
            return
        except Exception as error:
            if len(news) == 1:
                if not requests[0].finished:
                    self._fail(requests[0], error)
                return
        for request, each in zip(requests, news, strict=True):
            self._tell([request], [each], learn)

    def _laws(self, request: Request, draft: Draft, output: Output, rows: slice) -> Laws:
        """The target's laws at every node; they are processed where a rule looks at them."""
        maker = request.laws
        start = len(request.tokens)
        logits_MV = output.logits_MV[rows]
        hidden = None
        if self._last is not None and len(draft):
            hidden = partial(self._last.of, output, range(rows.start, rows.stop))
        if maker.trivial:
            best = output.best[rows]
            positions = range(start, start + len(best))
            return Laws(
                logits_MV, greedy=True, positions=positions, best=best, hidden=hidden, stop_ids=request.stop_ids
            )
        tree = draft.tree or EMPTY_TREE
        laws = Laws(
            logits_MV,
            greedy=request.params.greedy,
            positions=(start, *(start + depth for depth in draft.tree.depths)),
            process=lambda rows: maker.process(
                logits_MV[rows.start : rows.stop], tree, range(rows.start - 1, rows.stop - 1)
            ),
            hidden=hidden,
            stop_ids=request.stop_ids,
        )
        # What leaves no token anywhere (bias, min_tokens) leaves none at the root.
        if not math.isfinite(laws.logits_at(0).max()):
            raise RequestError("no token is possible here: logit_bias and min_tokens forbid all of them")
        return laws

    def _judge(self, cases: Sequence[_Case]) -> None:
        """Let each case's rule decide, the cases of a rule together where it can; fills in the verdicts."""
        groups: dict[int, tuple[Verifier, list[_Case]]] = {}
        for case in cases:
            verifier = self.recipe.verifier_for(case.draft, case.request.params)
            groups.setdefault(id(verifier), (verifier, []))[1].append(case)
        for verifier, group in groups.values():
            if len(group) > 1 and hasattr(verifier, "verify_batch"):
                try:
                    verdicts = cast(BatchVerifier, verifier).verify_batch(
                        [case.draft for case in group],
                        [case.laws for case in group],
                        [case.request.streams for case in group],
                    )
                except Exception:  # one by one, so that only the culprit ends
                    log.debug("verifying one by one", exc_info=True)
                else:
                    for case, verdict in zip(group, verdicts, strict=True):
                        case.verdict = verdict
                    continue
            for case in group:
                try:
                    draft, laws, streams = case.draft, case.laws, case.request.streams
                    if hasattr(verifier, "verify_within"):
                        lossy = cast(BudgetedVerifier, verifier)
                        case.verdict = lossy.verify_within(draft, laws, streams, case.request.metrics)
                    else:
                        case.verdict = verifier.verify(draft, laws, streams)
                except Exception as error:
                    self._fail(case.request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request with its error; the others go on."""
        if not isinstance(error, ForetokenError):
            log.exception("request %d failed", request.request_id, exc_info=error)
        request.finish_reason = "error"
        request.error = str(error) or type(error).__name__
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.slot >= 0 or request in self.scheduler.waiting:
            request.metrics.seconds = perf_counter() - request.started
            self.scheduler.remove(request)
            self.recipe.drafter.release(request.request_id)


def _logprobs(logits_MV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of each row's token and its ``top`` best tokens."""
    logp_MV = torch.log_softmax(logits_MV.float(), dim=-1)
    values, ids = logp_MV.topk(min(top, logp_MV.shape[-1]), dim=-1) if top else (logp_MV[:, :0], logp_MV[:, :0].long())
    return [
        TokenLogprob(token, float(logp_V[token]), tuple(zip(row_ids, row_values, strict=True)))
        for token, logp_V, row_ids, row_values in zip(tokens, logp_MV, ids.tolist(), values.tolist(), strict=True)
    ]
