"""DFlash, DSpark and DFlash2 folders of several makers, with random weights, against a reference written here."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.draft import NO_DRAFT, PointMass, Sampled
from foretoken.core.errors import MismatchError, ModelError
from foretoken.core.protocols import Budget, Features
from foretoken.drafting.published.folder import method_for
from foretoken.methods.dflash.checkpoint import DFlash
from foretoken.methods.dflash.drafter import DFlashDrafter
from foretoken.models.load import load, load_as_is
from helpers.gguf_heads import save as save_gguf
from helpers.golden import tokens_of
from helpers.requests import make_request
from helpers.tiny_models import save_model
from helpers.untrained import random_part

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS, RANK, MASK = 64, 4, 2, 16, 96, 101, 6, 8, 100
IDS = list(range(3, 83, 2))


@dataclass(frozen=True)
class Folder:
    """A maker's folder; see helpers/published_eagle.py for the style.

    Attributes:
        taps: the target's stream after so many layers.
        windows, causal: of each layer of the block.
        markov: kind of the Markov head; empty: none.
        conv: rows that a convolution reads, in groups of 16 channels; 0: there is none.
        selector: of 7 candidates.
        short: ModelOpt's names of the heads.
    """

    taps: tuple[int, ...]
    config: dict[str, Any]
    nested: str | None = None
    rows: int = 5
    anchor_predicts: bool = False
    own_tables: bool = False
    scored: int = VOCAB
    windows: tuple[int, ...] = (0, 0)
    causal: tuple[bool, ...] = (False, False)
    markov: str = ""
    conv: int = 0
    selector: bool = False
    prefix: str = ""
    short: bool = False
    cap: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(6)
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, len(self.taps) * WIDTH)}
        shapes |= {"hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
        for n in range(len(self.windows)):
            b = f"layers.{n}"
            shapes |= {f"{b}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
            shapes |= {f"{b}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
            shapes[f"{b}.self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, WIDTH)
            shapes |= {f"{b}.self_attn.{x}_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH) for x in "kv"}
            shapes[f"{b}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
            shapes |= {f"{b}.mlp.{x}_proj.weight": (MLP, WIDTH) for x in ("gate", "up")}
            shapes[f"{b}.mlp.down_proj.weight"] = (WIDTH, MLP)
            for half in ("attention", "mlp") if self.conv else ():
                shapes[f"{b}.{half}_conv.base_kernel"] = (2, self.conv, WIDTH)
                shapes[f"{b}.{half}_conv.kernel_projection.weight"] = (2 * self.conv * WIDTH // 16, WIDTH)
        if self.own_tables:
            shapes |= {"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (self.scored, WIDTH)}
        if self.selector:
            shapes |= {f"candidate_selector.{x}_codebook": (VOCAB, RANK) for x in ("predecessor", "successor")}
            shapes["candidate_selector.hidden_projection.weight"] = (RANK, WIDTH)
        if self.markov:
            m = "markov_head."
            shapes |= {f"{m}markov_w1.weight": (VOCAB, RANK), f"{m}markov_w2.weight": (self.scored, RANK)}
            if self.markov == "gated":
                shapes |= {f"{m}gate_proj.weight": (RANK, WIDTH + RANK), f"{m}gate_proj.bias": (RANK,)}
            if self.markov == "rnn":
                shapes |= {f"{m}joint_proj.weight": (3 * RANK, 2 * RANK + WIDTH), f"{m}joint_proj.bias": (3 * RANK,)}
            shapes |= {"confidence_head.proj.weight": (1, WIDTH + RANK), "confidence_head.proj.bias": (1,)}
        found = {
            name: 1 + 0.3 * torch.randn(shape, generator=draw)
            if len(shape) == 1
            else torch.randn(shape, generator=draw)
            * (1.0 if "markov" in name or "_codebook" in name else shape[-1] ** -0.5)
            for name, shape in shapes.items()
        }
        if self.scored < VOCAB:
            found["d2t"] = torch.tensor(IDS) - torch.arange(self.scored)
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(IDS), True)
        found = {self.prefix + name: value for name, value in {**found, **self.weights}.items()}
        if self.short:
            found = {k.replace("markov_head.", "").replace("_head.proj", "_proj"): v for k, v in found.items()}
        return found

    def write(self, folder: Path) -> Path:
        block = {
            "model_type": "qwen3",
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": len(self.windows),
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": VOCAB,
        }
        if any(self.windows):
            block["layer_types"] = ["sliding_attention" if each else "full_attention" for each in self.windows]
            block["sliding_window"] = max(self.windows)
        config = {**self.config, **({self.nested: block} if self.nested else block)}
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    @torch.inference_mode()
    def logits(
        self, streams: dict[int, Tensor], anchor: int, drafted: list[int], tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Of every draft token, given the drafted ones before it, [slots, K].

        Args:
            streams: the target's of the rows before the anchor, [N, W] each.
            tables: the target's embedding and LM head.
        """
        w = {name.removeprefix(self.prefix): value for name, value in replace(self, short=False).tensors().items()}
        table, head = w.get("embed_tokens.weight", tables[0]), w.get("lm_head.weight", tables[1])

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}.weight"]

        c = norm(torch.cat([streams[each] for each in self.taps], -1) @ w["fc.weight"].T, "hidden_norm")
        n, total = len(c), len(c) + self.rows
        angles = torch.arange(total).double()[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        cos, sin = (torch.cat([f(angles)] * 2, -1).float() for f in (torch.cos, torch.sin))

        def heads(x: Tensor, name: str, at: slice, normed: str = "") -> Tensor:
            y = (x @ w[f"{name}.weight"].T).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            if not normed:
                return y
            y = norm(y, normed)
            left, right = y.chunk(2, -1)
            return y * cos[at] + torch.cat([-right, left], -1) * sin[at]

        def around(y: Tensor, name: str, half: Callable[[Tensor], Tensor]) -> Tensor:
            if not self.conv:
                return half(y)
            delta = (y @ w[f"{name}.kernel_projection.weight"].T).view(self.rows, 2, self.conv, WIDTH // 16)

            def mixed(z: Tensor, side: int) -> Tensor:
                out = torch.zeros_like(z)
                for j, t, ch in itertools.product(range(self.rows), range(self.conv), range(WIDTH)):
                    if j >= t:
                        out[j, ch] += (w[f"{name}.base_kernel"][side, t, ch] + delta[j, side, t, ch // 16]) * z[
                            j - t, ch
                        ]
                return out

            return mixed(half(mixed(y, 0)), 1)

        x = table[torch.tensor([anchor, *[MASK] * (self.rows - 1)])]
        ago = torch.arange(n, total)[:, None] - torch.arange(total)
        for number, (window, causal) in enumerate(zip(self.windows, self.causal, strict=True)):
            a, b = f"layers.{number}.self_attn", f"layers.{number}"

            def attention(y: Tensor, a: str = a, window: int = window, causal: bool = causal) -> Tensor:
                q = heads(y, f"{a}.q_proj", slice(n, total), f"{a}.q_norm")
                both = (c, slice(n)), (y, slice(n, total))
                k = torch.cat([heads(z, f"{a}.k_proj", at, f"{a}.k_norm") for z, at in both], 1)
                v = torch.cat([heads(z, f"{a}.v_proj", at) for z, at in both], 1)
                k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
                unseen = (ago >= (window or 1 << 30)) | ((ago < 0) & causal)
                scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(unseen, -math.inf)
                return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{a}.o_proj.weight"].T

            def mlp(y: Tensor, b: str = b) -> Tensor:
                gated = F.silu(y @ w[f"{b}.mlp.gate_proj.weight"].T) * (y @ w[f"{b}.mlp.up_proj.weight"].T)
                return gated @ w[f"{b}.mlp.down_proj.weight"].T

            x = x + around(norm(x, f"{b}.input_layernorm"), f"{b}.attention_conv", attention)
            x = x + around(norm(x, f"{b}.post_attention_layernorm"), f"{b}.mlp_conv", mlp)
        x = norm(x, "norm")[0 if self.anchor_predicts else 1 :]
        found, state = [], torch.zeros(RANK)
        for n_k, before in zip(x, [anchor, *drafted], strict=False):
            y = n_k @ head.T
            if self.markov:
                p = "markov_head."
                m = w[f"{p}markov_w1.weight"][before]
                if self.markov == "gated":
                    gate = w[f"{p}gate_proj.weight"] @ torch.cat([n_k, m]) + w[f"{p}gate_proj.bias"]
                    m = gate.sigmoid() * m
                if self.markov == "rnn":
                    joint = w[f"{p}joint_proj.weight"] @ torch.cat([state, m, n_k]) + w[f"{p}joint_proj.bias"]
                    g, new, o = joint.chunk(3)
                    state = g.sigmoid() * state + (1 - g.sigmoid()) * new.tanh()
                    m = o.tanh()
                y = y + w[f"{p}markov_w2.weight"] @ m
            y = self.cap * (y / self.cap).tanh() if self.cap else y
            if self.selector:
                p, best = "candidate_selector.", y.topk(7).indices
                read = w[f"{p}predecessor_codebook"][before] * (w[f"{p}hidden_projection.weight"] @ n_k)
                chosen = y[best] + w[f"{p}successor_codebook"][best] @ read
                y = torch.full_like(y, -math.inf).scatter(0, best, chosen)
            found.append(y)
        return torch.stack(found)


OWNER = {"verifier": {"name_or_path": "someone/model"}}
CONV = {"conv_kernel_size": 2, "conv_group_size": 16}
NESTED = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "target_layer_ids": [0, 2, 4],
    "block_size": 4,
    "mask_token_id": MASK,
    "markov_rank": RANK,
    "enable_confidence_head": True,
}
FOLDERS = {
    "z-lab": Folder(
        (1, 3, 5),
        {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": 5, "dflash_config": NESTED},
    ),
    "z-lab, sliding": Folder(
        (1, 3, 5),
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {**NESTED, "block_size": 5, "final_logit_softcapping": 2.0},
        },
        windows=(0, 7, 7),
        causal=(False, True, True),
        cap=2.0,
    ),
    "z-lab, sliding both ways": Folder(
        (1, 3, 5), {"block_size": 5, "is_causal": False, "dflash_config": NESTED}, windows=(4, 0), prefix="model."
    ),
    "z-lab, ids left out": Folder(
        (2, 4), {"num_target_layers": LAYERS, "block_size": 5, "dflash_config": {"mask_token_id": MASK}}
    ),
    "DFlash2": Folder(
        (1, 3, 5),
        {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": {
                **NESTED,
                "block_size": 5,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": RANK,
                "selector_top_k": 7,
                "selector_vocab_size": VOCAB,
                "final_logit_softcapping": 2.0,
            },
        },
        windows=(6, 6),
        cap=2.0,
        conv=2,
        selector=True,
    ),
    "speculators": Folder(
        (1, 3, 5),
        {
            "speculators_model_type": "dflash",
            "speculators_config": OWNER,
            "aux_hidden_state_layer_ids": [1, 3, 5],
            "block_size": 6,
            "mask_token_id": MASK,
            "draft_vocab_size": len(IDS),
            "sample_from_anchor": False,
        },
        nested="transformer_layer_config",
        rows=6,
        own_tables=True,
        scored=len(IDS),
    ),
    "DSpark of speculators": Folder(
        (1, 3, 5),
        {
            "speculators_model_type": "dspark",
            "speculators_config": OWNER,
            "aux_hidden_state_layer_ids": [1, 3, 5],
            "block_size": 4,
            "mask_token_id": MASK,
            "draft_vocab_size": len(IDS),
            "sample_from_anchor": True,
            "markov_rank": RANK,
            "sliding_window_non_causal": True,
        },
        nested="transformer_layer_config",
        rows=4,
        anchor_predicts=True,
        own_tables=True,
        scored=len(IDS),
        windows=(5, 0),
        markov="vanilla",
    ),
    "DSpark of SpecForge": Folder(
        (1, 3, 5),
        {"block_size": 5, "dflash_config": {**NESTED, "projector_type": "dspark", "markov_rank": RANK}},
        markov="vanilla",
    ),
    "DSpark of ModelOpt": Folder((1, 3, 5), DSPARK, rows=4, anchor_predicts=True, markov="vanilla", short=True),
    "DeepSpec, DFlash": Folder((1, 3, 5), {**DSPARK, "markov_rank": 0}, rows=4, anchor_predicts=True, own_tables=True),
    **{
        f"DSpark, {kind}": Folder(
            (1, 3, 5), {**DSPARK, "markov_head_type": kind}, rows=4, anchor_predicts=True, own_tables=True, markov=kind
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    return save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)


def read(tiny: Path, tokens: list[int]) -> tuple[dict[int, Tensor], tuple[Tensor, Tensor]]:
    """The target's streams, and its tables."""
    model = load_as_is(str(tiny), device="cpu").model
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    tables = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return {depth: each[0] for depth, each in enumerate(states[:-1])}, tables


def error_of(head: Path, reference: Folder, tiny: Path) -> float:
    """Largest difference of a probability, after a prompt and after further rows, by which nothing is rolled back."""
    drafter = DFlashDrafter(DFlashDrafter.Config(head=head, probe=False), load(str(tiny), device="cpu"))
    tokens, worst, known = tokens_of(3, 20, 99), 0.0, 0
    streams, tables = read(tiny, tokens)
    request = make_request(tokens[:9], vocab_size=VOCAB, max_tokens=50, temperature=1.0)
    assert drafter.needs.hidden_layers is not None
    for end in (9, 12, 18):
        request.tokens[:] = tokens[:end]
        hidden = {depth: streams[depth][known : end - 1] for depth in drafter.needs.hidden_layers.depths}
        drafter.on_forward([Features(request, known, NO_DRAFT, hidden, ())])
        known = end - 1
        (draft,) = drafter.propose([request], [Budget(16, 16)])
        assert isinstance(draft.law, Sampled)
        before = {depth: each[: end - 1] for depth, each in streams.items()}
        expected = reference.logits(before, tokens[end - 1], list(draft.tree.tokens), tables).softmax(-1)
        assert draft.law.q_KV.shape == expected.shape
        worst = max(worst, float((draft.law.q_KV - expected).abs().max()))
    return worst


@pytest.mark.parametrize("maker", FOLDERS)
def test_a_folder_computes_what_its_maker_describes(maker: str, tiny: Path, tmp_path: Path) -> None:
    folder = FOLDERS[maker]
    assert error_of(folder.write(tmp_path / "head"), folder, tiny) < 1e-5
    assert method_for(tmp_path / "head") == "dflash"


@pytest.mark.parametrize("maker", ["z-lab, sliding", "DFlash2", "speculators", "DSpark, vanilla"])
def test_a_gguf_file_computes_what_its_folder_does(maker: str, tiny: Path, tmp_path: Path) -> None:
    folder = FOLDERS[maker]
    fields: dict[str, Any] = {
        "block_count": len(folder.windows),
        "context_length": 2048,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "vocab_size": VOCAB,
        "target_layers": list(folder.taps),
        "block_size": folder.rows,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    if any(folder.windows):
        fields["attention.sliding_window"] = max(folder.windows)
        fields["attention.sliding_window_pattern"] = [bool(each) for each in folder.windows]
    if folder.cap:
        fields["final_logit_softcapping"] = folder.cap
    if folder.selector:
        fields |= {**CONV, "selector_rank": RANK, "selector_top_k": 7}
    place = save_gguf(tmp_path / "head.gguf", "dflash", folder.tensors(), fields, (HEADS, KV_HEADS))
    assert method_for(place) == "dflash"
    assert error_of(place, folder, tiny) < 1e-5


FAULTS = {
    "a tap early": ("z-lab", {"taps": (0, 2, 4)}),
    "taps swapped": ("speculators", {"taps": (5, 3, 1)}),
    "causal for both ways": ("z-lab", {"causal": (True, True)}),
    "both ways for causal": ("z-lab, sliding", {"causal": (False, False, False)}),
    "no window": ("z-lab, sliding both ways", {"windows": (0, 0)}),
    "no cap": ("z-lab, sliding", {"cap": 0.0}),
    "the target's tables": ("DeepSpec, DFlash", {"own_tables": False}),
    "no gate": ("DSpark, gated", {"markov": "vanilla"}),
    "no Markov head": ("DSpark, vanilla", {"markov": ""}),
    "no convolution": ("DFlash2", {"conv": 0}),
    "no selector": ("DFlash2", {"selector": False}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tiny: Path, tmp_path: Path) -> None:
    maker, wrong = FAULTS[fault]
    right = FOLDERS[maker]
    kept = {name.removeprefix(right.prefix): value for name, value in right.tensors().items()}
    if not wrong.get("own_tables", True):
        kept = {name: value for name, value in kept.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    assert error_of(right.write(tmp_path / "head"), replace(right, **wrong, weights=kept), tiny) > 1e-3


def test_drafts_at_temperature_0_are_the_best_tokens(tiny: Path, tmp_path: Path) -> None:
    folder = FOLDERS["DSpark, rnn"]
    options = DFlashDrafter.Config(head=folder.write(tmp_path / "head"), probe=False)
    drafter = DFlashDrafter(options, load(str(tiny), device="cpu"))
    tokens = tokens_of(3, 12, 99)
    streams, tables = read(tiny, tokens)
    request = make_request(tokens, vocab_size=VOCAB, max_tokens=50)
    hidden = {depth: streams[depth][:11] for depth in folder.taps}
    drafter.on_forward([Features(request, 0, NO_DRAFT, hidden, ())])
    (draft,) = drafter.propose([request], [Budget(16, 3)])
    before = {depth: each[:11] for depth, each in streams.items()}
    best = folder.logits(before, tokens[-1], list(draft.tree.tokens), tables).argmax(-1).tolist()
    assert isinstance(draft.law, PointMass)
    assert list(draft.tree.tokens) == best[:3]


@pytest.mark.parametrize("maker", ["z-lab, sliding", "DSpark, gated", "DFlash2"])
def test_the_text_is_the_target_s(maker: str, tiny: Path, tmp_path: Path) -> None:
    folder = FOLDERS[maker].write(tmp_path / "head")
    params, prompts = SamplingParams(max_tokens=16, temperature=0), ["abc", "Tom has", "x"]
    plain = LLM(str(tiny), device="cpu", speculative_config=None).generate(prompts, params)
    recipe = {"model": str(folder), "num_speculative_tokens": 4, "probe": False}
    llm = LLM(str(tiny), device="cpu", speculative_config=recipe)
    assert llm.recipe.method == "dflash"
    found = llm.generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(each.metrics.num_draft_tokens for each in found) > 10


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no mask token": ("z-lab", {"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "no mask token"),
    "two block sizes": ("z-lab, sliding", {"block_size": 8}, "block_size=8, but dflash_config.block_size=5"),
    "no ids": ("z-lab, ids left out", {"num_target_layers": None}, "is missing, and num_target_layers"),
    "too few ids": ("speculators", {"aux_hidden_state_layer_ids": [1, 3]}, "fc.weight is [64, 192]"),
    "another rank": ("DSpark, rnn", {"markov_rank": 4}, "markov_rank=4, but the weights have 8"),
    "another selector": (
        "DFlash2",
        {"dflash_config": {**NESTED, **CONV, "selector_rank": 4, "selector_top_k": 7}},
        "hidden_projection.weight is [8, 64], but [4, 64] is described",
    ),
    "no selector rank": ("DFlash2", {"dflash_config": {**NESTED, **CONV}}, "selector_rank=None: a number"),
    "another target": ("z-lab", {"num_target_layers": 36}, "num_target_layers is 36, but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_refused_by_name(case: str, tiny: Path, tmp_path: Path) -> None:
    maker, keys, message = REFUSED[case]
    folder = FOLDERS[maker].write(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises((ModelError, MismatchError)) as caught:
        DFlashDrafter(DFlashDrafter.Config(head=folder), load(str(tiny), device="cpu"))
    assert message in str(caught.value)


def test_an_unread_tensor_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = replace(FOLDERS["z-lab"], weights={"mask_embedding": torch.ones(WIDTH)}).write(tmp_path / "head")
    with pytest.raises(ModelError, match="the tensor mask_embedding is not of such a head"):
        DFlash.load(folder)


@pytest.mark.parametrize(
    "fields",
    [{}, {"draft_vocab_size": 40}, {"markov_rank": 4, "anchor_predicts": True}, {"conv_taps": 2, "selector_rank": 4}],
    ids=str,
)
def test_a_saved_network_is_loaded(fields: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    network = random_part(DFlash, load(str(tiny), device="cpu"), **fields)
    network.save(tmp_path)
    again = DFlash.load(tmp_path)
    assert again.config == network.config
    assert all(torch.equal(again.tensors()[name], value) for name, value in network.tensors().items())
