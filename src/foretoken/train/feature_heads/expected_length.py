"""Expected tokens per step of a chain, from the network's own distributions over texts that the target wrote.

Serving visits some columns of a text: from a column it counts the accepted drafted tokens, and continues after the
bonus token. At temperature 0 a token is accepted if it is the network's best one; above it, under the ratio test, the
token that the target emitted was an accepted draft with probability min(1, q/p), which gives an expectation over all
sequences of steps without a draw.

    steps(c) = 1 + sum over m of P(exactly m of the S drafted tokens are accepted from column c) steps(c + m + 1)

A mean over all columns would be another number: serving does not visit the columns of accepted tokens.

Letters: T tokens of a text, S steps, C columns, W width, K draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.forward.hidden_states import FINAL, Depth
from foretoken.train import acceptance
from foretoken.train.feature_heads.batches import target_logits
from foretoken.train.frozen_target import FrozenTarget


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output.

    Attributes:
        tokens: prompt and output.
        num_prompt: tokens of the prompt.
        greedy: whether it was written at temperature 0, else at 1.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    greedy: bool


def texts(name: str, prompts: Sequence[str], temperature: float) -> list[Text]:
    """A target's answers to prompts, as the engine writes them."""
    outputs = acceptance.written(name, {"method": "none"}, prompts, temperature)
    return [
        Text((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids), not temperature)
        for output in outputs
    ]


class ExpectedLength:
    """Texts with the target's states, on which a network can be tried again and again.

    Args:
        depths: the states that the network reads.
        steps: S, the longest draft.
        unroll: the network's output at every column.
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
                    continue  # too short to draft for
                tokens_1T = torch.tensor([text.tokens], device=target.device)
                states = target.states(tokens_1T)
                begin = text.num_prompt
                p_CV = target_logits(target, states[FINAL][0, begin:-1]).softmax(-1)
                chance_C = p_CV.gather(1, tokens_1T[0, begin + 1 :, None])[:, 0]
                self._read.append((text, torch.cat([states[depth] for depth in depths], dim=-1), chance_C))

    @torch.no_grad()
    def tokens_per_step(self, network: TrainableNetwork, embedding_VW: Tensor, head_KW: Tensor) -> float:
        """Emitted tokens over target calls, as core/metrics.py counts them; NaN without texts."""
        tokens = steps = 0.0
        for text, states_1TF, chance_C in self._read:
            accepted_SC = self._accepted(network, text, states_1TF, chance_C, embedding_VW, head_KW)
            tokens += len(text.tokens) - text.num_prompt
            steps += 1 + expected_steps(accepted_SC)
        return tokens / steps if steps else float("nan")

    def _accepted(
        self,
        network: TrainableNetwork,
        text: Text,
        states_1TF: Tensor,
        chance_C: Tensor,
        embedding_VW: Tensor,
        head_KW: Tensor,
    ) -> Tensor:
        """[S, C]: the probability that the token of step s from column c is accepted, given those before it."""
        tokens_1T = torch.tensor([text.tokens], device=states_1TF.device)
        first = text.num_prompt - 1  # the pair of the prompt's last row and the first token
        count = len(text.tokens) - 1 - text.num_prompt
        found = torch.zeros(self._steps, count)
        wanted_1C = torch.zeros(1, tokens_1T.shape[1] - 1, dtype=torch.bool, device=states_1TF.device)
        wanted_1C[0, first:] = True
        for step, rows_NW in enumerate(
            self._unroll(network, states_1TF, tokens_1T, embedding_VW, self._steps, wanted_1C)
        ):
            columns = count - step  # from which the drafted token is known
            if columns <= 0:
                break
            logits_CK = rows_NW[:columns] @ head_KW.T
            wanted_C = tokens_1T[0, text.num_prompt + 1 + step :]
            if network.ids_K is None:
                place_C, known_C = wanted_C, torch.ones_like(wanted_C, dtype=torch.bool)
            else:
                ids_K = network.ids_K.to(wanted_C.device)
                place_C = torch.searchsorted(ids_K, wanted_C).clamp_max(len(ids_K) - 1)
                known_C = ids_K[place_C] == wanted_C
            if text.greedy:
                accepted_C = (logits_CK.argmax(-1) == place_C).float()
            else:
                q_C = logits_CK.float().softmax(-1).gather(1, place_C[:, None])[:, 0]
                accepted_C = (q_C / chance_C[step:]).clamp_max(1)
            found[step, :columns] = (accepted_C * known_C).cpu()
        return found


def expected_steps(accepted_SC: Tensor) -> float:
    """Target calls after the first token of a text.

    Args:
        accepted_SC: probabilities that drafted tokens are accepted. Column c has seen c of the C tokens after the first
            and drafts the next ones; the last of them is never drafted, because a step emits a token besides its draft.
    """
    accepted = accepted_SC.tolist()
    count = accepted_SC.shape[1]
    steps = [0.0] * (count + 1)
    for column in range(count - 1, -1, -1):
        reach, total = 1.0, 1.0
        longest = min(len(accepted), count - column - 1)
        for step in range(longest):
            chance = accepted[step][column]
            total += reach * (1 - chance) * steps[column + step + 1]
            reach *= chance
        steps[column] = total + reach * steps[column + longest + 1]
    return steps[0]
