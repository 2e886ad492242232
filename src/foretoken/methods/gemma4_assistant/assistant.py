"""A published assistant of Gemma 4: a few layers with queries only, over keys and values of the target's own cache.

    x      = pre_projection(E(token) + f)         E: the target's scaled embedding; + puts both side by side
    layer  queries of position P over the rows 0 .. P - 1 of the target's last layer of the same kind with own keys
    u      = norm(x);   logits = LM head of u;   the next token's f = post_projection(u)

Position P is the root's, for every token of a draft. The first f is the target's final state, normed, of row P - 1. The
layers are transformers' own; attention, and the LM head over chosen clusters of tokens, are here.

Letters: R rows, H query heads, G key/value heads, L columns, d head width, W width of the target, U own width,
V vocabulary, K clusters, S tokens of the chosen clusters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig

from foretoken.core.errors import MismatchError
from foretoken.core.protocols import Plan, Scoring
from foretoken.drafting.learned_part import LearnedConfig, LearnedPart
from foretoken.forward import anatomy, attention
from foretoken.forward.cache import KVCache
from foretoken.models.language_model import LanguageModel

_REMEDY = ": name the assistant of this target, or use method='draft_model' or 'suffix'"


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(LearnedConfig):
    """Of a folder, which does not name its target.

    Attributes:
        settings: content of its ``config.json``.
    """

    settings: Mapping[str, Any]


class TargetKeys(Plan):
    """Each row attends to committed rows of one slot of the target's cache.

    Args:
        cache: the target's.
        layers: of the target, for each layer that attends.
        rows: slot and number of committed rows for each row.
    """

    def __init__(self, cache: KVCache, layers: Sequence[int], rows: Sequence[tuple[int, int]]) -> None:
        self._cache, self._layers, self.rows = cache, layers, rows

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        """Attend to the rows, or to the last ``window`` of them, and not to the given keys, which are none."""
        found = []
        for q_Hd, (slot, length) in zip(q_HTD.transpose(0, 1), self.rows, strict=True):
            seen = slice(max(0, length - (scoring.window or length)), length)
            pair = self._cache.committed(self._layers[layer], slot)
            k_1GLd, v_1GLd = (each[None, :, seen].to(q_Hd.dtype) for each in pair)
            q_1Gnd = q_Hd[None].unflatten(1, (k_1GLd.shape[1], -1))
            found.append(F.scaled_dot_product_attention(q_1Gnd, k_1GLd, v_1GLd, scale=scoring.scaling)[0].flatten(0, 1))
        return torch.stack(found)


class Gemma4Assistant(LearnedPart, nn.Module):
    """The network of a folder; its modules have the published names."""

    algorithm = "gemma4_assistant"
    title = "Gemma 4 assistant"
    Config = AssistantConfig

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.config, self.whole = config, AutoConfig.for_model(**config.settings)
        text: Any = self.whole.get_text_config()
        kind, width, backbone = MODEL_MAPPING[type(text)], text.hidden_size, self.whole.backbone_hidden_size
        # transformers 5.23 makes no model of layers that all read the keys of others
        shared = {"kv_sharing_modes": property(lambda own: ["reuse"] * own.num_hidden_layers)}
        text.__class__, text._attn_implementation = type("AllShared", (type(text),), shared), attention.NAME
        self.model, self.kinds = kind(text), text.layer_types
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        if self.whole.use_ordered_embeddings:
            self.masked_embedding: Any = nn.Module()
            self.masked_embedding.centroids = nn.Linear(width, self.whole.num_centroids, bias=False)
            self.masked_embedding.token_ordering = nn.Buffer(torch.arange(text.vocab_size))
            if text.vocab_size % self.whole.num_centroids:
                raise ValueError(f"num_centroids={self.whole.num_centroids} for {text.vocab_size} tokens")

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their published names."""
        return self.state_dict()

    @classmethod
    def of(cls, config: AssistantConfig, tensors: Mapping[str, Tensor]) -> "Gemma4Assistant":
        """Build the network; every tensor is read, and none is missing."""
        try:
            found = cls(config)
        except Exception as error:  # config classes check themselves by errors of their own
            raise ValueError(str(error)) from None
        found.load_state_dict(
            {name: each for name, each in tensors.items() if name != "lm_head.weight"}
        )  # the embedding
        return found.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """None is trained here."""
        return ""

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        return {"target": f"an unnamed target ({cls.title})", "target_fingerprint": "", "settings": settings}

    def check_target(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        """Compare shapes only: a probe decides about the weights."""
        self.check_shape(target)

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width or vocabulary, or without a layer of each kind."""
        own = self.whole.backbone_hidden_size, self.model.config.vocab_size
        if own != (model.width, model.vocab_size):
            raise MismatchError(
                f"the {self.title}'s backbone_hidden_size is {own[0]}, for {own[1]} tokens, but '{model.name}' has "
                f"{model.width} and {model.vocab_size}{_REMEDY}"
            )
        if missing := set(self.kinds) - set(anatomy.last_own_layers(model.config.get_text_config(decoder=True))):
            raise MismatchError(
                f"the {self.title} reads a layer of {min(missing)}, and '{model.name}' has none{_REMEDY}"
            )

    def layers_of(self, model: LanguageModel, cache: KVCache) -> list[int]:
        """For each layer the target's that has the keys and values.

        Args:
            cache: of the target, with a row in its first slot.
        Raises:
            MismatchError: their heads are of another size.
        """
        last = anatomy.last_own_layers(model.config.get_text_config(decoder=True))
        for index, kind in enumerate(self.kinds):
            keys_GLd, own = cache.committed(last[kind], 0)[0], self.model.layers[index].self_attn
            heads = own.q_proj.out_features // own.head_dim
            if keys_GLd.shape[-1] != own.head_dim or heads % len(keys_GLd):
                raise MismatchError(
                    f"layer {index} of the {self.title} has {heads} heads of {own.head_dim} elements, but layer "
                    f"{last[kind]} of '{model.name}' keeps {len(keys_GLd)} of {keys_GLd.shape[-1]}{_REMEDY}"
                )
        return [last[kind] for kind in self.kinds]

    def read(self, e_RW: Tensor, f_RW: Tensor, positions_R: Tensor, keys: TargetKeys) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and the next features [R, W].

        Args:
            e_RW: the target's scaled embeddings of the rows' tokens.
            f_RW: the target's final states, normed, or the features that an earlier call returned.
            positions_R: of the roots.
        """
        x_RU = self.pre_projection(torch.cat([e_RW, f_RW], dim=-1))
        none = x_RU.new_empty(1, 1, 0, 1)
        with attention.following(keys):
            u_RU = self.model(
                inputs_embeds=x_RU[None],
                position_ids=positions_R[None],
                attention_mask=dict.fromkeys(self.kinds),
                shared_kv_states=dict.fromkeys(self.kinds, (none, none)),
                use_cache=False,
                logits_to_keep=positions_R,  # with a number it would cut per-layer inputs, which it lacks
            ).last_hidden_state[0]
        return self._logits(u_RU), self.post_projection(u_RU)

    def _logits(self, u_RU: Tensor) -> Tensor:
        """Those of all tokens; of tokens outside of the best clusters minus infinity: they are never drafted."""
        weight_VU, whole = self.model.embed_tokens.weight, self.whole
        if not whole.use_ordered_embeddings:
            return F.linear(u_RU, weight_VU)
        chosen_RK = self.masked_embedding.centroids(u_RU).topk(whole.centroid_intermediate_top_k).indices
        ids_RS = self.masked_embedding.token_ordering.view(whole.num_centroids, -1)[chosen_RK].flatten(1)
        scores_RS = (weight_VU[ids_RS] @ u_RU[:, :, None])[..., 0]
        return u_RU.new_full((len(u_RU), len(weight_VU)), -torch.inf).scatter_(1, ids_RS, scores_RS)
