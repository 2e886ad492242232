"""Rules that add to the exact test: a token stands if the test lets it, or if the two distributions say that it may
anyway.

Letters: V vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from foretoken.core.distortion import emitted
from foretoken.core.randomness import Streams
from foretoken.core.residual import residual, residual_without
from foretoken.verifiers.lossy import LossyVerifier, exactly
from foretoken.verifiers.walk import Pick, Siblings


class ExactOrMember(LossyVerifier):
    """Standard OR a set of tokens; after a refusal draw from the positive part of p - q. Chains only."""

    trees = False

    @abstractmethod
    def members(self, p_V: Tensor, q_V: Tensor | None) -> Tensor:
        """bool [V]: the tokens that stand whatever the test says; never one with p = 0."""

    def law(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings) -> Tensor:
        """The emitted distribution, with A the set: the test rejects no token where q <= p, and is not applied in A.

            e = q [in A] + min(p, q) [not in A] + (1 - sum of these) (p - q)+ / sum (p - q)+
            TV(e, p) = sum (q - p)+ [in A]

        A point mass has q = 1 at the proposed token.
        """
        members_V = self.members(p_V, q_V)
        if q_V is None:
            stands_V = torch.zeros_like(p_V)
            stands_V[tokens[0]] = 1.0 if members_V[tokens[0]] else p_V[tokens[0]]
            rest_V = residual_without(p_V, tokens)
        else:
            stands_V = torch.where(members_V, q_V, torch.minimum(p_V, q_V))
            rest_V = residual(p_V, q_V)
        return emitted(stands_V, rest_V / rest_V.sum())

    def decide(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
        if self.members(p_V, q_V)[tokens[0]]:
            return 0, tokens[0]
        return exactly(p_V, q_V, tokens, rng)

    def stands(self, p_V: Tensor, q_V: Tensor | None, token: int) -> bool:
        return bool(self.members(p_V, q_V)[token])
