"""MTP's draft network, a next-token-prediction layer: a decoder layer of transformers over pairs of feature and token.

    x_i = eh_proj([enorm(e(x_{i+1})); hnorm(f_i)])  ──  decoder layer  ──  norm  ──  LM head: q of x_{i+2}

f is the output of the target's final norm. Paper: DeepSeek-V3, arXiv:2412.19437, section 2.2.

Letters: S rows of the target, T pairs, F = W width, V vocabulary.
"""

import copy
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
from foretoken.methods.mtp.layouts import EMBEDDING, EXPERTS, HEAD, LAYOUTS

_KINDS = ("gate_proj", "up_proj", "down_proj")  # matrices of an expert in published checkpoints
_BOTH, _DOWN = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj"  # names in transformers: all experts in one tensor


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
        shared = q_HTD.shape[0] != k_GTD.shape[0]
        found = F.scaled_dot_product_attention(
            q_HTD[None], k_GTD[None], v_GTD[None], is_causal=True, scale=scoring.scaling, enable_gqa=shared
        )
        return found[0].transpose(0, 1)


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
        text = copy.copy(model.config.get_text_config(decoder=True))
        text._attn_implementation = attention.NAME  # independent of the target's own attention
        self.layout = LAYOUTS[text.model_type]
        self._where = f"method 'mtp': the prediction layer of '{name}'"
        width, last = text.hidden_size, cast(Any, parts.layers[-1])
        norm = type(last.input_layernorm)
        self.enorm, self.hnorm, self.norm = (norm(width, eps=text.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer: Any = type(last)(text, _number(text))
        cast(Any, self.layer).self_attn.layer_idx = 0  # in its own cache
        # a quantised head is converted to a dense float32 weight
        tables = (cast(Any, part).weight.detach().to(dtype) for part in (parts.embedding, parts.head))
        self.embedding_VW, self.head_VW = tables
        self.own_head = False
        if tensors is not None:
            self._take(dict(tensors))
        self.to(device=next(model.parameters()).device).eval()
        for weight in self.parameters():  # not the buffers: the expert choice biases are float32, as in the target
            weight.data = weight.data.to(dtype)
        self.rotary: Any = parts.body.rotary_emb

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
            if name in layout.parts:
                found[layout.parts[name]] = value
            elif name == f"layer.{_BOTH}":
                for number, both in enumerate(value):
                    for kind, matrix in zip(_KINDS[:2], both.chunk(2), strict=True):
                        found[f"{layout.inner}{EXPERTS}{number}.{kind}.weight"] = matrix
            elif name == f"layer.{_DOWN}":
                for number, matrix in enumerate(value):
                    found[f"{layout.inner}{EXPERTS}{number}.{_KINDS[2]}.weight"] = matrix
            else:
                found[layout.inner + name.removeprefix("layer.")] = value
        return found

    def _take(self, tensors: dict[str, Tensor]) -> None:
        self.embedding_VW, _ = self._table(tensors, EMBEDDING, self.embedding_VW)
        self.head_VW, self.own_head = self._table(tensors, HEAD, self.head_VW)
        theirs = {published: ours for ours, published in self.layout.parts.items()}
        given = {theirs[name]: tensors.pop(name) for name in list(tensors) if name in theirs}
        inner = self.layout.inner
        other = next((name for name in tensors if not name.startswith(inner)), None)
        if other is not None:
            raise ModelError(f"{self._where}: the tensor {other} is not of such a layer")
        stacked = self._stacked({name.removeprefix(inner): value for name, value in tensors.items()})
        given |= {f"layer.{name}": value for name, value in stacked.items()}
        expected = self.state_dict()
        for name in sorted(expected.keys() | given.keys()):
            shown = self.layout.parts.get(name, inner + name.removeprefix("layer."))
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
        experts, inner = getattr(self.layer.mlp, "experts", None), self.layout.inner
        if experts is None or _BOTH in tensors:
            return tensors
        rest = {name: value for name, value in tensors.items() if not name.startswith(EXPERTS)}
        count, both, down = len(experts.gate_up_proj), [], []
        for number in range(count):
            found = {}
            for kind in _KINDS:
                name = f"{EXPERTS}{number}.{kind}.weight"
                if name not in tensors:
                    raise ModelError(f"{self._where}: the tensor {inner}{name} is missing")
                found[kind] = tensors[name]
            both.append(torch.cat([found["gate_proj"], found["up_proj"]]))
            down.append(found["down_proj"])
        if f"{EXPERTS}{count}.gate_proj.weight" in tensors:
            raise ModelError(f"{self._where}: there are more than {count} experts, the number that its config names")
        return {**rest, _BOTH: torch.stack(both), _DOWN: torch.stack(down)}


def _number(text: Any) -> int:
    """Return the layer number that gives transformers' layer the right kind: after the others, or of full attention."""
    types, kinds = (getattr(text, f"{each}layer_types", None) for each in ("", "mlp_"))
    if kinds is not None and len(kinds) <= text.num_hidden_layers:
        return len(kinds) - 1  # of experts, after the dense ones
    if types is None or (len(types) <= text.num_hidden_layers and "linear_attention" not in types):
        return cast(int, text.num_hidden_layers)  # after the dense ones, so that it has experts
    return max(number for number, each in enumerate(types) if each == "full_attention")
