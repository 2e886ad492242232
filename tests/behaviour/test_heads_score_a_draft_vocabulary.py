"""A draft vocabulary for heads over hidden states: the drafted tokens, the text, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.drafting import draft_columns
from foretoken.drafting.draft_vocabulary import DraftVocabulary
from foretoken.engine.llm import LLM
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.scylla.network import Scylla
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.mtp_models import PREFIX, retensor, save_mtp
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import assert_idle, ids, with_config

SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
TREE = {"tree": True, "width": 3, "max_depth": 3}
# method, its parts, options; "layer by layer" is of a size that the native decoder does not take
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chain": ("eagle", {}, {}),
    "tree": ("eagle", {}, TREE),
    "eagle2": ("eagle", {"algorithm": "eagle"}, {}),
    "layers": ("scylla", {"layers": 2}, {"width": 3, "max_depth": 3}),
    "layer by layer": ("scylla", {"layers": 1, "mlp_width": 40}, {"tree": False}),
    "mtp": ("mtp", {}, {}),
    "mtp tree": ("mtp", {}, TREE),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
PROMPTS = [tokens_of(seed, 5 + 6 * seed, 100) for seed in range(3)]


class Bench:
    """Targets, and untrained heads next to them.

    Args:
        place: a folder for all of it.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.plain = load(str(save_model("llama", place / "llama", **SIZES)), device="cpu")
        self.predicting = load(str(save_mtp("glm4_moe", place / "mtp")), device="cpu")

    def target(self, shape: str) -> Any:
        return self.predicting if SHAPES[shape][0] == "mtp" else self.plain

    def llm(self, shape: str, kept: Sequence[int] | None, **changes: Any) -> LLM:
        """A recipe of a shape.

        Args:
            kept: tokens of its draft vocabulary; None: it has none.
            changes: of the vocabulary.
        """
        method, fields, options = SHAPES[shape]
        config = {"method": method, "num_speculative_tokens": 5, **options}
        if method != "mtp":
            part = Eagle if method == "eagle" else Scylla
            config["head"] = untrained(part, self.plain, self.place / shape, **fields)  # type: ignore[attr-defined]
        target = self.target(shape)
        if kept is not None:
            config["draft_vocab"] = self.folder(target, kept, **changes)
        return with_config(config, target=target, max_num_seqs=3)

    def folder(self, target: Any, kept: Sequence[int], **changes: Any) -> str:
        fields = {"vocab_size": target.vocab_size, "tokenizer": vocabulary_fingerprint(target.tokenizer), **changes}
        place = self.place / "kept"
        DraftVocabulary(ids=sorted(kept), **fields).save(place)
        return str(place)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def drafted(llm: LLM) -> list[Draft]:
    """Every draft that is proposed from now on."""
    seen: list[Draft] = []
    propose = llm.recipe.drafter.propose

    def watched(contexts: Any, budgets: Any) -> list[Draft]:
        drafts = propose(contexts, budgets)
        seen.extend(drafts)
        return drafts

    llm.recipe.drafter.propose = watched  # type: ignore[method-assign]
    return seen


def run(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    given = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **params}
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], SamplingParams(**given))
    assert_idle(llm)
    assert all(output.error is None for output in outputs)
    return ids(outputs)


@every_shape
def test_text_is_the_target_s_and_drafts_are_of_kept_tokens_and_those_of_the_request(
    shape: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_columns, "LEAVE_AT", 1.0)  # a third of the vocabulary misses much
    kept = range(0, 100, 3)
    llm = bench.llm(shape, kept, context_rows=4)
    seen = drafted(llm)
    found = run(llm)
    assert found == run(with_config(None, target=bench.target(shape)))
    tokens = {token for draft in seen for token in draft.tree.tokens}
    own = {token for prompt, text in zip(PROMPTS, found, strict=True) for token in (*prompt, *text)}
    assert len(tokens) > 5
    assert tokens <= {*kept, *own}
    assert tokens - set(kept)  # context rows are drafted, too


@pytest.mark.parametrize("shape", ["chain", "eagle2", "layer by layer", "mtp"])
def test_a_drawn_draft_gives_its_distribution_in_columns(shape: str, bench: Bench) -> None:
    """It lies over the kept tokens alone, and is what the whole head says there, anew made a distribution."""
    kept = list(range(0, 100, 3))
    first = []
    for chosen in (kept, None):
        llm = bench.llm(shape, chosen, context_rows=0)
        seen = drafted(llm)
        run(llm, PROMPTS[:1], temperature=1.0, seed=5)
        first.append(next(draft.law for draft in seen if len(draft)))
    some, whole = first
    assert isinstance(some, Sampled)
    assert isinstance(whole, Sampled)
    assert some.columns is not None
    assert some.columns.ids_C.tolist() == kept
    q_C = whole.q_KV[0][kept]
    torch.testing.assert_close(some.q_KV[0], q_C / q_C.sum(), rtol=1e-4, atol=1e-6)


