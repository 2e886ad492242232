"""Reflective verification: the target reads the draft twice in one forward; a mix of both readings verifies it.

Letters: M rows, P probe rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from foretoken import catalog
from foretoken.core.distortion import Account, Spent, divergence, total_variation
from foretoken.core.draft import Draft, Law, PointMass, Sampled, WithoutReplacement
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.laws import Laws
from foretoken.core.needs import Declared, Knob, Needs, Offers
from foretoken.core.protocols import Context, Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import ROOT, TokenTree
from foretoken.core.verdict import Verdict
from foretoken.data.reflection import BACK, PREFIX
from foretoken.methods.reflective.given_draft import law_given
from foretoken.methods.reflective.probe import reflected, with_copies
from foretoken.options.option import Option
from foretoken.verifiers.lossy import BudgetedVerifier, LossyConfig, check_fit
from foretoken.verifiers.recursive import RecursiveVerifier

RULES = (
    "recursive",
    "ratio",
    "match",
    "typical",
    "topk_relaxed",
    "mixture",
    "tolerance",
    "p_threshold",
    "kl_threshold",
)
_EXACT = RecursiveVerifier()
_KINDS: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement)
Cost = tuple[float, float]  # distortion and divergence


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    """Check a prompt: valid Unicode text, or token ids."""
    found = tuple(value) if isinstance(value, list) else value
    if isinstance(found, str):
        try:
            found.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"{name}={value!r:.60} is not valid Unicode") from None
    elif not isinstance(found, tuple) or not all(type(each) is int for each in found):
        raise ConfigError(f"{name}={value!r:.60} must be a text or token ids")
    return found


class ReflectiveVerifier(BudgetedVerifier):
    """Verify against (1 - alpha) Z0 + alpha Zr: the target's logits, and its logits in a second copy of the draft.

    Paper:   "Think Before You Accept", arXiv:2505.18629; withdrawn from ICLR 2026; we know only its abstract and its
             reviews. Layout in methods/reflective/probe.py.
    Exact:   no, and the output follows no closed-form distribution: Zr of the row that judges d_i has read d_i. At
             every node the rule's distribution e and the distribution e* of exact verification, *both given the draft*,
             are known; the meter charges TV(e, e*) and KL(e, e*). Their mean over drafts is at least TV(E e, p), as
             E e* = p. At temperature 0 a token costs 1 where it is not the argmax of Z0. Checked by enumeration in
             tests/unit/methods/reflective/test_verifier.py. With ``alpha=0`` there is no probe, and the rule is
             ``rule``, bit for bit.
    Differs: Z0 verifies the bonus, unless ``mix_bonus``. Z0 also judges a drafted token that ends the request, unless
             the token is the argmax of Z0, and a mixed argmax that would end the request. A token must pass the
             request's filters under Z0 and under the mix; if no token does, Z0 decides. There is a budget; Z0 decides a
             step without capacity for the probe. The prompt is that of the paper's trees; its wording for chains is
             not published.
    """

    name = "reflective"
    laws = _KINDS
    trees = True
    needs = Needs(dense=True)
    offers = Offers(probes=True)
    declared = Declared(knob=Knob(option="alpha", values=(0.1, 0.3, 0.6)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of reflective verification; for max_distortion see ``check_together``."""

        alpha: Annotated[
            float,
            Option(
                "Weight of the second reading's logits; 0 is the plain rule.",
                least=0,
                most=1,
                remedy="0 is the plain rule, 1 the second reading alone",
            ),
        ] = 0.3
        rule: Annotated[
            str,
            Option(
                "The rule that verifies with the mixed distributions: any catalogue rule that decides node by node.",
                choices=tuple(RULES),
                remedy="'block' looks ahead, so its tokens have no distribution of their own",
            ),
        ] = "recursive"
        prompt: Annotated[
            str | Sequence[int],
            Option(
                "The text between draft and copy, or its token ids; '': no text. Tokenised separately from both.",
                convert=_prompt,
            ),
        ] = BACK
        prefix: Annotated[int, Option("Most tokens of the answer to repeat before the copy.", least=0, most=256)] = (
            PREFIX
        )
        mix_bonus: Annotated[bool, Option("Mix the distribution of the bonus token, too.")] = False

        def check_together(self) -> None:
            if not self.prompt and not self.prefix:
                raise ConfigError("prompt='' with prefix=0: something must stand before the copy; use prefix=1")
            if self.max_distortion is not None and catalog.find(self.rule, "verifier").promise == "approximate":
                raise ConfigError(
                    f"max_distortion={self.max_distortion:g} cannot be kept with rule='{self.rule}', which is lossy "
                    "itself: use rule='recursive'"
                )

    @classmethod
    def settle(cls, config: Any, target: Any) -> Any:
        """Convert the prompt to the target's tokens.

        Raises:
            ConfigError: the prompt has a special token of the target, which might begin a new turn, or an unknown id;
                or the copy after it would not see the draft.
        """
        found = tuple(config.prompt)
        if isinstance(config.prompt, str):
            found = tuple(target.tokenizer.encode(config.prompt, add_special_tokens=False)) if config.prompt else ()
            if special := [each for each in found if each in target.special_ids]:
                raise ConfigError(f"prompt={config.prompt!r} holds the special tokens {special}: leave them out")
        elif odd := [each for each in found if not 0 <= each < target.vocab_size]:
            raise ConfigError(f"prompt={config.prompt!r} holds the ids {odd}: they must be below {target.vocab_size}")
        rows = 2 + len(found) + config.prefix  # for a draft of one token
        if config.alpha > 0.0 and target.window is not None and rows > target.window:
            raise ConfigError(
                f"verifier='reflective' needs {rows} positions from a draft of one token to its copy, and layers of "
                f"'{target.name}' have a sliding window of {target.window}: use a shorter prompt "
                "or prefix"
            )
        return replace(config, prompt=found)

    def __init__(self, config: Any = None) -> None:
        self.config: ReflectiveVerifier.Config = self.Config(prompt="") if config is None else config
        self._rule: Verifier = catalog.find(self.config.rule, "verifier").load()()
        self.laws = tuple(kind for kind in _KINDS if kind in self._rule.laws)
        self.trees = self._rule.trees
        self.offers = Offers(probes=self.config.alpha > 0.0)

    def probe(self, draft: Draft, context: Context) -> TokenTree | None:
        """Return prompt, prefix and copy after every path of the draft.

        Raises:
            RequestError: the draft starts inside the target's layers, and the copy has no such rows.
        """
        config = self.config
        if config.alpha == 0.0:
            return None
        if draft.resume is not None:
            raise RequestError(
                "verifier='reflective' cannot judge drafts that start inside the target's layers; "
                "use method='draft_model', 'ngram' or 'suffix'"
            )
        assert not isinstance(config.prompt, str) or not config.prompt, "settle turns the prompt into tokens"
        count = len(context.tokens)
        begin = max(count - config.prefix, min(context.num_prompt, count - 1))
        prefix = context.tokens[begin:] if config.prefix else ()
        return with_copies(draft.tree, tuple(config.prompt), prefix, bonus=config.mix_bonus)  # type: ignore[arg-type]

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft with the mixed distributions, within the remaining budget of the request.

        Z0 verifies a node if its charge exceeds the budget. Charges are known before any sample.

        Args:
            draft: chain or tree of N nodes, of a kind that ``rule`` accepts.
            target: N + 1 rows with ``probe_logits_PV``; without them the plain rule decides.
            rng: as the rule uses it.
            spent: tokens emitted and budget spent by the request so far.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft branches, or has another kind.
        """
        check_fit(self, draft, target)
        if target.probe_logits_PV is None or not len(draft):
            return self._rule.verify_within(draft, target, rng, spent)
        mixed = self.mixed(draft, target)
        if self.config.max_distortion is not None:
            mixed = self._affordable(draft, target, mixed, spent)
        laws = _over(target, mixed)
        verdict = self._rule.verify(draft, laws, rng)
        account = Account(spent, None)
        path = [ROOT, *verdict.path]
        tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.extra]
        for node, token in zip(path, tokens, strict=True):
            account.add(*self._cost(draft, target, laws, mixed, node, token))
        return Verdict(verdict.path, verdict.extra, tuple(account.distortions), tuple(account.divergences))

    def mixed(self, draft: Draft, target: Laws) -> dict[int, torch.Tensor]:
        """Return the rows with another distribution than Z0's: row -> float32 [V], raw."""
        assert target.probe_logits_PV is not None
        config = self.config
        second = reflected(draft.tree, target.probe_logits_PV, len(config.prompt), bonus=config.mix_bonus)
        found = {
            row: (1.0 - config.alpha) * target.raw_MV[row].float() + config.alpha * zr_V for row, zr_V in second.items()
        }
        if target.stop_ids:
            laws = _over(target, found)
            for row in list(found):
                ends = {draft.tree.tokens[child] for child in draft.tree.children.get(row - 1, ())}
                if target.greedy:
                    ends.add(laws.best[row])
                if (ends & target.stop_ids) - {_best(target, row)}:
                    del found[row]
        return found

    def _affordable(
        self, draft: Draft, target: Laws, mixed: dict[int, torch.Tensor], spent: Spent | None
    ) -> dict[int, torch.Tensor]:
        """Return the mixed rows within the budget; the choice depends only on the distributions above them."""
        laws, tree = _over(target, mixed), draft.tree
        kept: dict[int, torch.Tensor] = {}
        behind: dict[int, _Spent] = {}
        for node in (ROOT, *range(len(tree))):
            before = _Spent.of(spent) if node == ROOT else behind[tree.parents[node]]
            row, cost = node + 1, 0.0
            if row in mixed:
                if target.greedy:
                    cost = float(laws.best[row] != target.best[row])
                else:
                    cost = self._cost(draft, target, laws, mixed, node, -1)[0]
                if cost == 0.0 or Account(before, self.config.max_distortion).allows(cost):
                    kept[row] = mixed[row]
                else:
                    cost = 0.0
            behind[node] = _Spent(before.num_tokens + 1, before.distortion_sum + cost)
        return kept

    def _cost(
        self, draft: Draft, target: Laws, laws: Laws, mixed: dict[int, torch.Tensor], node: int, token: int
    ) -> Cost:
        """Return the cost of the token emitted after a node; above temperature 0 it is the same for every token."""
        row, children = node + 1, draft.tree.children.get(node, ())
        if target.greedy:
            return (0.0, 0.0) if token == target.best[row] else (1.0, float("inf"))
        if row not in mixed and self._rule.promise != "approximate":
            return 0.0, 0.0
        if not children:  # the bonus
            e_V, exact_V = laws.p_at(row), target.p_at(row)
        else:
            here = _siblings(draft, children)
            e_V = law_given(self._rule, here, laws.logits_at(row))
            same_stream = self._rule.promise == "same stream"
            exact_V = target.p_at(row) if same_stream else law_given(_EXACT, here, target.logits_at(row))
        return total_variation(e_V, exact_V), divergence(e_V, exact_V)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Tokens emitted and budget spent up to a node."""

    num_tokens: int
    distortion_sum: float

    @classmethod
    def of(cls, spent: Spent | None) -> "_Spent":
        return cls(0, 0.0) if spent is None else cls(spent.num_tokens, spent.distortion_sum)


def _over(target: Laws, mixed: dict[int, torch.Tensor]) -> Laws:
    raw_MV = target.raw_MV.float().clone()
    for row, logits_V in mixed.items():
        raw_MV[row] = logits_V
    return target.over(raw_MV, mixed)


def _best(target: Laws, row: int) -> int:
    return target.best[row] if target.greedy else int(target.logits_at(row).argmax())


def _siblings(draft: Draft, children: tuple[int, ...]) -> Draft:
    """Return the children of a node as a separate draft."""
    tree = TokenTree([draft.tree.tokens[child] for child in children], [ROOT] * len(children))
    if isinstance(draft.law, PointMass):
        return Draft(tree, draft.law)
    return Draft(tree, type(draft.law)(draft.law.q_at(children[0])[None], (0,) * len(children)))
