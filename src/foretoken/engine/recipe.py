"""A recipe: which drafter, which verifier, how long, how the target computes it, and what all that promises.

It is checked as a whole when it is put together (engine/compose.py), never in the middle of a run.
"""

from dataclasses import dataclass

from foretoken import catalog
from foretoken.core.draft import Draft, Evidence, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Drafter, PlanMaker, Verifier
from foretoken.options.sampling import SamplingParams

MAX_NODES = 16
"""Draft nodes per step at most where no number of them is given."""

BEST_OF_TREES: dict[type[Law], str] = {
    Sampled: "kseq",
    WithoutReplacement: "recursive",
    TopThenSampled: "greedy_draft",
    HubPair: "spechub",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked composition.

    Attributes:
        method: name of the drafter.
        drafter: the instance.
        verifier: the requested verifier, or the drafter's own; None chooses per draft.
        num_nodes: draft nodes per step, at most.
        adaptive: whether the controller decides the draft length (up to ``num_nodes``).
        may_skip_drafting: whether the controller also selects the requests that get drafts at all, so that drafting
            stops where it is slower than plain decoding; False if a number of tokens was requested, or if the text
            would change.
        plan: makes the plan of every step: how the target computes it.
        executor: the order of target and drafter: "serial", "pearl" or "auto" (engine/executors/).
        explanation: why the executor is not the one of the options, in one line; "" if it is.
    """

    method: str
    drafter: Drafter
    verifier: Verifier | None
    num_nodes: int
    adaptive: bool
    may_skip_drafting: bool
    plan: PlanMaker
    executor: str = "serial"
    explanation: str = ""

    def verifier_for(self, draft: Draft, params: SamplingParams) -> Verifier:
        """The requested verifier, else the strongest lossless rule for this draft.

        * temperature 0: `greedy`.
        * point-mass drafts, coupled and empty ones included: `match`. Accepting exactly when the target's own sample
          is among the proposals has acceptance equal to their target mass, which is optimal, and keeps the stream.
        * chains drawn from q: `block`, which never accepts less than token by token.
        * trees drawn from q: the rule of their distribution that comes nearest to its optimum (docs/analysis.md):
          `greedy_draft` and `spechub` reach it, `kseq` and `recursive` nearly.
        """
        if self.verifier is not None:
            return self.verifier
        if params.greedy:
            return verifier_named("greedy")
        if isinstance(draft.law, PointMass) or not len(draft):
            return verifier_named("match")
        return verifier_named("block" if draft.tree.is_chain else BEST_OF_TREES[type(draft.law)])

    @property
    def explanations(self) -> list[str]:
        """What its parts have measured and chosen, a line each; for the user."""
        parts = ((self.drafter, self.method), (self.plan, self.plan.settings_key))
        found = [f"{name}: {part.explanation}" for part, name in parts if part.explanation]
        return [*found, self.explanation] if self.explanation else found

    @property
    def promise(self) -> str:
        """What this recipe promises about sampled output; at temperature 0 a lossless recipe gives the same text."""
        if not self.plan.exact:  # the rule is exact, but for an approximate target distribution
            return "approximate"
        if self.verifier is not None:
            return self.verifier.promise
        return "same stream" if all(issubclass(law, PointMass) for law in self.drafter.laws) else "same distribution"

    def promise_for(self, params: SamplingParams) -> str:
        """The promise for one request."""
        promise = self.promise
        if params.greedy and promise != "approximate":
            return "same text"
        keeps_seeds = self.drafter.offers.keeps_seeds and self.verifier is None and self.plan.exact
        return "same stream" if params.repeatable and keeps_seeds else promise

    @property
    def takes_turns(self) -> bool:
        """Whether drafter and target write in turns, so that a token may be the drafter's alone."""
        return self.verifier is not None and self.verifier.offers.takes_turns

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a prompt may be taken as read where another request has read it.

        Not where the cache holds what a sparse target computed.
        """
        return self.plan.exact

    def history_only(self, params: SamplingParams) -> bool:
        """Whether the drafts of a request must follow from its own past only.

        Otherwise its seed would not give the same tokens; with turns, the number of rows that other requests leave
        would decide whether drafter or target writes a token.
        """
        return self.takes_turns or (params.repeatable and self.promise_for(params) != "same stream")

    def evidence_for(self, params: SamplingParams) -> type[Evidence] | None:
        """The evidence that drafts of a request must carry for the verifier."""
        kind = None if self.verifier is None else self.verifier.needs.evidence
        return None if kind is None or (kind.greedy_only and not params.greedy) else kind

    def takes_predictions(self, params: SamplingParams) -> bool:
        """Whether a request's predicted output may be drafted: tokens that the drafter has not proposed.

        Not under a rule that would accept a text because it was proposed, or needs more of a draft than its tokens.
        """
        fits = self.verifier is None or PointMass in self.verifier.laws
        waits = self.executor == "serial" and not self.drafter.offers.resumes
        return fits and waits and self.promise != "approximate" and self.evidence_for(params) is None

    def check_adapter(self) -> None:
        """Refuse adapters where more of the target than the verified rows is computed: without the adapter.

        Raises:
            ConfigError: with the remedy.
        """
        if self.drafter.offers.resumes or not self.plan.exact:
            why = "drafts with the target's own layers" if self.plan.exact else "reads the target sparsely"
            raise ConfigError(
                f"lora_request: method '{self.method}' {why}, where an adapter is not applied: use another method, or "
                "load the adapter as a model of its own"
            )

    def check(self, params: SamplingParams) -> None:
        """Refuse a request that the verifier cannot honour.

        Raises:
            ConfigError: a temperature with the `greedy` verifier, log-probabilities with a lossy one, or temperature 0
                with one that compares distributions, while the drafter has none.
        """
        evidence = self.evidence_for(params)
        if evidence is not None and evidence not in self.drafter.offers.evidence:
            assert self.verifier is not None  # at other temperatures it was checked when the recipe was composed
            raise ConfigError(
                f"verifier='{self.verifier.name}' cannot honour temperature=0: it compares the "
                f"draft's distribution with the "
                f"target's, and drafts of '{self.method}' carry none there; use a temperature above 0, or "
                "method='draft_model'"
            )
        if self.verifier is not None and self.verifier.name == "greedy" and not params.greedy:
            raise ConfigError(
                f"verifier='greedy' cannot honour temperature={params.temperature:g}: "
                "use temperature 0, or leave the verifier out to get the strongest lossless rule"
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if self.promise == "approximate" and count is not None:
                raise ConfigError(
                    f"{name}={count} with {self.why_approximate}: log-probabilities are the target's, "
                    "but this recipe emits by another distribution; leave one of them out"
                )

    @property
    def why_approximate(self) -> str:
        """The setting because of which nothing is promised; "" for a lossless recipe."""
        if not self.plan.exact:
            return self.plan.reason
        return f"verifier='{self.verifier.name}'" if self.verifier and self.promise == "approximate" else ""


_loaded: dict[str, Verifier] = {}


def verifier_named(name: str) -> Verifier:
    """A verifier without options: it has no state, so one instance serves all requests."""
    if name not in _loaded:
        _loaded[name] = catalog.find(name, "verifier").load()()
    return _loaded[name]