@every_shape
def test_all_tokens_kept_is_the_untrimmed_drafter(shape: str, bench: Bench) -> None:
    """Bit for bit where the native decoder runs the head."""
    proposals = []
    for kept in (None, range(bench.target(shape).vocab_size)):
        llm = bench.llm(shape, kept)
        seen = drafted(llm)
        run(llm, PROMPTS[:1], temperature=0.8, seed=3)
        proposals.append(seen)
    assert any(len(draft) for draft in proposals[0])
    assert len(proposals[0]) == len(proposals[1])
    for whole, kept in zip(*proposals, strict=True):
        assert whole.tree.tokens == kept.tree.tokens
        if isinstance(whole.law, Sampled):
            assert isinstance(kept.law, Sampled)
            most = 1e-6 if shape == "layer by layer" else 0.0
            torch.testing.assert_close(whole.law.q_KV, kept.law.q_KV, rtol=0, atol=most)


@pytest.mark.parametrize("shape", ["chain", "eagle2"])
def test_a_seeded_request_drafts_the_same_alone_and_in_a_batch(shape: str, bench: Bench) -> None:
    """Others bring context rows of their own, and some fall back to the whole head."""
    if bench.plain.native_decoder is None:
        pytest.skip("the library's products round by their number of rows")
    llm = bench.llm(shape, range(0, 100, 3), context_rows=4)
    alone = [run(llm, [prompt], temperature=0.9, seed=11)[0] for prompt in PROMPTS]
    assert run(llm, temperature=0.9, seed=11) == alone


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", ["chain", "tree", "mtp"])
def test_where_no_kept_token_may_be_emitted_the_draft_is_empty(shape: str, temperature: float, bench: Bench) -> None:
    llm = bench.llm(shape, [7, 8], context_rows=0)
    seen = drafted(llm)
    (text,) = run(llm, PROMPTS[:1], temperature=temperature, seed=1, max_tokens=8, logit_bias={7: -100.0, 8: -100.0})
    assert len(text) == 8
    allowed = {token for draft in seen for token in draft.tree.tokens}
    assert seen
    assert allowed <= {7, 8}


def test_a_drafter_with_many_misses_gets_the_whole_head(tmp_path: Path, bench: Bench) -> None:
    """The layer knows the target's distribution, and half of the tokens are not kept: until that is noticed, and then
    again.
    """
    target = load(str(save_mtp("glm4_moe", tmp_path / "knowing", knowing=True)), device="cpu")
    kept = bench.folder(target, range(0, target.vocab_size, 2), context_rows=0)
    llm = with_config({"method": "mtp", "draft_vocab": kept, "num_speculative_tokens": 3}, target=target)
    seen = drafted(llm)
    run(llm, PROMPTS[:1], temperature=1.0, seed=2, max_tokens=60)
    odd = [sum(token % 2 for token in draft.tree.tokens) for draft in seen if len(draft)]
    assert not any(odd[:3])
    assert sum(odd[-5:]) > 2
    assert not llm.recipe.drafter._columns._states  # type: ignore[attr-defined]


# ------------------------------------------------------------------ refusals


def test_a_head_with_a_vocabulary_of_its_own_takes_no_other(bench: Bench) -> None:
    kept = bench.folder(bench.plain, range(10))
    for part in (Eagle, Scylla):
        head = untrained(part, bench.plain, bench.place / f"few-{part.algorithm}", draft_vocab_size=40)
        with pytest.raises(ConfigError, match=r"draft_vocab=.*has a vocabulary of its own, of 40 tokens; leave"):
            with_config({"method": part.algorithm, "head": head, "draft_vocab": kept}, target=bench.plain)


def test_a_head_with_rows_of_its_own_takes_none(bench: Bench) -> None:
    whole = random_part(Eagle, bench.plain)
    own = Eagle(whole.config, own_head=True)
    own.draw(torch.Generator().manual_seed(0))
    own.save(bench.place / "own")
    kept = bench.folder(bench.plain, range(10))
    with pytest.raises(ConfigError, match=r"'eagle' has a head of its own \(lm_head\)"):
        with_config({"method": "eagle", "head": str(bench.place / "own"), "draft_vocab": kept}, target=bench.plain)


def test_a_prediction_layer_with_a_head_of_its_own_takes_none(tmp_path: Path, bench: Bench) -> None:
    folder = save_mtp("glm4_moe", tmp_path / "model")
    retensor(folder, lambda tensors: tensors[f"{PREFIX}shared_head.head.weight"].mul_(1.5))
    target = load(str(folder), device="cpu")
    kept = bench.folder(target, range(10))
    with pytest.raises(ConfigError, match=r"has a head of its own \(shared_head.head\)"):
        with_config({"method": "mtp", "draft_vocab": kept}, target=target)


@pytest.mark.parametrize("method", ["eagle", "scylla", "mtp"])
@pytest.mark.parametrize(
    ("given", "message"),
    [(7, "draft_vocab=7 must be a path"), ("", "draft_vocab='' must be a path"), ("absent", "has no config.json")],
    ids=str,
)
def test_a_folder_that_is_none_is_named(method: str, given: Any, message: str, bench: Bench) -> None:
    shape = {"eagle": "chain", "scylla": "layers", "mtp": "mtp"}[method]
    config: dict[str, Any] = {"method": method, "draft_vocab": given}
    if method != "mtp":
        bench.llm(shape, None)  # makes the head
        config["head"] = str(bench.place / shape)
    with pytest.raises(ForetokenError, match=message):
        with_config(config, target=bench.target(shape))


def test_another_tokenizer_s_vocabulary_is_refused(bench: Bench) -> None:
    with pytest.raises(ForetokenError, match="tokenizer=feedfacefeed"):
        bench.llm("chain", range(10), tokenizer="feedfacefeedface")
