"""EAGLE's head: one decoder layer over pairs of a feature of the target and the token behind it.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ block ── h_i ── head ── q of x_{i+2}
    drafting    h_i takes the place of g_{i+1}, which the target has not computed yet

    EAGLE-3     g = fc([states of three depths]);  attention over [norm(e); norm(g)], residual from g, MLP, norm, head
    EAGLE-2     g = what the final norm gives;     x = fc([e; g]), a layer without its first norm, the target's head

Papers: EAGLE-2, arXiv:2406.16858 (the network is EAGLE-1's, arXiv:2401.15077, figure 6); EAGLE-3, arXiv:2503.01840,
section 3.1. Differs: the depths of a head of ours lie in the target as (2, L/2, L-3) lie in 32 layers; a head without
``lm_head`` reads its K rows in the target's own head.

Letters: T rows, F width of the fused depths, W width, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import Block, Norm, fields_for
from foretoken.drafting.feature_heads.head import FeatureHead
from foretoken.drafting.learned_part import check_fingerprint
from foretoken.forward import anatomy
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, UNKNOWN, EagleConfig, from_settings, to_settings
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.language_model import LanguageModel

_OLD_NAMES = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
_EAGLE2_NAMES = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Eagle(FeatureHead):
    """The head's weights, in the two forms of its arithmetic.

    Args:
        config: what it is.
        ids_K, own_head, own_embedding: see :class:`FeatureHead`.
    """

    algorithm = "eagle"
    model_types = (EAGLE3, EAGLE2)
    title = "EAGLE head"
    option = "head"
    Config = EagleConfig
    grows = True
    size_names = {"width": "target_hidden_size", "vocabulary": "transformer_layer_config.vocab_size"}  # noqa: RUF012
    config: EagleConfig

    def __init__(self, config: EagleConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.paired = config.algorithm == EAGLE3
        fused = config.num_features * config.target_width
        if self.paired:
            self.fc = nn.Linear(fused, config.width, bias=False)
            self.norm = Norm(config.width, eps=config.norm_eps)
            if config.norm_before_fc:
                self.input_norm = Norm(fused, eps=config.norm_eps)
            if config.fc_norm:
                norms = (Norm(config.target_width, eps=config.norm_eps) for _ in range(config.num_features))
                self.fc_norm = nn.ModuleList(norms)
        else:
            self.fc = nn.Linear(2 * config.width, config.width, bias=config.fusion_bias)
        self.layers = nn.ModuleList([Block(config, paired=self.paired, normed=self.paired)])

    # ------------------------------------------------------------------ the arithmetic

    def prepare(self, states_TF: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            states_TF = self.input_norm(states_TF)
        if self.config.fc_norm:
            pieces = states_TF.split(self.config.target_width, dim=-1)
            states_TF = torch.cat([norm(each) for norm, each in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        return states_TF

    def first_norm(self) -> nn.Module | None:
        return self.layer(0).hidden_norm if self.paired and not self.config.norm_before_residual else None

    def begin_norm(self) -> nn.Module | None:
        return self.layer(0).hidden_norm if self.config.norm_before_residual else None

    def rates(self) -> Tensor:
        plain = super().rates()
        return plain if self.config.rope_scaling is None else self.config.rope_scaling.of(plain)

    # ------------------------------------------------------------------ files

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the two maps between the vocabularies."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        if not self.paired:
            return {_renamed(name, _EAGLE2_NAMES): value for name, value in found.items()}
        if self.ids_K is not None:
            found["d2t"] = self.ids_K - torch.arange(len(self.ids_K))
            found["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, self.ids_K, True)
        return found

    @classmethod
    def of(cls, config: EagleConfig, tensors: Mapping[str, Tensor]) -> Eagle:
        """The head that a config and saved weights describe, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = {_renamed(name, _OLD_NAMES): value for name, value in tensors.items()}
        ids_K = _ids_of(config, found.pop("d2t", None), found.pop("t2d", None))
        head = cls(config, ids_K=ids_K, own_head=_HEAD in found, own_embedding=_EMBEDDING in found)
        head.take(found)
        return head.eval()

    @classmethod
    def random(
        cls,
        target: LanguageModel,
        *,
        algorithm: str = EAGLE3,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> Eagle:
        """A head that nobody trained, whose deepest feature is handed to the target's own head.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        config = config_for(
            target.config,
            target.name,
            fingerprint_of(target.source),
            algorithm=algorithm,
            draft_vocab_size=None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size),
            **fields,
        )
        few = config.draft_vocab_size < config.vocab_size
        ids_K = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size) if few else None
        head = cls(config, ids_K=ids_K)
        head.draw(torch.Generator().manual_seed(seed), spread=0.2)
        head.begin_near(target.model)
        return head.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: EagleConfig | None = None) -> str:
        """The command that trains a head."""
        return f"foretoken train eagle --target {target} --out DIR"

    def grown(self, target: LanguageModel, origin: Origin) -> Eagle:
        """The same drafts for a model that was grown from its target, at the same cost.

        It reads the first copy in the stream, which is the original's, at the depths that became of its own; tables of
        the original's width come with it.

        Raises:
            MismatchError: its features are normed before they are fused, or it is EAGLE-2's.
        """
        origin.check_shared(self.title, target.name)
        config = self.config
        if not self.paired or config.norm_before_fc or config.fc_norm:
            raise MismatchError(
                f"the EAGLE head of '{config.target}' does not serve '{target.name}': only heads of EAGLE-3 without "
                "norms before the fusion do; train one for it"
            )
        parts, width = anatomy.find(target.model), config.target_width
        wide = target.config.get_text_config(decoder=True).hidden_size
        depths = tuple(origin.depth(each) for each in config.depths_of(origin.layers))
        mark = fingerprint_of(target.source)
        head = Eagle(
            replace(config, target=target.name, target_fingerprint=mark, target_width=wide, depths=depths),
            ids_K=self.ids_K,
            own_head=True,
            own_embedding=True,
        )
        fused_WNF = self.fc.weight.detach().unflatten(1, (config.num_features, width))
        rows_VW, table_VW = (cast(Any, part).weight.detach()[:, :width].cpu() for part in (parts.head, parts.embedding))
        found = {
            **self.state_dict(),
            "fc.weight": F.pad(fused_WNF, (0, wide - width)).flatten(1),
            _HEAD: rows_VW if self.ids_K is None else rows_VW[self.ids_K],
            _EMBEDDING: table_VW,
        }
        for name, own in ((_HEAD, self.lm_head), (_EMBEDDING, self.embed_tokens)):
            if own is not None:
                found[name] = own.weight.detach()
        head.take(found)
        return head.eval()

    def check_target(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        """Refuse a head of another target; one that says no fingerprint is judged by its shapes."""
        config = self.config
        if config.target_fingerprint != UNKNOWN:
            remedy = f"train one with '{self.how(target.name, '', config)}'"
            made = f"the {self.title} was trained for the target"
            check_fingerprint(made, config.target, config.target_fingerprint, target, remedy)
        self.check_shape(target)

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: it is one; the field of ``config.json`` is named.
        """
        super().check_shape(model)
        config, width = self.config, model.config.get_text_config(decoder=True).hidden_size
        shares = [self.embed_tokens is None and _EMBEDDING, self.lm_head is None and _HEAD]
        if config.width != width and any(shares):
            missing = next(each for each in shares if each)
            raise MismatchError(
                f"the EAGLE head is {config.width} wide and '{model.name}' {width}, so it cannot share the target's: "
                f"{missing} is missing"
            )
        depths = config.depths_of(model.num_layers)
        if min(depths) < 1 or max(depths) > model.num_layers:
            raise MismatchError(
                f"the EAGLE head's eagle_aux_hidden_state_layer_ids are {list(depths)}, but '{model.name}' has "
                f"{model.num_layers} layers"
            )

    def _settings(self) -> dict[str, Any]:
        return to_settings(self.config)

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        return from_settings(settings)


def config_for(
    config: Any,
    target: str,
    fingerprint: str,
    *,
    algorithm: str = EAGLE3,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    **fields: Any,
) -> EagleConfig:
    """A head that fits a model of transformers.

    Its layer is as ``fields_for`` makes it; its depths lie as (2, L/2, L-3) lie in 32 layers.

    Args:
        config: the target's configuration.
        draft_vocab_size: None: all of the vocabulary.
        fields: others of :class:`EagleConfig`.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    found = fields_for(
        config, target, fingerprint, title=Eagle.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
    )
    layers = config.get_text_config(decoder=True).num_hidden_layers
    depths = (max(1, round(layers * 2 / 32)), max(1, layers // 2), max(1, round(layers * 29 / 32)))
    found |= {"algorithm": algorithm, "depths": depths if algorithm == EAGLE3 else ()}
    return EagleConfig(**{**found, **fields})


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _ids_of(config: EagleConfig, d2t_K: Tensor | None, t2d_V: Tensor | None) -> Tensor | None:
    """The tokens of the draft vocabulary, increasing; None: all.

    Raises:
        ValueError: a map is missing or damaged, or the two contradict each other.
    """
    size, whole = config.draft_vocab_size, config.vocab_size
    if d2t_K is None and t2d_V is None:
        if size != whole:
            raise ValueError(f"d2t and t2d are missing, but draft_vocab_size={size} of {whole} tokens")
        return None
    if d2t_K is None or t2d_V is None:
        raise ValueError(f"{'d2t' if d2t_K is None else 't2d'} is missing beside the other map")
    if d2t_K.shape != (size,) or d2t_K.is_floating_point() or d2t_K.dtype == torch.bool:
        raise ValueError(f"d2t is {list(d2t_K.shape)} of {d2t_K.dtype}: integers, [{size}]")
    if t2d_V.shape != (whole,) or t2d_V.is_floating_point():
        raise ValueError(f"t2d is {list(t2d_V.shape)} of {t2d_V.dtype}: bool, [{whole}]")
    ids_K = torch.arange(size) + d2t_K.long()
    if int(ids_K.min()) < 0 or int(ids_K.max()) >= whole:
        raise ValueError(f"d2t leads to tokens {int(ids_K.min())} to {int(ids_K.max())}, of {whole}")
    if any(a >= b for a, b in itertools.pairwise(ids_K.tolist())):
        raise ValueError("d2t leads to tokens that do not increase")
    if not torch.equal(ids_K, t2d_V.nonzero().flatten()):
        raise ValueError("t2d marks other tokens than those that d2t leads to")
    return ids_K
