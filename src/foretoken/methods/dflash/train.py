"""Training of DFlash's network, or DSpark's: the target's distribution at every slot (train/feature_heads/blocks.py).

Papers: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147. Differs: see the loss; a Markov head reads the true token
before a slot; there is no confidence head; layers see as far back as the texts of training.

Letters: B sequences, T positions, A anchors of a sequence, k slots, F width of the fused states, W width, r rank of
the Markov head, K draft vocabulary, V vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.methods.dflash.checkpoint import DFlash
from foretoken.methods.dflash.command import Config
from foretoken.methods.dflash.network import DFlashConfig
from foretoken.train.feature_heads.blocks import BlockLoss, slot_by_slot
from foretoken.train.feature_heads.training import BLOCK, HeadTraining, Stage, num_scored, recipe_for, untrained
from foretoken.train.optimiser import Rates

RATES = Rates(muon=5e-3, adamw=3e-3, warmup=0.03, decay=0.9)  # AdamW alone learns less from the same tokens
_BLOCKS_AT_ONCE = 64  # each sees its own rows only, but scores of all rows are computed


class LearningDFlash(DFlash):
    """A network in training.

    Its rows are [n; f], and those of its LM head [head; W2]: their product has the Markov head's addend.
    """

    def lm_head_of(self, model: Any) -> Tensor:
        rows_KW = super().lm_head_of(model)
        return rows_KW if self.markov_head is None else torch.cat([rows_KW, self.markov_head.markov_w2.weight], 1)

    def many_blocks(self, states_BTF: Tensor, tokens_BT: Tensor, anchors_BA: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the LM head, [B, A, k, W], or [B, A, k, W + r] with a Markov head."""
        sizes, rows = self.config, []
        for states_TF, tokens_T, anchors_A in zip(states_BTF, tokens_BT, anchors_BA, strict=True):
            for some_A in anchors_A.split(_BLOCKS_AT_ONCE):
                tokens_RB = tokens_T.new_full((len(some_A), sizes.rows), sizes.mask_token)
                tokens_RB[:, 0] = tokens_T[some_A]
                rows.append(self.blocks(states_TF, tokens_RB, some_A, embedding_VW))
        n_BAkW = torch.cat(rows).unflatten(0, anchors_BA.shape)[:, :, sizes.rows - sizes.slots :]
        if self.markov_head is None:
            return n_BAkW
        at_BAk = anchors_BA[..., None] + torch.arange(sizes.slots, device=anchors_BA.device)
        before_BN = tokens_BT.gather(1, at_BAk.clamp_max(tokens_BT.shape[1] - 1).flatten(1))
        read, state = [], None
        for before_BA, n_BAW in zip(before_BN.unflatten(1, at_BAk.shape[1:]).unbind(-1), n_BAkW.unbind(2), strict=True):
            f_BAr, _, state = self.markov_head(before_BA, n_BAW, state)
            read.append(f_BAr)
        return torch.cat([n_BAkW, torch.stack(read, 2)], -1)


def training(options: Config) -> HeadTraining:
    """Return the network of the options, and its training.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than the draft vocabulary.
    """
    target, dspark = options.target, options.markov_rank > 0
    description = f"{'DSpark' if dspark else 'DFlash'} network of {target}"
    rows = options.slots if dspark else options.slots + 1

    def config(theirs: Any, name: str, fingerprint: str) -> DFlashConfig:
        text = theirs.get_text_config(decoder=True)
        return DFlash.config_for(
            theirs,
            name,
            fingerprint,
            mlp_width=options.mlp_width,
            layers=options.layers,
            rows=rows,
            anchor_predicts=dspark,
            markov_rank=options.markov_rank,
            windows=(BLOCK + rows,) * options.layers,
            causal=(True,) * options.layers,  # as engines read sliding layers unless a config says otherwise
            taps=options.taps,
            target_layers=text.num_hidden_layers,
            mask_token=_mask_token(text) if options.mask_token is None else options.mask_token,
        )

    return HeadTraining(
        target=target,
        part=DFlash,
        recipe=recipe_for("dflash", description, target, options.share, RATES),
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.slots,
        config=config,
        build=partial(untrained, LearningDFlash, own_head=options.own_head),
        num_scored=num_scored(options),
        own_rows=options.own_head or dspark,
        objective=BlockLoss,
        unroll=slot_by_slot,
    )


def _mask_token(text: Any) -> int:
    """A token that a text hardly holds."""
    named = (getattr(text, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    found = next((each for each in named if each is not None), 0)
    return int(found[0] if isinstance(found, list) else found)
