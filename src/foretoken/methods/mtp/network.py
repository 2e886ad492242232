"""MTP's draft network, a next-token-prediction layer: a decoder layer of transformers over pairs of feature and token.

    x_i = eh_proj([enorm(e(x_{i+1})); hnorm(f_i)])  ──  decoder layer  ──  norm  ──  LM head: q of x_{i+2}

f is the output of the target's final norm. Paper: DeepSeek-V3, arXiv:2412.19437, section 2.2.

Letters: S rows of the target, T pairs, F = W width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, ModelError
from foretoken.core.protocols import Plan, Scoring
from foretoken.drafting.feature_heads.description import Concatenated, Layers, LmHead, NetworkDescription, Recycle, Taps
from foretoken.drafting.feature_heads.pair_network import PairNetwork
from foretoken.forward import anatomy, attention
from foretoken.forward.stored_embedding import dtype_of
from foretoken.methods.mtp.layouts import EMBEDDING, EXPERTS, HEAD, LAYOUTS, NORM

_STACKED = {  # tensors of all experts in transformers -> the matrices of one in published checkpoints
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def describe(*, norm_output: bool) -> NetworkDescription:
    """Describe the network as data; equal to :meth:`PredictionLayer.forward`."""
    return NetworkDescription(
        taps=Taps(final=True),
        entry=Concatenated("eh_proj", "enorm", "hnorm"),
        layers=Layers(first_norm=False, library="layer"),
        recycle=Recycle(normed=norm_output),
        lm_head=LmHead(own_rows="shared_head.head", copied=True),
    )


class _Causal(Plan):
    """Causal attention over one text."""

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        (heads, count, _), groups = q_HTD.shape, len(k_GTD)
        k_HTD, v_HTD = (each.repeat_interleave(heads // groups, 0) for each in (k_GTD, v_GTD))
        ago_TT = torch.arange(count)[:, None] - torch.arange(count)
        seen_TT = (ago_TT >= 0) & (ago_TT < (scoring.window or count))
        scores = (q_HTD @ k_HTD.mT * scoring.scaling).masked_fill(~seen_TT.to(q_HTD.device), -torch.inf)
        if scoring.sinks_H is not None:
            scores = torch.cat([scores, scoring.sinks_H[:, None, None].expand(-1, count, 1)], -1)
        return (scores.softmax(-1)[..., :count] @ v_HTD).transpose(0, 1)


class _Rotary(nn.Module):
    """The target's rotary tables, of the layer's kind of attention; None in a target without them."""

    def __init__(self, rotary: Any, text: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.kinds = text.layer_types[:1] if hasattr(rotary, "layer_types") else ()

    def forward(self, x_1TW: Tensor, positions_1T: Tensor) -> Any:
        return None if self.rotary is None else self.rotary(x_1TW, positions_1T, *self.kinds)


class _InTurn(nn.ModuleList):
    """Blocks that are one layer together (Nemotron-H)."""

    def forward(self, x_1TW: Tensor, **given: Any) -> Tensor:
        for block in self:
            x_1TW = block(x_1TW, **given)
        return x_1TW


class PredictionLayer(PairNetwork):
    """The layer in the target's dtype and on its device, with the target's embedding and LM head or its own.

    Args:
        model: of transformers, of a type in ``LAYOUTS``.
        name: of the target, for messages.
        tensors: by their names within the layer, see shards.py; None: weights are initialised later.
        norm_output: the recycled feature is the output of the layer's norm.
    Raises:
        ModelError: a tensor is missing, has another shape, or is unknown; the message names it.
        MismatchError: the layer has another vocabulary.
    Attributes:
        own_head: whether its LM head differs from the target's.
    """

    def __init__(
        self, model: Any, name: str, tensors: Mapping[str, Tensor] | None = None, *, norm_output: bool = True
    ) -> None:
        super().__init__()
        self.description, self.ids_K = describe(norm_output=norm_output), None
        parts, dtype = anatomy.find(model), dtype_of(model.get_input_embeddings())
        config = model.config.get_text_config(decoder=True)
        self.layout = LAYOUTS[config.model_type]
        text = self.layout.of_layer(config)
        text._attn_implementation = attention.NAME  # independent of the target's own attention
        self._where = f"method 'mtp': the prediction layer of '{name}'"
        width, last, norm = text.hidden_size, cast(Any, type(parts.layers[-1])), cast(Any, type(parts.final_norm))
        eps = text.rms_norm_eps if hasattr(text, "rms_norm_eps") else text.layer_norm_epsilon
        self.enorm, self.hnorm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        blocks = self.layout.fields.get("layers_block_type")
        self.layer: Any = last(text, 0) if blocks is None else _InTurn(last(text, each) for each in range(len(blocks)))
        # a quantised head is converted to a dense float32 weight
        tables = (cast(Any, part).weight.detach().to(dtype) for part in (parts.embedding, parts.head))
        self.embedding_VW, self.head_VW = tables
        self.own_head = False
        if tensors is not None:
            shared = {} if NORM in self.layout.parts else {NORM: cast(Any, parts.final_norm).weight}
            self._take(dict(tensors), shared)
        self.to(device=next(model.parameters()).device).eval()
        for weight in self.parameters():  # not the buffers: the expert choice biases are float32, as in the target
            weight.data = weight.data.to(dtype)
        self.rotary = _Rotary(getattr(parts.body, "rotary_emb", None), text)

    # ------------------------------------------------------------------ the network

    def forward(self, states_SF: Tensor, tokens_T: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the LM head, [T, W]; see :class:`PairNetwork`. Equation numbers are DeepSeek-V3's."""
        emb = F.embedding(tokens_T, embedding_VW)
        h = states_SF
        while True:
            # (21)  h'_i = M [RMSNorm(h_i); RMSNorm(Emb(t_{i+1}))]; published layers concatenate the token's half first
            x = self.eh_proj(torch.cat([self.enorm(emb[: len(h)]), self.hnorm(h)], dim=-1))[None]
            # (22)  h_{1:T} = TRM(h'_{1:T})
            positions = torch.arange(len(h))[None]
            with attention.following(_Causal()):
                out = self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))[0]
            # (23)  P = OutHead(h): the norm here, the rows in the LM head
            normed: Tensor = self.norm(out)
            if len(h) == len(tokens_T):
                return normed
            h = torch.cat([h, (normed if self.description.recycle.normed else out)[-1:]])  # replaces the next h

    def embedding_of(self, model: Any) -> Tensor:
        return self.embedding_VW

    def lm_head_of(self, model: Any) -> Tensor:
        return self.head_VW

    @property
    def has_own_rows(self) -> bool:
        return self.own_head

    # ------------------------------------------------------------------ weights

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in the published layout, by their names within the layer, experts one by one."""
        layout, found = self.layout, {}
        for name, value in self.state_dict().items():
            base, _, kind = name.removeprefix("layer.").rpartition(EXPERTS)
            if name in layout.parts:
                found[layout.parts[name]] = value
            elif not base or kind not in _STACKED:
                found[layout.theirs(name.removeprefix("layer."))] = value
            else:
                parts = _STACKED[kind]
                for number, both in enumerate(value):
                    for part, matrix in zip(parts, both.chunk(len(parts)), strict=True):
                        found[layout.theirs(f"{base}{EXPERTS}{number}.{part}.weight")] = matrix
        return found

    def _take(self, tensors: dict[str, Tensor], given: dict[str, Tensor]) -> None:
        self.embedding_VW, _ = self._table(tensors, EMBEDDING, self.embedding_VW)
        self.head_VW, self.own_head = self._table(tensors, HEAD, self.head_VW)
        theirs = {published: ours for ours, published in self.layout.parts.items()}
        given |= {theirs[name]: tensors.pop(name) for name in list(tensors) if name in theirs}
        other = next((name for name in tensors if not name.startswith(self.layout.inner)), None)
        if other is not None:
            raise ModelError(f"{self._where}: the tensor {other} is not of such a layer")
        stacked = self._stacked({self.layout.ours(name): value for name, value in tensors.items()})
        given |= {f"layer.{name}": value for name, value in stacked.items()}
        expected = self.state_dict()
        for name in sorted(expected.keys() | given.keys()):
            shown = self.layout.parts.get(name) or self.layout.theirs(name.removeprefix("layer."))
            if name not in given:
                raise ModelError(f"{self._where}: the tensor {shown} is missing")
            if name not in expected:
                raise ModelError(f"{self._where}: the tensor {shown} is not of such a layer")
            if given[name].shape != expected[name].shape:
                raise ModelError(
                    f"{self._where}: {shown} is {list(given[name].shape)}, but must be {list(expected[name].shape)}"
                )
            self._check_numbers(shown, given[name])
        self.load_state_dict({name: value.float() for name, value in given.items()})

    def _table(self, tensors: dict[str, Tensor], name: str, shared: Tensor) -> tuple[Tensor, bool]:
        """Return the rows of an embedding or a head, and whether they differ from the target's."""
        own = tensors.pop(name, None)
        if own is None:
            return shared, False
        if own.shape[0] != shared.shape[0]:
            raise MismatchError(
                f"{self._where}: {name} has {own.shape[0]} rows, but the vocabulary has {shared.shape[0]}: it "
                "belongs to another target"
            )
        if own.shape != shared.shape:
            raise ModelError(f"{self._where}: {name} is {list(own.shape)}, but must be {list(shared.shape)}")
        self._check_numbers(name, own)
        own = own.to(shared.device, shared.dtype)
        return (shared, False) if torch.equal(own, shared) else (own, True)  # a copy needs no memory

    def _check_numbers(self, name: str, value: Tensor) -> None:
        if not bool(value.isfinite().all()):
            raise ModelError(f"{self._where}: {name} holds NaN or infinite values: fetch its file again")

    def _stacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stack separately stored experts in the layout of transformers: one tensor for all experts of a kind."""
        for name, stack in self.layer.state_dict().items():
            base, _, kind = name.rpartition(EXPERTS)
            if not base or kind not in _STACKED or name in tensors:
                continue
            found = []
            for number in range(len(stack)):
                names = [f"{base}{EXPERTS}{number}.{part}.weight" for part in _STACKED[kind]]
                missing = next((each for each in names if each not in tensors), None)
                if missing is not None:
                    raise ModelError(f"{self._where}: the tensor {self.layout.theirs(missing)} is missing")
                found.append(torch.cat([tensors.pop(each) for each in names]))
            if f"{base}{EXPERTS}{len(stack)}.{_STACKED[kind][0]}.weight" in tensors:
                raise ModelError(
                    f"{self._where}: there are more than {len(stack)} experts, the number that its config names"
                )
            tensors[name] = torch.stack(found)
        return tensors
