"""The acceptance of each verification rule with n drafts at a position, given the target's distribution p and the
draft's distribution q.

A rule is a pair: how the drafts are drawn (the scheme), and how they are tested. All values are exact in float64 but
two, a sum over draft tuples without a closed form: `recursive` and `naive` on draws without replacement. They list all
prefixes of n - 1 drafts where these are few, and else average over sampled ones. The last draft is summed over the
vocabulary, so that the average is unbiased and its noise small.

To add a rule, write a function of (p_BV, q_BV, n, sampling) and one line in RULES.

Letters: B positions, V vocabulary, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, nearest
from foretoken.verifiers.kseq import optimal_rho, pass_rate
from foretoken_lab.studies.acceptance.inputs import check_laws, check_num_drafts
from foretoken_lab.studies.acceptance.optimal import SCHEMES, check_scheme, most_probable, optimal_acceptance

_LISTED = 1 << 20  # S * V up to which all prefixes are listed: 8 MB a float64 tensor
_CELLS = 1 << 20  # S * V of samples that are followed together


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the rules without a closed form are averaged.

    Attributes:
        num_samples: sampled draft prefixes a position.
        generator: on the CPU; the same state gives the same values.
    """

    num_samples: int
    generator: torch.Generator


Acceptance = Callable[[Tensor, Tensor, int, Sampling], Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to verify drafts of one scheme.

    Attributes:
        name: as the engine's verifiers are called where it has one.
        scheme: how the drafts come about.
        acceptance: (p_BV, q_BV, n, sampling) -> [B]; distributions are float64 and sum to 1.
        num_drafts: the only n that the rule is for; None for any.
        sampled: when n > 1 and prefixes are many, the value is an average over sampled ones.
    """

    name: str
    scheme: str
    acceptance: Acceptance
    num_drafts: int | None = None
    sampled: bool = False

    def takes(self, num_drafts: int) -> bool:
        """Whether the rule is for so many drafts."""
        return self.num_drafts is None or self.num_drafts == num_drafts


def rule_acceptance(
    p_BV: Tensor,
    q_BV: Tensor,
    num_drafts: int,
    rule: str,
    scheme: str,
    *,
    num_samples: int = 32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The acceptance rate of one rule at every position.

    Args:
        p_BV: the target's processed distributions, [B, V] or [V], any float dtype.
        q_BV: the draft's processed distributions, same shape.
        num_drafts: n, from 1 to V.
        rule: its name in RULES.
        scheme: how the drafts come about, as in :func:`foretoken_lab.studies.acceptance.optimal.optimal_acceptance`.
        num_samples: sampled draft prefixes a position, where there is no closed form.
        generator: on the CPU; None seeds one with 0.
    Returns:
        float64 [B], or a scalar for [V], in [0, 1]; on the CPU.
    Raises:
        ConfigError: rows that are no probability distributions, n out of range, an unknown rule or scheme, or a rule
            that is not exact for drafts of this scheme; the message says why.
    """
    check_scheme(scheme, num_drafts)
    chosen = find(rule, scheme)
    if not chosen.takes(num_drafts):
        raise ConfigError(
            f"rule '{rule}' with num_drafts={num_drafts}: it is defined for {chosen.num_drafts} only; "
            "try rule 'recursive'"
        )
    if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1:
        raise ConfigError(f"num_samples={num_samples!r} must be an integer, at least 1")
    single = isinstance(p_BV, Tensor) and p_BV.dim() == 1
    p_BV, q_BV = check_laws(p_BV, q_BV)
    check_num_drafts(num_drafts, p_BV.shape[-1])
    sampling = Sampling(num_samples, generator or torch.Generator().manual_seed(0))
    rate_B = chosen.acceptance(p_BV, q_BV, num_drafts, sampling).clamp(0.0, 1.0)
    return rate_B[0] if single else rate_B


def find(name: str, scheme: str) -> Rule:
    """A rule of the table.

    Raises:
        ConfigError: unknown, or not exact for this scheme.
    """
    known = {rule.name for rule in RULES}
    if name not in known:
        raise ConfigError(f"unknown rule '{name}': {nearest(str(name), known)}")
    if scheme not in SCHEMES:
        raise ConfigError(f"unknown scheme '{scheme}': {nearest(str(scheme), SCHEMES)}")
    fitting = [rule for rule in RULES if rule.name == name]
    for rule in fitting:
        if rule.scheme == scheme:
            return rule
    raise ConfigError(
        f"rule '{name}' cannot honour drafts of scheme '{scheme}': it {_NEEDS[name]}, and the output would no longer "
        f"follow the target; use it with {', '.join(rule.scheme for rule in fitting)}"
    )


# ---------------------------------------------------------------------- naive: the target's own sample, if drafted


def _naive_iid(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    # 1 - (1-q)^n without cancellation at small q
    return (p_BV * -torch.expm1(n * torch.log1p(-q_BV.clamp(max=1.0)))).sum(-1)


def _naive_without_replacement(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    """sum over draws of p(x_j): each draw's mean given the draws before it, averaged over those."""
    return _per_position(p_BV, q_BV, n, sampling, _naive_race)


def _naive_race(p_V: Tensor, q_V: Tensor, rounds: int, prefixes: Prefixes) -> Tensor:
    q_SV, total = q_V.repeat(prefixes.count, 1), torch.zeros((), dtype=torch.float64)
    for number in range(rounds):
        total = total + prefixes.weight_S @ (q_SV @ p_V)
        if number + 1 < rounds:
            parent_S, token_S = prefixes.extend(q_SV)
            q_SV = _without(q_SV[parent_S], token_S)
    return total


def _naive_greedy(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    rates = []
    for p_V, q_V in zip(p_BV, q_BV, strict=True):
        rest_V = q_V.clone()
        top = torch.from_numpy(most_probable(q_V.numpy(), n - 1))
        rest_V[top] = 0.0
        mass = float(rest_V.sum())
        rates.append(float(p_V[top].sum()) + (float(p_V @ rest_V) / mass if mass > 0.0 else 0.0))
    return torch.tensor(rates, dtype=torch.float64)


# ---------------------------------------------------------------------- recursive rejection


def _recursive_iid(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    """1 - product of the rounds' refusals; what a refusal leaves of p does not depend on the refused token.

    Paper:   Miao et al. 2023, arXiv:2305.09781, multi-step speculative sampling.
    """
    refused_B = torch.ones(len(p_BV), dtype=torch.float64)
    for _ in range(n):
        left_BV = (p_BV - q_BV).clamp_(min=0.0)
        mass_B = left_BV.sum(-1)
        refused_B = refused_B * mass_B
        p_BV = left_BV / mass_B.clamp(min=1e-300)[:, None]
    return 1.0 - refused_B


def _recursive_without_replacement(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    """1 - mean over refused prefixes of the product of the rounds' refusals.

    In round j the draft is token i and refused with chance (q_j - p_j)+ at i, in all r_j = sum (p_j - q_j)+. A prefix
    that is drawn from the normalised (q_j - p_j)+ has weight r_j.

    Paper:   Jeon et al. 2024, arXiv:2402.14160, Algorithm 1.
    """
    return _per_position(p_BV, q_BV, n, sampling, _recursive_race)


def _recursive_race(p_V: Tensor, q_V: Tensor, rounds: int, prefixes: Prefixes) -> Tensor:
    p_SV, q_SV = p_V.repeat(prefixes.count, 1), q_V.repeat(prefixes.count, 1)
    for _ in range(rounds - 1):
        left_SV = (p_SV - q_SV).clamp_(min=0.0)
        left_SV /= left_SV.sum(-1, keepdim=True).clamp(min=1e-300)
        parent_S, token_S = prefixes.extend((q_SV - p_SV).clamp_(min=0.0))
        p_SV, q_SV = left_SV[parent_S], _without(q_SV[parent_S], token_S)
    return 1.0 - prefixes.weight_S @ (p_SV - q_SV).clamp_(min=0.0).sum(-1)


# ---------------------------------------------------------------------- prefixes of draws without replacement


class Prefixes:
    """Drafts so far, each with its weight: all that are possible, or samples.

    Attributes:
        count: S at the start: 1 if all are listed, else the number of samples.
        weight_S: of each prefix; it starts with 1 in all.
    """

    def __init__(self, sampling: Sampling | None) -> None:
        self._generator = None if sampling is None else sampling.generator
        self.count = 1 if sampling is None else sampling.num_samples
        self.weight_S = torch.full((self.count,), 1.0 / self.count, dtype=torch.float64)

    def extend(self, chance_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Add a token to every prefix; the parents' rows and the tokens, int64 [S'] both.

        Args:
            chance_SV: of each token to come next (and to leave the rule undecided); need not sum to 1.
        """
        if self._generator is None:
            parent_S, token_S = chance_SV.nonzero(as_tuple=True)
            self.weight_S = self.weight_S[parent_S] * chance_SV[parent_S, token_S]
            return parent_S, token_S
        mass_S = chance_SV.sum(-1)
        self.weight_S = self.weight_S * mass_S
        # a prefix that ends here has weight 0 from now on: any token will do
        drawn_SV = torch.where(mass_S[:, None] > 0.0, chance_SV, 1.0)
        token_S = torch.multinomial(drawn_SV, 1, generator=self._generator)[:, 0]
        return torch.arange(len(chance_SV)), token_S


def _without(q_SV: Tensor, token_S: Tensor) -> Tensor:
    """q without a token of each row, normalised; zeros if nothing is left."""
    q_SV = q_SV.scatter(1, token_S[:, None], 0.0)
    return q_SV.div_(q_SV.sum(-1, keepdim=True).clamp(min=1e-300))


def _per_position(
    p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling, one: Callable[[Tensor, Tensor, int, Prefixes], Tensor]
) -> Tensor:
    """Position by position over the tokens that matter; samples in batches that bound the memory."""
    rates = []
    for p_V, q_V in zip(p_BV, q_BV, strict=True):
        used = (p_V > 0.0) | (q_V > 0.0)
        p_V, q_V = p_V[used], q_V[used]
        support = int((q_V > 0.0).sum())
        rounds = min(n, support)
        if len(p_V) * support ** (rounds - 1) <= _LISTED:
            rates.append(float(one(p_V, q_V, rounds, Prefixes(None))))
            continue
        total, wanted = 0.0, sampling.num_samples
        most = max(1, _CELLS // len(p_V))
        for begin in range(0, wanted, most):
            count = min(most, wanted - begin)
            total += count * float(one(p_V, q_V, rounds, Prefixes(Sampling(count, sampling.generator))))
        rates.append(total / wanted)
    return torch.tensor(rates, dtype=torch.float64)


# ---------------------------------------------------------------------- K-SEQ


def _kseq(p_BV: Tensor, q_BV: Tensor, n: int, sampling: Sampling) -> Tensor:
    count_B = torch.full((len(p_BV),), n, dtype=torch.float64)
    _, beta_B = optimal_rho(p_BV, q_BV, count_B)
    return pass_rate(beta_B, count_B)


# ---------------------------------------------------------------------- rules that reach the optimum


def _optimum(scheme: str) -> Acceptance:
    return lambda p_BV, q_BV, n, sampling: optimal_acceptance(p_BV, q_BV, n, scheme)


RULES: tuple[Rule, ...] = (
    Rule("ratio", "iid", _optimum("iid"), num_drafts=1),
    Rule("naive", "iid", _naive_iid),
    Rule("naive", "without_replacement", _naive_without_replacement, sampled=True),
    Rule("naive", "greedy", _naive_greedy),
    Rule("naive", "topk", _optimum("topk")),
    Rule("recursive", "iid", _recursive_iid),
    Rule("recursive", "without_replacement", _recursive_without_replacement, sampled=True),
    Rule("recursive", "topk", _optimum("topk")),
    Rule("kseq", "iid", _kseq),
    Rule("spechub", "hub", _optimum("hub"), num_drafts=2),
    Rule("greedy_draft", "greedy", _optimum("greedy")),
    Rule("transport", "iid", _optimum("iid")),
    Rule("transport", "without_replacement", _optimum("without_replacement")),
)

_NEEDS = {
    "ratio": "tests one draft against the q that it alone was drawn from",
    "naive": "needs drafts with a known distribution apart from the target's sample",
    "recursive": "takes every draft for a draw from q without its elders, or for a point mass",
    "kseq": "accepts every draft against the same q, so that drafts have to be independent draws",
    "spechub": "is made for the pairs of its own sampler, two drafts of which one is the most probable token",
    "greedy_draft": "takes the first n - 1 drafts for the most probable tokens and tests the last one alone",
    "transport": "solves the transport problem of independent or successive draws",
}


def rules_for(num_drafts: int, schemes: Sequence[str] | None = None) -> list[Rule]:
    """The rules that take so many drafts, in the order of the table."""
    return [rule for rule in RULES if rule.takes(num_drafts) and (schemes is None or rule.scheme in schemes)]
