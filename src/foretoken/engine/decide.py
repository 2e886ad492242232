"""Deciding drafts: the target's distributions at every node, the recipe's rule, and the check of what the rule
decided.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from foretoken.core.errors import NothingFits, RequestError
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.threads import threads_for
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict
from foretoken.engine.faults import Faults
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import TokenLogprob
from foretoken.engine.round import Job, Round
from foretoken.models.language_model import Output
from foretoken.models.last_states import LastStates

log = logging.getLogger(__name__)


class Decider:
    """One engine's verifier, applied to all requests of a step.

    Args:
        recipe: which rule decides which draft.
        vocab_size: of the target.
        last_states: takes the target's last hidden states from a forward, for a rule that asks for them; else None.
        faults: ends requests with distributions or verdicts that fail.
        alone: whether torch works on one thread here: its others would spin on the cores of the next forward.
    """

    def __init__(
        self, recipe: Recipe, vocab_size: int, last_states: LastStates | None, faults: Faults, *, alone: bool = False
    ) -> None:
        self._recipe = recipe
        self._vocab_size = vocab_size
        self._last_states = last_states
        self._faults = faults
        self._alone = alone

    def decide(self, current: Round) -> None:
        """Fill in the distributions and the verdict of every job that has logits; one that fails ends its request."""
        count = 0 if self._alone else len(current.batch.wanted) * self._vocab_size
        sampled = not all(job.request.laws.trivial for job in current.jobs)
        with threads_for(count) if sampled else nullcontext():
            self._decide(current)

    def _decide(self, current: Round) -> None:
        output = current.output
        assert output is not None
        row = 0
        open_jobs: list[Job] = []
        for job in current.jobs:
            first = row + job.read
            rows = slice(first, first + job.wanted)
            row = rows.stop
            if job.request.finished or not (job.read or job.wanted):
                continue
            try:
                if job.read:
                    _read_prompt(job, output.logits_MV[first - job.read : first])
                if not job.wanted:
                    continue
                damaged = [place for place, peak in enumerate(output.peaks[rows]) if not math.isfinite(peak)]
                if damaged and damaged[0] == 0:
                    raise RequestError(
                        "the model's logits are NaN or infinite: its weights or this dtype do not hold up"
                    )
                job.damaged = frozenset(place - 1 for place in damaged)
                self._fill_in(job, output, rows.start)
            except Exception as error:
                self._faults.fail(job.request, error)
            else:
                open_jobs.append(job)
        self._ask(open_jobs)
        self._finish(open_jobs)
        for job in open_jobs:
            if job.request.finished:
                continue
            try:
                job.verdict = _before_damage(self._check(job.verdict, job), job)
            except Exception as error:
                job.verdict = None
                self._faults.fail(job.request, error)

    def _fill_in(self, job: Job, output: Output, first: int) -> None:
        """The target's distributions at every node; they are processed where a rule looks at them."""
        request, draft = job.request, job.draft
        maker = request.laws
        start = len(request.tokens)
        num_nodes = len(draft)
        rows = slice(first, first + 1 + num_nodes)
        logits_MV = output.logits_MV[rows]
        probes_PV = output.logits_MV[rows.stop : first + job.wanted] if rows.stop < first + job.wanted else None
        if job.damaged:  # any distribution will do there: its tokens are not emitted
            logits_MV = logits_MV.clone()
            logits_MV[[1 + node for node in job.damaged if node < num_nodes]] = 0.0
            probes_PV = probes_PV if max(job.damaged) < num_nodes else None
        job.logits_MV = logits_MV
        hidden = None
        if self._last_states is not None and num_nodes:
            hidden = partial(self._last_states.of, output, range(rows.start, rows.stop))
        if maker.trivial:
            best = output.best[rows]
            job.laws = Laws(
                logits_MV,
                greedy=True,
                positions=range(start, start + len(best)),
                best=best,
                hidden=hidden,
                stop_ids=request.stop_ids,
                probe_logits_PV=probes_PV,
            )
            return
        tree = draft.tree
        job.laws = laws = Laws(
            logits_MV,
            greedy=request.params.greedy,
            positions=(start, *(start + depth for depth in tree.depths)),
            process=lambda raw_MV, rows: maker.process(raw_MV, tree, range(rows.start - 1, rows.stop - 1)),
            support=lambda raw_1V, row: maker.support(raw_1V, tree, row - 1),
            hidden=hidden,
            stop_ids=request.stop_ids,
            probe_logits_PV=probes_PV,
        )
        # What leaves no token anywhere (bias, min_tokens) leaves none at the root.
        if maker.may_forbid and not math.isfinite(laws.logits_at(0).max()):
            raise NothingFits(
                "no token is possible here: logit_bias, min_tokens, structured_outputs, bad_words and "
                "allowed_token_ids forbid all of them"
            )

    def _ask(self, jobs: Sequence[Job]) -> None:
        """Let each job's rule decide, the jobs of a rule together where it can; fills in the verdicts."""
        groups: dict[int, tuple[Verifier, list[Job]]] = {}
        for job in jobs:
            verifier = self._recipe.verifier_for(job.draft, job.request.params)
            groups.setdefault(id(verifier), (verifier, []))[1].append(job)
        for verifier, group in groups.values():
            if len(group) > 1 and verifier.offers.batches:
                marks = [(each, each.streams.mark()) for job in group if (each := job.request).params.repeatable]
                try:
                    verdicts = verifier.verify_batch(
                        [job.draft for job in group],
                        [_laws(job) for job in group],
                        [job.request.streams for job in group],
                    )
                    if len(verdicts) != len(group):
                        raise ValueError(f"{len(verdicts)} verdicts for {len(group)} drafts")
                except Exception:  # one by one, so that only the culprit ends
                    log.debug("verifying one by one", exc_info=True)
                    for request, mark in marks:
                        request.streams.rewind(mark)
                else:
                    for job, verdict in zip(group, verdicts, strict=True):
                        job.verdict = verdict
                    continue
            for job in group:
                request = job.request
                try:
                    job.verdict = verifier.verify_within(job.draft, _laws(job), request.streams, request.metrics)
                except Exception as error:
                    self._faults.fail(request, error)

    def _finish(self, jobs: Sequence[Job]) -> None:
        """Couple the extra token to the guess, where there is one and all before it stood."""
        for job in jobs:
            guess, request = job.guess, job.request
            if guess is None or job.verdict is None or not isinstance(job.verdict, Verdict) or not job.stood:
                continue
            try:
                rule = self._recipe.verifier_for(guess, request.params)
                job.verdict = rule.finish(job.verdict, guess, _laws(job), request.streams, request.metrics)
            except Exception as error:
                self._faults.fail(request, error)

    def _check(self, verdict: object, job: Job) -> Verdict:
        """The verdict, unless it is no path of the draft and one token of the vocabulary.

        Raises:
            RequestError: it would have committed rows or emitted tokens that there are not.
        """
        if not isinstance(verdict, Verdict) or not isinstance(verdict.path, tuple):
            raise RequestError(f"{self._rule_of(job)} gave no verdict, but {verdict!r}")
        tree, node = job.draft.tree, ROOT
        for child in verdict.path:
            if type(child) is not int or not 0 <= child < len(tree) or tree.parents[child] != node:
                raise RequestError(
                    f"{self._rule_of(job)} accepted the nodes {verdict.path}: they are no path of the draft"
                )
            node = child
        if type(verdict.extra) is not int or not 0 <= verdict.extra < self._vocab_size:
            raise RequestError(
                f"{self._rule_of(job)} emitted the token {verdict.extra!r}: it must be an integer from 0 to "
                f"{self._vocab_size - 1}"
            )
        for each in (*verdict.distortions, *verdict.divergences):
            if not isinstance(each, float | int) or not each >= 0.0:
                raise RequestError(f"{self._rule_of(job)} gave the distortion {each!r}: it must be a number from 0 up")
        if math.inf in verdict.distortions:  # a divergence may be infinite, a variation lies below 1
            raise RequestError(f"{self._rule_of(job)} gave the distortion inf: it must be finite")
        return verdict

    def _rule_of(self, job: Job) -> str:
        return f"verifier '{self._recipe.verifier_for(job.draft, job.request.params).name}'"


def _before_damage(verdict: Verdict, job: Job) -> Verdict:
    """The verdict up to the first accepted token after which the model gives no distribution; that one ends it.

    Plain decoding emits the token, too: its parent's distribution decided it. If nothing can follow, the next step says
    so.
    """
    for place, node in enumerate(verdict.path):
        if node in job.damaged:
            emitted = slice(place + 1)
            return Verdict(
                verdict.path[:place],
                job.draft.tree.tokens[node],
                verdict.distortions[emitted],
                verdict.divergences[emitted],
            )
    return verdict


def _read_prompt(job: Job, logits_MV: Tensor) -> None:
    """How probable the model found the prompt's tokens after the chunk's rows."""
    request = job.request
    assert request.prompt_logprobs is not None
    known = 1 + len(request.prompt_logprobs)
    tokens = request.tokens[known : known + job.read]
    request.prompt_logprobs += TokenLogprob.of_rows(logits_MV, tokens, request.params.prompt_logprobs or 0)


def _laws(job: Job) -> Laws:
    assert job.laws is not None
    return job.laws
