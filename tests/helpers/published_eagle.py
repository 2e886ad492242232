"""EAGLE-3 folders as their makers lay them out, with random weights, and an own reference in plain torch.

Nothing here comes from the product: names, keys and arithmetic are written down from the makers' descriptions.

Letters: V vocabulary of the target, S scored tokens, H width of the draft network, T rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 64, 4, 2, 32, 96, 101


@dataclass(frozen=True)
class Folder:
    """A maker's folder.

    Attributes:
        block: prefix of the first block; the further ones are ``layers.1`` and so on.
        taps: the target's stream after so many layers; "final": after its final norm.
        config: keys in addition to the flat ones of a Llama.
        nested: the block's keys lie under this key; None: at the top.
        scored: S.
        maps: which of d2t and t2d there are.
        norms: "input_norm", "fc_norm" or nothing.
        windows: of each layer; 0: none.
        rates: rotary frequencies, and the factor of cos and sin.
        mask: the mask token of P-EAGLE; None: EAGLE-3.
    """

    block: str = "midlayer"
    taps: tuple[Any, ...] = (2, 3, 4)
    config: dict[str, Any] = field(default_factory=dict)
    nested: str | None = None
    prefix: str = ""
    layers: int = 1
    scored: int = 40
    maps: tuple[str, ...] = ("d2t", "t2d")
    own_embedding: bool = False
    own_head: bool = True
    head_norms: bool = False
    norms: str = ""
    normed_residual: bool = False
    normed_output: bool = False
    windows: tuple[int, ...] = ()
    rates: tuple[Any, float] | None = None
    pickled: bool = False
    mask: int | None = None
    ids: tuple[int, ...] = tuple(range(3, 83, 2))

    def block_name(self, number: int) -> str:
        return self.block if number == 0 else f"layers.{number}"

    def tensors(self, seed: int = 5) -> dict[str, Tensor]:
        draw, fused = torch.Generator().manual_seed(seed), "final" not in self.taps
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (WIDTH,)}
        if fused:
            shapes["fc.weight"] = (WIDTH, len(self.taps) * WIDTH)
        if self.norms == "input_norm":
            shapes["input_norm.weight"] = (len(self.taps) * WIDTH,)
        if self.norms == "fc_norm":
            shapes |= {f"fc_norm.{number}.weight": (WIDTH,) for number in range(len(self.taps))}
        for number in range(self.layers):
            b, read = self.block_name(number), 2 * WIDTH if number == 0 else WIDTH
            names = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if number == 0 else [])]
            shapes |= {f"{b}.{name}.weight": (WIDTH,) for name in names}
            shapes[f"{b}.self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, read)
            shapes |= {f"{b}.self_attn.{x}_proj.weight": (KV_HEADS * HEAD_DIM, read) for x in "kv"}
            shapes[f"{b}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
            if self.head_norms:
                shapes |= {f"{b}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
            shapes |= {f"{b}.mlp.{x}_proj.weight": (MLP, WIDTH) for x in ("gate", "up")}
            shapes[f"{b}.mlp.down_proj.weight"] = (WIDTH, MLP)
        if self.mask is not None:
            shapes["mask_hidden"] = (1, 1, len(self.taps) * WIDTH)
        if self.own_head:
            shapes["lm_head.weight"] = (self.scored, WIDTH)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (VOCAB, WIDTH)
        found = {
            name: 1 + 0.3 * torch.randn(shape, generator=draw)
            if len(shape) == 1
            else torch.randn(shape, generator=draw) / shape[-1] ** 0.5
            for name, shape in shapes.items()
        }
        scored_S = torch.tensor(self.ids) if self.scored < VOCAB else torch.arange(VOCAB)
        if "d2t" in self.maps:
            found["d2t"] = scored_S - torch.arange(self.scored)
        if "t2d" in self.maps:
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, scored_S, True)
        return {self.prefix * (name != "lm_head.weight") + name: value for name, value in found.items()}

    def write(self, folder: Path) -> Path:
        block: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": VOCAB,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "model_type": "qwen3" if self.head_norms else "llama",
        }
        config = {"draft_vocab_size": self.scored, **self.config}
        block |= {key: config.pop(key) for key in ("rope_scaling", "layer_types", "sliding_window") if key in config}
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**config, **({self.nested: block} if self.nested else block)}))
        if self.pickled:
            torch.save(self.tensors(), folder / "pytorch_model.bin")
        else:
            save_file(self.tensors(), folder / "model.safetensors")
        return folder

    @torch.inference_mode()
    def logits(
        self, streams: dict[Any, Tensor], tokens: Tensor, known: int, table_VH: Tensor, head_VH: Tensor
    ) -> Tensor:
        """Of the last pair of a text, [S]: pairs from ``known`` on read the network's own output.

        Args:
            streams: the target's, by the names of ``taps``, [T, H] each.
            tokens: x_0, x_1, ...; pair i is the state of row i and token i + 1.
            table_VH, head_VH: the target's embedding and LM head.
        """
        w = {name.removeprefix(self.prefix): value for name, value in self.tensors().items()}
        table_VH, scored = w.get("embed_tokens.weight", table_VH), torch.arange(self.scored)
        if "d2t" in w:
            scored = scored + w["d2t"]
        head_SH = w.get("lm_head.weight", head_VH[scored])

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

        rates, gain = self.rates or (10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM), 1.0)
        angles = torch.arange(len(tokens)).double()[:, None] * rates
        cos, sin = (gain * torch.cat([f(angles)] * 2, -1).float() for f in (torch.cos, torch.sin))

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos[: x.shape[-2]] + torch.cat([-b, a], -1) * sin[: x.shape[-2]]

        def attend(z: Tensor, b: str, window: int) -> Tensor:
            q, k, v = ((z @ w[f"{b}.self_attn.{x}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)) for x in "qkv")
            if self.head_norms:
                q, k = norm(q, f"{b}.self_attn.q_norm"), norm(k, f"{b}.self_attn.k_norm")
            q, k, v = turn(q.transpose(0, 1)), turn(k.transpose(0, 1)), v.transpose(0, 1)
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
            ago = torch.arange(len(z))[:, None] - torch.arange(len(z))
            scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill((ago < 0) | (ago >= (window or 1 << 30)), -math.inf)
            return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{b}.self_attn.o_proj.weight"].T

        u = torch.cat([streams[each][:known] for each in self.taps], -1)
        if self.mask is not None:
            num_masks = len(tokens) - 1 - known
            u = torch.cat([u, w["mask_hidden"][0].expand(num_masks, -1)])
            tokens = torch.cat([tokens[: known + 1], torch.full((num_masks,), self.mask)])
        if self.norms == "input_norm":
            u = norm(u, "input_norm")
        if self.norms == "fc_norm":
            u = torch.cat([norm(each, f"fc_norm.{n}") for n, each in enumerate(u.chunk(len(self.taps), -1))], -1)
        g = u @ w["fc.weight"].T if "fc.weight" in w else u
        while True:
            b = self.block
            e, normed = norm(table_VH[tokens[1 : len(g) + 1]], f"{b}.input_layernorm"), norm(g, f"{b}.hidden_norm")
            z = torch.cat([e, normed], -1)
            h = normed if self.normed_residual else g
            for number in range(self.layers):
                b = self.block_name(number)
                window = self.windows[number] if self.windows else 0
                h = h + attend(z if number == 0 else norm(h, f"{b}.input_layernorm"), b, window)
                m = norm(h, f"{b}.post_attention_layernorm")
                up, gate = m @ w[f"{b}.mlp.up_proj.weight"].T, F.silu(m @ w[f"{b}.mlp.gate_proj.weight"].T)
                h = h + (gate * up) @ w[f"{b}.mlp.down_proj.weight"].T
            if len(g) == len(tokens) - 1:
                return norm(h, "norm")[-1] @ head_SH.T
            g = torch.cat([g, (norm(h, "norm") if self.normed_output else h)[-1:]])
