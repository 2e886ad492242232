"""Expected tokens per step of a chain, from the head's own laws over texts that the target wrote.

A text is walked as serving walks it: from a column, count the drafted tokens that stand, jump behind the bonus. At
temperature 0 a token stands if it is the head's favourite; above it, under the ratio test, the token that the target
emitted was an accepted draft with chance min(1, q/p), which gives an expectation over all walks without a draw.

    steps(c) = 1 + sum over m of P(exactly m of the S drafted tokens stand from column c) steps(c + m + 1)

A mean over all columns would be another number: serving does not visit the columns behind an accepted one.

Letters: T tokens of a text, S steps, C columns, W width, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.forward.hidden_states import FINAL, Depth
from foretoken.train import acceptance
from foretoken.train.feature_heads.lessons import laws
from foretoken.train.frozen_target import FrozenTarget


@dataclass(frozen=True)
class Text:
    """What a target wrote, and what it was asked.

    Attributes:
        tokens: prompt and output.
        num_prompt: tokens of the prompt.
        greedy: whether it was written at temperature 0, else at 1.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    greedy: bool


def texts(name: str, prompts: Sequence[str], temperature: float) -> list[Text]:
    """What a target answers to prompts, as the engine writes it."""
    outputs = acceptance.written(name, {"method": "none"}, prompts, temperature)
    return [
        Text((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids), not temperature)
        for output in outputs
    ]


class Walk:
    """Texts with the target's states, kept so that a head can be tried on them again and again.

    Args:
        depths: what the head reads.
        steps: S, the longest draft.
        unroll: what the head says from every column.
    """

    def __init__(
        self,
        target: FrozenTarget,
        texts: Sequence[Text],
        depths: tuple[Depth, ...],
        steps: int,
        unroll: Unroll = unrolled,
    ) -> None:
        self._steps, self._unroll = steps, unroll
        self._read: list[tuple[Text, Tensor, Tensor]] = []
        with torch.no_grad():
            for text in texts:
                if len(text.tokens) - text.num_prompt < 2:
                    continue  # nothing is drafted for it
                tokens_1T = torch.tensor([text.tokens], device=target.device)
                states = target.states(tokens_1T)
                begin = text.num_prompt
                p_CV = laws(target, states[FINAL][0, begin:-1]).softmax(-1)
                chance_C = p_CV.gather(1, tokens_1T[0, begin + 1 :, None])[:, 0]
                self._read.append((text, torch.cat([states[depth] for depth in depths], dim=-1), chance_C))

    @torch.no_grad()
    def tokens_per_step(self, head: TrainableNetwork, embedding_VW: Tensor, head_KW: Tensor) -> float:
        """Emitted tokens over target calls, as core/metrics.py counts them; NaN without texts."""
        tokens = steps = 0.0
        for text, states_1TF, chance_C in self._read:
            stands_SC = self._stands(head, text, states_1TF, chance_C, embedding_VW, head_KW)
            tokens += len(text.tokens) - text.num_prompt
            steps += 1 + expected_steps(stands_SC)
        return tokens / steps if steps else float("nan")

    def _stands(
        self,
        head: TrainableNetwork,
        text: Text,
        states_1TF: Tensor,
        chance_C: Tensor,
        embedding_VW: Tensor,
        head_KW: Tensor,
    ) -> Tensor:
        """[S, C]: the chance that what is drafted at step s from column c stands, given that all before it do."""
        tokens_1T = torch.tensor([text.tokens], device=states_1TF.device)
        first = text.num_prompt - 1  # the pair of the prompt's last row and the first token
        count = len(text.tokens) - 1 - text.num_prompt
        found = torch.zeros(self._steps, count)
        wanted_1C = torch.zeros(1, tokens_1T.shape[1] - 1, dtype=torch.bool, device=states_1TF.device)
        wanted_1C[0, first:] = True
        for step, rows_NW in enumerate(self._unroll(head, states_1TF, tokens_1T, embedding_VW, self._steps, wanted_1C)):
            columns = count - step  # from which the drafted token is known
            if columns <= 0:
                break
            logits_CK = rows_NW[:columns] @ head_KW.T
            wanted_C = tokens_1T[0, text.num_prompt + 1 + step :]
            if head.ids_K is None:
                place_C, known_C = wanted_C, torch.ones_like(wanted_C, dtype=torch.bool)
            else:
                ids_K = head.ids_K.to(wanted_C.device)
                place_C = torch.searchsorted(ids_K, wanted_C).clamp_max(len(ids_K) - 1)
                known_C = ids_K[place_C] == wanted_C
            if text.greedy:
                stands_C = (logits_CK.argmax(-1) == place_C).float()
            else:
                q_C = logits_CK.float().softmax(-1).gather(1, place_C[:, None])[:, 0]
                stands_C = (q_C / chance_C[step:]).clamp_max(1)
            found[step, :columns] = (stands_C * known_C).cpu()
        return found


def expected_steps(stands_SC: Tensor) -> float:
    """Target calls after the first token of a text.

    Args:
        stands_SC: chances that drafted tokens stand. Column c has seen c of the C tokens that follow the first one and
            drafts the next ones; the last of them is never drafted, as a step emits one token beside its draft.
    """
    stands = stands_SC.tolist()
    count = stands_SC.shape[1]
    steps = [0.0] * (count + 1)
    for column in range(count - 1, -1, -1):
        reach, total = 1.0, 1.0
        longest = min(len(stands), count - column - 1)
        for step in range(longest):
            chance = stands[step][column]
            total += reach * (1 - chance) * steps[column + step + 1]
            reach *= chance
        steps[column] = total + reach * steps[column + longest + 1]
    return steps[0]
