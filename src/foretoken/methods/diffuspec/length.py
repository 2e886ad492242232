"""The paper's adaptive draft length: the drafter's usual length before an end token, longer while drafts are accepted.

    gen  <-  (1 - rho) gen + rho L_gen      L_gen  tokens before the first end token of the best tokens of all slots
    acc  <-  (1 - rho) acc + rho L_acc      L_acc  accepted draft tokens
    k    <-  clip(floor(gen) + delta [acc >= gen], k_min, k_max)              gen_0 = acc_0 = 0, k_1 = k_max

Paper: DiffuSpec, arXiv:2510.02358, section 4.3.
"""

import math
from dataclasses import dataclass

RHO = 0.5


@dataclass(slots=True)
class AdaptiveLength:
    """The adaptive length of one request.

    Attributes:
        least, most: k_min and k_max.
        step: delta.
    """

    least: int
    most: int
    step: int
    generated: float = 0.0
    accepted: float = 0.0
    current: int = 0

    def __post_init__(self) -> None:
        self.current = self.current or self.most

    def learn(self, generated: int, accepted: int) -> None:
        """Update the averages with one round.

        Args:
            generated: L_gen, of the lattice before the search.
            accepted: L_acc.
        """
        self.generated += RHO * (generated - self.generated)
        self.accepted += RHO * (accepted - self.accepted)
        wanted = math.floor(self.generated) + self.step * (self.accepted >= self.generated)
        self.current = min(self.most, max(self.least, wanted))
