"""A next-token-prediction layer as a module: the library's own decoder layer, entered with token and feature.

    x_i = eh_proj([enorm(e(x_{i+1})); hnorm(f_i)])  ──  decoder layer  ──  shared_head.norm  ──  head: q of x_{i+2}

f is what the target's final norm gives. Paper: DeepSeek-V3, arXiv:2412.19437, section 2.2.

Letters: T rows, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, ModelError
from foretoken.models import anatomy
from foretoken.models.language_model import LanguageModel

_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
_OWN = {"enorm": "enorm.weight", "hnorm": "hnorm.weight", "norm": "shared_head.norm.weight"}
_EXPERTS = "mlp.experts."


class PredictionLayer(nn.Module):
    """The layer in the target's dtype and on its device, with the target's embedding and head where it has no other.

    Args:
        target: whose checkpoint it was read from.
        tensors: by their names within the layer, see shards.py.
    Raises:
        ModelError: a tensor is missing, of another shape, or not known; it is named.
        MismatchError: it is of another vocabulary.
    Attributes:
        own_head: whether it scores with other rows than the target's.
    """

    def __init__(self, target: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        parts = anatomy.find(target.model)
        text = target.config.get_text_config(decoder=True)
        width, last = text.hidden_size, cast(Any, parts.layers[-1])
        self._where = f"method 'mtp': the prediction layer of '{target.name}'"
        norm = type(last.input_layernorm)
        self.enorm, self.hnorm, self.norm = (norm(width, eps=text.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        number = text.num_hidden_layers  # beyond the dense ones, so that it has experts
        self.layer: Any = type(last)(text, number)
        cast(Any, self.layer).self_attn.layer_idx = 0  # of a cache of its own
        self._take(dict(tensors), target, parts)
        self.to(device=target.device).eval()
        for weight in self.parameters():  # not the buffers: what experts are chosen by is float32, as in the target
            weight.data = weight.data.to(target.dtype)
        self.rotary: Any = parts.body.rotary_emb

    def feature(self, h_TW: Tensor, behind_norm: bool) -> Tensor:
        """What stands for the target's feature at the next position."""
        found: Tensor = self.norm(h_TW) if behind_norm else h_TW
        return found

    def forward(self, ids_T: Tensor, g_TW: Tensor, positions_1T: Tensor) -> Tensor:
        """The layer's output before its norm, [T, W]; within a plan (models/attention.py).

        Args:
            ids_T: tokens.
            g_TW: the features before them.
            positions_1T: of the rows.
        """
        e_TW = nn.functional.embedding(ids_T, self.embedding_VW)
        x_1TW = self.eh_proj(torch.cat([self.enorm(e_TW), self.hnorm(g_TW)], dim=-1))[None]
        tables = self.rotary(x_1TW, positions_1T)
        out: Tensor = self.layer(x_1TW, position_ids=positions_1T, position_embeddings=tables)
        return out[0]

    def score(self, h_TW: Tensor) -> Tensor:
        """Logits [T, V], float32."""
        return nn.functional.linear(self.norm(h_TW), self.head_VW).float()

    # ------------------------------------------------------------------ weights

    def _take(self, tensors: dict[str, Tensor], target: LanguageModel, parts: anatomy.Anatomy) -> None:
        tables, differing = {}, set()
        for name, theirs in ((_EMBEDDING, parts.embedding), (_HEAD, parts.head)):
            own = tensors.pop(name, None)
            shared: Any = theirs.weight
            if own is not None and own.shape[0] != target.vocab_size:
                raise MismatchError(
                    f"{self._where}: {name} has {own.shape[0]} rows, but the vocabulary has {target.vocab_size}: it is "
                    "of another target"
                )
            if own is not None and own.shape != shared.shape:
                raise ModelError(f"{self._where}: {name} is {list(own.shape)}, but {list(shared.shape)} is wanted")
            tables[name] = shared.detach()
            if own is not None and not _same(own, shared):
                tables[name] = own.to(target.device, target.dtype)
                differing.add(name)
        self.embedding_VW, self.head_VW = tables[_EMBEDDING], tables[_HEAD]
        self.own_head = _HEAD in differing
        named = {ours: tensors.pop(theirs, None) for ours, theirs in _OWN.items()}
        given = {f"{ours}.weight": value for ours, value in named.items() if value is not None}
        given |= {"eh_proj.weight": tensors.pop("eh_proj.weight")} if "eh_proj.weight" in tensors else {}
        stacked = self._stacked(tensors)
        given |= {f"layer.{name}": value for name, value in stacked.items()}
        published = {f"{ours}.weight": theirs for ours, theirs in _OWN.items()}
        expected = self.state_dict()
        for name in sorted(expected.keys() | given.keys()):
            shown = published.get(name, name.removeprefix("layer."))
            if name not in given:
                raise ModelError(f"{self._where}: the tensor {shown} is missing")
            if name not in expected:
                raise ModelError(f"{self._where}: the tensor {shown} is not of such a layer")
            if given[name].shape != expected[name].shape:
                raise ModelError(
                    f"{self._where}: {shown} is {list(given[name].shape)}, but {list(expected[name].shape)} is wanted"
                )
        self.load_state_dict({name: value.float() for name, value in given.items()})

    def _stacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Experts that are stored one by one, as the library's layer has them: all of a kind in one tensor."""
        experts = getattr(self.layer.mlp, "experts", None)
        if experts is None or f"{_EXPERTS}gate_up_proj" in tensors:
            return tensors
        rest = {name: value for name, value in tensors.items() if not name.startswith(_EXPERTS)}
        count, both, down = len(experts.gate_up_proj), [], []
        for number in range(count):
            found = {}
            for kind in ("gate_proj", "up_proj", "down_proj"):
                name = f"{_EXPERTS}{number}.{kind}.weight"
                if name not in tensors:
                    raise ModelError(f"{self._where}: the tensor {name} is missing")
                found[kind] = tensors[name]
            both.append(torch.cat([found["gate_proj"], found["up_proj"]]))
            down.append(found["down_proj"])
        if f"{_EXPERTS}{count}.gate_proj.weight" in tensors:
            raise ModelError(f"{self._where}: there are more than {count} experts, the number that its config names")
        return {**rest, f"{_EXPERTS}gate_up_proj": torch.stack(both), f"{_EXPERTS}down_proj": torch.stack(down)}


def _same(own: Tensor, shared: Tensor) -> bool:
    """Whether a copy is one: then the target's is used, and no memory is spent."""
    return torch.equal(own.to(shared.device, shared.dtype), shared)
