"""The one loop: propose, verify, commit. Plain decoding is the empty draft.

work    = schedule()                  requests join and leave at every step
drafts  = propose(work)               one token tree per request, possibly empty
round   = pack(work, drafts)          prompts, roots, drafts and what verifiers probe, in one batch
          forward(round)              the target, once
          verify(round)               one verdict per request: a path and one more token
          commit(round)               a list of tokens each, cut where the request ends

An executor (executors/) runs these verbs in its order. Asking the drafter is in propose.py, deciding in decide.py, and
what happens to a request that fails in faults.py.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter, process_time

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.metrics import Emitted
from foretoken.core.needs import HiddenLayers
from foretoken.core.protocols import Features, Outcome, Plan
from foretoken.core.tree import EMPTY_TREE, TokenTree
from foretoken.drafters.copies_first import COPIES
from foretoken.engine import executors
from foretoken.engine.decide import Decider
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.history_only import ROW_COST
from foretoken.engine.draft_length.portfolio import Portfolio
from foretoken.engine.draft_length.record import Record
from foretoken.engine.executors.executor import Executor
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError
from foretoken.engine.faults import Faults
from foretoken.engine.features.feature_backlog import FeatureBacklog
from foretoken.engine.features.resumed_forward import resumed_forward
from foretoken.engine.prediction import SOURCE
from foretoken.engine.prefix_files import PrefixFiles
from foretoken.engine.prefixes import Prefixes
from foretoken.engine.propose import Proposer
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.round import Job, Round
from foretoken.engine.scheduler import Scheduler, Work
from foretoken.forward.batch import PackedBatch
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel
from foretoken.models.last_states import LastStates

MAX_PROMPT_ROWS_CPU = 128  # rows of prompts in a step: a CPU reads no row faster for more of them
_READ_AT_ONCE = 1.0 / 8.0  # of a token's time in decoding that it takes among many, until that is measured
_NOTHING = HiddenLayers((), 0)  # drafts have resume points, but their drafter wants to see nothing


class Engine:
    """Runs requests to their end, several tokens per target call.

    Args:
        target: the model; its output is promised.
        recipe: drafter, verifier, and the plan of a step.
        max_slots: requests that run at once, at most.
        max_rows: rows of one forward, at most.
        prefix_bytes: how large the cache may grow so that prefixes can be reused; None: nothing is reused. A recipe
            with an approximate plan reuses nothing either.
        prefix_files: prefixes on disk; None: there are none.
    """

    def __init__(
        self,
        target: LanguageModel,
        recipe: Recipe,
        *,
        max_slots: int,
        max_rows: int,
        prefix_bytes: int | None = None,
        prefix_files: PrefixFiles | None = None,
    ) -> None:
        self.target = target
        self.recipe = recipe
        self.cache = target.new_cache(max_slots)
        if recipe.drafter.branches and not self.cache.can_branch:
            raise ConfigError(
                f"method '{recipe.method}' proposes trees, and the cache of model '{target.name}' cannot branch: "
                "let the method propose chains"
            )
        self.prefixes: Prefixes | None = None
        if prefix_bytes is not None and recipe.reuses_prefixes:
            self.prefixes = Prefixes(self.cache, prefix_bytes, recipe.drafter, prefix_files)
        self.scheduler = Scheduler(
            self.cache,
            max_rows,
            self._reserved_rows,
            drafted_first=recipe.takes_turns,
            prefixes=self.prefixes,
            enough=MAX_PROMPT_ROWS_CPU if target.device.type == "cpu" else None,
        )
        reading = recipe.drafter.reading_flops(1) / target.reading_flops(1)
        offers = recipe.drafter.offers
        foretell = recipe.drafter.first_confidence if offers.foretells and recipe.adaptive else None
        copying = recipe.adaptive and recipe.drafter.flops == 0.0

        def new_controller() -> Controller:
            if offers.portfolio == "":
                return Portfolio(reading * _READ_AT_ONCE, COPIES, recipe.drafter.first_confidence)
            return Controller(reading * _READ_AT_ONCE, copying=copying, foretell=foretell)

        self._computes_here = target.device.type == "cpu" and recipe.executor == "serial"
        self._began = self._drafting = 0.0  # processor time: when this step began, and what its drafts took
        self._record = Record(target, recipe)
        self.controller = self._record.taught(new_controller)
        self.executor: Executor = executors.NAMED[recipe.executor]()
        self.lock = threading.RLock()  # one step at a time, whoever asks for it; requests change inside of it only
        last_state = None if recipe.verifier is None else recipe.verifier.needs.last_state
        self._last = None if last_state is None else LastStates(target, normed=last_state.normed)
        self._faults = Faults(self.scheduler, recipe.drafter)
        share = max(0, max_rows // max_slots - 1)
        own_nodes = min(recipe.num_nodes, share)
        self._probes = recipe.verifier is not None and recipe.verifier.offers.probes
        if recipe.takes_turns and own_nodes < 1:
            raise ConfigError(
                f"max_rows_per_step={max_rows} with max_num_seqs={max_slots}: method '{recipe.method}' needs at least "
                "two rows for every request; raise one or lower the other"
            )
        self._backlog = FeatureBacklog(recipe.drafter, self._faults)
        self._proposer = Proposer(
            recipe,
            target,
            self.cache.max_length,
            self.controller,
            self._faults,
            self._backlog,
            own_nodes=own_nodes,
            own_rows=share if self._probes else own_nodes,
            node_cost=ROW_COST + reading,
        )
        alone = target.native_decoder is not None
        self._decider = Decider(recipe, target.vocab_size, self._last, self._faults, alone=alone)
        recipe.drafter.attach(self.cache)

    def add(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has a slot for it."""
        request.started = perf_counter()
        request.metrics.sparse = not self.recipe.plan.exact
        request.history_only = self.recipe.history_only(request.params)
        with self.lock:
            self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request now; its output so far stays."""
        with self.lock:
            if not request.finished:
                request.finish_reason = "cancelled"
            self._faults.leave(request)  # also one that ended in a step that was interrupted before it could leave

    def close(self) -> None:
        """End threads that an executor has started, and processes of the drafter's."""
        with self.lock:
            self.executor.close()
            self._record.write(self.controller)
            if self.prefixes is not None:
                self.prefixes.store()
            self.recipe.drafter.close()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.busy

    def step(self) -> list[Request]:
        """Run one round for all running requests. Returns the requests that got tokens or ended."""
        with self.lock:
            return self.executor.step(self)

    # ------------------------------------------------------------------ the verbs

    def schedule(self) -> Work:
        """Select the requests of this step, and finish deferred work of an earlier plan."""
        self._began = process_time()
        work = self.scheduler.next()
        if self.prefixes is not None and self.prefixes.joined:
            self._show_again(work, self.prefixes)
        self.recipe.plan.before_step(self.cache, work.decoding)
        return work

    def propose(self, work: Work) -> list[Draft]:
        """One draft for each request that decodes, in order, checked against its budget; empty where there is none."""
        began = process_time()
        drafts = self._proposer.propose(work.decoding, work.spare_rows, work.failed, queued=work.queued)
        self._drafting = process_time() - began
        return drafts

    def node_budgets(self, work: Work) -> list[int]:
        """Rows after the root that each request that decodes may have in this step, in order."""
        return self._proposer.node_budgets(work.decoding, work.spare_rows)

    def ahead(
        self, shadows: Sequence[AssumedContext], limits: Sequence[int], stopped: Callable[[], bool]
    ) -> list[DraftOrError]:
        """What the drafter proposes after the pending drafts of requests; may run on another thread than the rest."""
        return self._proposer.ahead(shadows, limits, stopped)

    def expect(self, current: Round, shadows: Sequence[AssumedContext], ahead: Sequence[DraftOrError]) -> None:
        """Hand the guesses to their jobs. Where nothing was pending, a failure of the drafter ends its request."""
        jobs = {job.request.request_id: job for job in current.jobs}
        for shadow, found in zip(shadows, ahead, strict=True):
            job = jobs.get(shadow.request_id)
            if job is None:
                continue
            if isinstance(found, Draft):
                job.guess = found.part(0, 1) if len(found) else None
            elif not len(shadow.pending):  # else the drafter is called again at the root after this step
                self._faults.fail(shadow.request, found)

    def pack(self, work: Work, drafts: Sequence[Draft]) -> Round:
        """Reserve the rows of this step in the cache and put them into one batch."""
        batch, cache = PackedBatch(), self.cache
        current = Round(batch, [], work.failed)
        spare = work.spare_rows
        if any(drafts):
            taken = zip(map(len, drafts), map(self._reserved_rows, work.decoding), strict=True)
            spare -= sum(map(max, taken))
        for request, draft in zip(work.decoding, drafts, strict=True):
            if request.finished:
                continue
            try:
                # a seed's probes do not depend on the other requests
                kept = self._reserved_rows(request) if self._probes else 0
                tree = self._with_probes(request, draft, kept - len(draft) if kept else spare)
                rows = 1 + len(tree)
                cache.reserve(request.slot, rows)
            except Exception as error:
                self._faults.fail(request, error)
                current.failed.append(request)
                continue
            spare -= 0 if kept else len(tree) - len(draft)
            batch.add_tree(request.slot, cache.lengths[request.slot], request.tokens[-1], tree, request.adapter)
            current.jobs.append(Job(request, draft, rows, rows))
        sees = self.recipe.drafter.needs.hidden_layers is not None
        for request, count in work.prefill:
            begin = cache.lengths[request.slot]
            if not begin and sees:
                self._decide_shown(request)
            last = begin + count == len(request.tokens)
            cache.reserve(request.slot, count)
            read = 0 if request.prompt_logprobs is None else count - last
            chunk = request.tokens[begin : begin + count]
            batch.add_chunk(request.slot, begin, chunk, wanted=read + last, adapter=request.adapter)
            current.jobs.append(Job(request, NO_DRAFT, count, int(last), prompt=True, read=read))
        return current

    def forward(self, current: Round) -> None:
        """Compute the batch by the recipe's plan, and give a drafter the hidden states that it needs.

        The last hidden states of the wanted rows are kept if a verifier will look at a draft.
        """
        jobs, batch = current.jobs, current.batch
        plan = self.recipe.plan(self.cache, batch)
        drafter = self.recipe.drafter
        needed = drafter.needs.hidden_layers if any(job.request.shown for job in jobs) else None
        depths = () if needed is None else needed.depths
        if not any(len(job.draft) or (job.prompt and depths) for job in jobs):
            span = Span(0, self.target.num_layers, taps=depths) if depths else None
            current.output = self.target.forward(batch, plan, span=span)
            if depths:
                rows = batch.positions, current.output.best, current.output.hidden
                self._backlog.keep([job.request for job in jobs], *rows)
            self._count_what_was_read(current, plan)
            return
        if needed is None and any(job.draft.resume is not None for job in jobs):
            needed = _NOTHING
        last = self._last if any(len(job.draft) for job in jobs) else None
        if needed is None:
            span = None if last is None else replace(last.span, tap_rows=batch.wanted)
            current.output = self.target.forward(batch, plan, span=span)
        else:
            self._backlog.show()
            drafts = [job.draft for job in jobs]
            current.output, pieces = resumed_forward(
                self.target, self.cache, batch, drafts, plan, needed, last=last is not None
            )
            features = [
                Features(job.request, piece.begin, job.draft, piece.hidden, piece.best)
                for job, piece in zip(jobs, pieces, strict=True)
                if job.request.shown
            ]
            if self.prefixes is not None and needed.last is None:
                for job, piece in zip(jobs, pieces, strict=True):
                    if job.prompt and job.request.shown:
                        self.prefixes.shown.add(job.request.slot, piece.begin, piece.hidden)
            for job, each in zip([job for job in jobs if job.request.shown], features, strict=True):
                job.features = each if job.draft.by_engine else None
            own = [each for each in features if not each.draft.by_engine]
            if own:
                requests = [job.request for job in jobs if job.request.shown and not job.draft.by_engine]
                self._faults.tell(requests, own, drafter.on_forward)
        self._count_what_was_read(current, plan)

    def verify(self, current: Round) -> None:
        """Let the recipe's rule decide every draft of the round; a fault ends its own request only."""
        self._decider.decide(current)

    def commit(self, current: Round) -> list[Request]:
        """Keep accepted rows, append the tokens, inform the drafter. Returns the requests that got tokens or ended."""
        tested: list[Job] = []
        outcomes: list[Outcome] = []
        choosing = self.controller.drafts
        for job in current.jobs:
            if job.request.finished:
                continue
            if job.wanted == 0:  # a chunk in the middle of a prompt
                self.cache.commit(job.request.slot, range(job.num_rows))
                if self.prefixes is not None:
                    self.prefixes.read(job.request)
                continue
            verdict, draft, count = job.verdict, job.draft, len(job.draft)
            assert verdict is not None
            tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.extra]
            try:
                taken = self._commit_one(job, tokens, verdict.path)
            except Exception as error:
                self._faults.fail(job.request, error)
                continue
            job.request.metrics.count_step(verdict, taken)
            accepted = min(len(verdict.path) + job.guessed, taken)
            wrote = tuple(draft.sources[node] for node in verdict.path[:accepted]) if draft.sources else ()
            elapsed, refused = perf_counter() - job.request.started, max(0, count - accepted)
            job.request.metrics.emitted.append(Emitted(elapsed, taken, accepted, refused, wrote))
            job.request.metrics.num_moved_bytes += draft.moved_bytes
            if job.features is not None and not job.request.finished:
                features = job.features.standing(verdict.path)
                self._faults.tell([job.request], [features], self.recipe.drafter.on_forward)
            if job.request.prediction is not None and (not count or SOURCE in draft.sources):
                job.request.prediction.learn(draft, verdict)
            for rule in (job.request.own_rule, job.request.ahead_rule):
                if rule is not None and not draft.by_engine:
                    rule.learn(draft, verdict)
            drafted = not draft.by_engine and (count > 0 or job.guess is not None)
            if drafted or choosing:
                self.controller.count(job.request, draft if drafted else NO_DRAFT, taken - 1 if drafted else 0)
            if job.request.off and not count and not job.prompt:
                off_steps = job.request.metrics.off_steps
                off_steps[job.request.off] = off_steps.get(job.request.off, 0) + 1
            if count or job.guess is not None:
                current.num_nodes += count
                current.num_accepted += taken - 1
                depths = draft.tree.depths if job.guess is None else tuple(range(1, count + 2))
                job.request.metrics.count_draft(depths, accepted)
                job.request.metrics.count_sources(draft.sources, verdict.path[:taken])
                if self.recipe.adaptive and job.request.own_rule is None and count and not draft.by_engine:
                    self.controller.compare(job.request, draft, verdict)
            if (count and not draft.by_engine) or self.recipe.takes_turns:
                tested.append(job)
                outcomes.append(Outcome(job.request.request_id, draft, verdict, tuple(tokens)))
        if outcomes:
            self._faults.tell([job.request for job in tested], outcomes, self.recipe.drafter.observe)
        touched = [job.request for job in current.jobs if job.wanted or job.request.finished]
        for request in touched:
            if request.finished:
                self.controller.ended(request.num_output)
                self._record.keep(self.controller)
                self._faults.leave(request)
        return touched

    def account(self, current: Round, *, draft: float, verify: float, total: float) -> None:
        """Take in how long the parts of the step took, in seconds.

        Times are shared evenly by the requests of the step; a request alone gets its own exactly.
        """
        share = 1.0 / len(current.jobs)
        other = (total - draft - verify) * share
        for job in current.jobs:
            metrics = job.request.metrics
            metrics.draft_seconds += draft * share
            metrics.verify_seconds += verify * share
            metrics.other_seconds += other
        decoding = [job.request for job in current.jobs if not job.prompt]
        may_skip_drafting = self.recipe.may_skip_drafting and not self.controller.resting and not current.ahead
        may_skip_drafting = may_skip_drafting and not any(job.draft.by_engine for job in current.jobs)
        if may_skip_drafting and decoding and not any(each.history_only for each in decoding):
            busy = process_time() - self._began
            if self._computes_here and busy < total:  # the rest of the time went to other processes
                draft, total = self._drafting, busy
            self.controller.measure(
                num_requests=len(decoding),
                nodes=current.num_nodes,
                draft=draft,
                total=total,
                prompts=len(decoding) < len(current.jobs),
            )

    # ------------------------------------------------------------------ inside

    def _decide_shown(self, request: Request) -> None:
        if self.recipe.may_skip_drafting and not request.history_only:
            request.shown = not self.controller.hopeless(request, len(self.scheduler.running))

    def _show_again(self, work: Work, prefixes: Prefixes) -> None:
        """Show the drafter what requests begin with that have not read it themselves."""
        joined, prefixes.joined = prefixes.joined, []
        for request in joined:
            self._decide_shown(request)
            for begin, hidden in prefixes.shown.pieces(request.slot) if request.shown else ():
                if not request.finished:
                    told = Features(request, begin, NO_DRAFT, hidden, [])
                    self._faults.tell([request], [told], self.recipe.drafter.on_forward)
        work.failed += [request for request in joined if request.finished]
        work.decoding = [request for request in work.decoding if not request.finished]
        work.prefill = [(request, count) for request, count in work.prefill if not request.finished]

    def _reserved_rows(self, request: Request) -> int:
        return self._proposer.kept(request)

    def _with_probes(self, request: Request, draft: Draft, spare: int) -> TokenTree:
        """The draft's tree followed by its verifier's probes, if all of them fit; else the draft's tree alone.

        They fit within the step's ``spare`` rows, the cache's length and a layer's sliding window, which would hide the
        draft from its probe. They do not fit into a forward from the draft's resume point: the layers below it were run
        for the draft's own rows only.
        """
        if not len(draft):
            return EMPTY_TREE
        verifier = self.recipe.verifier_for(draft, request.params)
        probed = verifier.probe(draft, request)
        if probed is None:
            return draft.tree
        check_probe(draft.tree, probed, verifier.name, self.target.vocab_size)
        fits = self.cache.lengths[request.slot] + 1 + len(probed) <= self.cache.max_length
        if self.target.window is not None:
            fits = fits and 1 + max(probed.depths) <= self.target.window
        return probed if fits and len(probed) - len(draft) <= spare and draft.resume is None else draft.tree

    def _count_what_was_read(self, current: Round, plan: Plan) -> None:
        """Note how much of its prefix a sparse verification read, and how many different experts."""
        if self.recipe.plan.exact:
            return
        experts, shares = plan.num_experts, plan.prefix_read
        for index, (job, segment) in enumerate(zip(current.jobs, current.batch.segments, strict=True)):
            if job.prompt:
                continue
            metrics = job.request.metrics
            metrics.prefix_rows += segment.prefix
            metrics.prefix_rows_read += segment.prefix * (1.0 if shares is None else shares[index])
            if experts is not None:
                metrics.experts_sum += experts
                metrics.experts_steps += 1

    def _commit_one(self, job: Job, tokens: list[int], path: Sequence[int]) -> int:
        """Keep one request's rows and append its tokens; how many of them were taken."""
        request = job.request
        path_rows = [0, *(node + 1 for node in path)]
        self.cache.commit(request.slot, range(job.num_rows) if job.prompt else path_rows)
        taken = request.accept(tokens)
        if request.logprobs is not None:
            assert job.logits_MV is not None
            top = request.params.logprobs or 0
            request.logprobs += TokenLogprob.of_rows(job.logits_MV[path_rows[:taken]], tokens[:taken], top)
        return taken


def check_probe(tree: TokenTree, probed: TokenTree, verifier: str, vocab_size: int) -> None:
    """Refuse a verifier's probe unless it leaves the draft in front of it as it is, and has tokens of the vocabulary.

    Raises:
        RequestError: the first nodes are not the draft's, or a token is none.
    """
    count = len(tree)
    if probed.tokens[:count] != tree.tokens or probed.parents[:count] != tree.parents:
        raise RequestError(f"verifier '{verifier}' probes another draft than the one that was proposed")
    tokens = probed.tokens[count:]
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise RequestError(
            f"verifier '{verifier}' probes tokens from {min(tokens)} to {max(tokens)}: they must be below {vocab_size}"
        )
