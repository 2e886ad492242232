"""The one loop: propose, verify, commit. Plain decoding is the empty draft.

    work    = scheduler.next()                      requests join and leave at every step
    drafts  = drafter.propose(decoding)             one token tree per request, possibly empty
    logits  = target.forward(packed rows)           prompts, roots and drafts in one forward
    verdict = verifier.verify(draft, laws)          per request
    cache.commit(path); request.accept(tokens)      a list of tokens, cut where the request ends
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ForetokenError, RequestError
from foretoken.core.laws import Laws
from foretoken.core.protocols import Budget, Outcome, Plan
from foretoken.core.tree import EMPTY_TREE
from foretoken.core.verdict import Verdict
from foretoken.engine.controller import Controller
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.scheduler import Scheduler
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.language_model import LanguageModel
from foretoken.plans.dense import DensePlan

log = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end, several tokens per target call.

    Args:
        target: the model whose output is promised.
        recipe: drafter and verifier.
        max_slots: requests that run at once, at most.
        max_rows: rows of one forward, at most.
        plan: makes the compute plan of a step.
    """

    def __init__(
        self,
        target: LanguageModel,
        recipe: Recipe,
        *,
        max_slots: int,
        max_rows: int,
        plan: Callable[[KVCache, PackedBatch], Plan] = DensePlan,
    ) -> None:
        self.target = target
        self.recipe = recipe
        self.cache = target.new_cache(max_slots)
        self.scheduler = Scheduler(self.cache, max_rows)
        self.controller = Controller()
        self._plan = plan

    def add(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has a slot for it."""
        request.started = perf_counter()
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request now; what it has generated stays."""
        if not request.finished:
            request.finish_reason = "cancelled"
            self._leave(request)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.busy

    def step(self) -> list[Request]:
        """One round for everybody who runs. Returns the requests that got tokens or ended."""
        began = perf_counter()
        work = self.scheduler.next()
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
        logits_MV = self.target.forward(batch, self._plan(cache, batch)).logits_MV
        computed = perf_counter()

        touched, tokens, nodes = self._decide(jobs, batch, logits_MV)
        ended = perf_counter()

        # Times are shared evenly by the requests of the step; a request alone gets its own exactly.
        share = 1.0 / len(jobs)
        draft_time, verify_time = (drafted - began) * share, (computed - packed) * share
        other_time = (ended - began) * share - draft_time - verify_time
        for request, _, _ in jobs:
            metrics = request.metrics
            metrics.draft_seconds += draft_time
            metrics.verify_seconds += verify_time
            metrics.other_seconds += other_time
        if self.recipe.adaptive and not work.prefill:
            self.controller.measure(
                rows=len(batch),
                nodes=nodes,
                tokens=tokens,
                draft=drafted - began,
                verify=computed - packed,
                total=ended - began,
            )
        return failed + touched

    def _propose(self, decoding: list[Request], spare_rows: int, failed: list[Request]) -> list[Draft]:
        """Ask the drafter; if it fails, ask for one request at a time, so that only the culprit ends."""
        recipe = self.recipe
        if recipe.num_nodes == 0 or recipe.method == "none" or not decoding:
            return [NO_DRAFT] * len(decoding)
        nodes = min(recipe.num_nodes, spare_rows // len(decoding))
        patience = None
        if recipe.adaptive:
            self.controller.plan()
            patience = self.controller
        # The last token of a request never needs a draft behind it: one token is always emitted.
        budgets = []
        for request in decoding:
            depth = min(request.room - 1, nodes)
            budgets.append(Budget(nodes if depth else 0, depth, patience))
        try:
            return self.recipe.drafter.propose(decoding, budgets)
        except Exception as error:
            if len(decoding) == 1:
                self._fail(decoding[0], error)
                failed.append(decoding[0])
                return [NO_DRAFT]
        drafts = []
        for request, budget in zip(decoding, budgets, strict=True):
            try:
                drafts += self.recipe.drafter.propose([request], [budget])
            except Exception as error:
                self._fail(request, error)
                failed.append(request)
                drafts.append(NO_DRAFT)
        return drafts

    def _decide(
        self, jobs: list[tuple[Request, Draft, int]], batch: PackedBatch, logits_MV: Tensor
    ) -> tuple[list[Request], int, int]:
        """Verify every request, commit, and append. Returns requests that got tokens, tokens and nodes in all."""
        with torch.inference_mode():
            # max, not argmax: the value costs nothing and is NaN if any logit of the row is
            values, indices = logits_MV.max(dim=-1)
            peaks: list[float] = values.tolist()
            best: list[int] = indices.tolist()
            touched: list[Request] = []
            outcomes: list[Outcome] = []
            num_tokens = num_nodes = row = 0
            for job, segment in zip(jobs, batch.segments, strict=True):
                request, draft, count = job
                rows = slice(row, row + count)
                row += count
                if count == 0:  # a chunk in the middle of a prompt
                    self.cache.commit(request.slot, range(segment.num_rows))
                    continue
                try:
                    if any(peak != peak for peak in peaks[rows]):
                        raise RequestError("the model's logits are NaN: its weights or this dtype do not hold up")
                    verdict = self._verify(request, draft, logits_MV[rows], best[rows])
                except Exception as error:
                    self._fail(request, error)
                    touched.append(request)
                    continue
                tokens = [draft.tree.tokens[node] for node in verdict.path]
                tokens.append(verdict.extra)
                if draft is NO_DRAFT:
                    self.cache.commit(request.slot, range(segment.num_rows))
                else:
                    self.cache.commit(request.slot, [0, *(node + 1 for node in verdict.path)])
                if request.logprobs is not None:
                    path_rows = [0, *(node + 1 for node in verdict.path)]
                    logprobs = _logprobs(logits_MV[rows][path_rows], tokens, request.params.logprobs or 0)
                taken = request.accept(tokens)
                if request.logprobs is not None:
                    request.logprobs += logprobs[:taken]
                metrics = request.metrics
                metrics.num_steps += 1
                metrics.num_tokens += taken
                metrics.distortion_sum += verdict.distortion
                num_tokens += taken
                if len(draft):
                    num_nodes += len(draft)
                    metrics.count_draft(draft.tree.depths, min(len(verdict.path), taken))
                    outcomes.append(Outcome(request.request_id, draft, verdict, tuple(tokens)))
                    if self.recipe.adaptive:
                        self.controller.learn(draft, verdict)
                touched.append(request)
            if outcomes:
                self.recipe.drafter.observe(outcomes)
            for request in touched:
                if request.finished:
                    self._leave(request)
        return touched, num_tokens, num_nodes

    def _verify(self, request: Request, draft: Draft, logits_MV: Tensor, best: Sequence[int]) -> Verdict:
        verifier = self.recipe.verifier_for(draft, request.params)
        maker = request.laws
        start = len(request.tokens)
        if maker.trivial:
            laws = Laws(logits_MV, greedy=True, positions=range(start, start + len(best)), best=best)
        else:
            nodes = range(-1, len(draft))
            positions = (start, *(start + depth for depth in draft.tree.depths))
            processed = maker.process(logits_MV, draft.tree or EMPTY_TREE, nodes)
            laws = Laws(processed, greedy=request.params.greedy, positions=positions)
        return verifier.verify(draft, laws, request.streams)

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
