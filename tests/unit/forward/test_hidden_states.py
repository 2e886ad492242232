"""What a verifier sees of the target: the last hidden state of every draft row, of the row's own token, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.core.draft import Draft
from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.laws import Laws
from foretoken.core.needs import LastState, Needs, Offers
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.engine.llm import LLM
from foretoken.forward import anatomy
from foretoken.methods.kangaroo.network import Adapter
from foretoken.models.last_states import LastStates
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken_lab.testing import Random, Recorder
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.untrained import untrained
from helpers.zoo_llms import ids, with_config

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([1, 7, 30, 12], [1, 9, 9, 40, 41, 17, 3], [1, 55])]


class Looking(GreedyVerifier):
    """The rule for temperature 0, with a record of its arguments."""

    def __init__(self, needs: LastState) -> None:
        self.needs = Needs(last_state=needs)
        self.shown: list[tuple[Draft, Tensor]] = []

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        if len(draft):
            self.shown.append((draft, target.hidden_MD))
        return super().verify(draft, target, rng)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first runs natively where there is a compiler; the second never does, and scales its embeddings."""
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


def reference(folder: Path) -> Callable[[list[int]], dict[bool, Tensor]]:
    """The library's own model: what its final norm reads (False) and gives (True) at the last token of a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[bool, Tensor] = {}
    norm = anatomy.find(model).final_norm
    norm.register_forward_hook(lambda module, args, output: found.update({False: args[0][0, -1], True: output[0, -1]}))

    def read(tokens: list[int]) -> dict[bool, Tensor]:
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokens]))
        return dict(found)

    return read


def compare(rule: Looking, drafter: Recorder, read: Callable[[list[int]], dict[bool, Tensor]]) -> int:
    """Every row that the rule was shown, against a forward of the row's own past from its first token on."""
    before = {id(draft): tokens for _, tokens, _, draft in drafter.proposed}
    rows = 0
    for draft, hidden_MD in rule.shown:
        tree = draft.tree
        assert hidden_MD.dtype == torch.float32
        assert len(hidden_MD) == 1 + len(draft)
        for node in range(-1, len(draft)):
            text = [*before[id(draft)], *(tree.tokens[above] for above in tree.path_to(node))]
            torch.testing.assert_close(
                hidden_MD[node + 1], read(text)[rule.needs.last_state.normed], rtol=2e-3, atol=2e-3
            )
            rows += 1
    return rows


@pytest.mark.covering(1)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_a_row_shows_the_state_of_its_own_token(folder: Path, tree: bool, normed: bool) -> None:
    """Batches of ragged drafts next to prompts that are still read and requests without a draft."""
    rule, drafter = Looking(LastState(normed)), Recorder(Random(VOCAB_SIZE, tree=tree, seed=3))
    llm = with_config(
        {"method": drafter, "verifier": rule, "num_speculative_tokens": 5},
        target=load(folder, device="cpu"),
        max_num_seqs=2,
        max_rows_per_step=12,
    )
    ids(llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True)))
    assert compare(rule, drafter, reference(folder)) > 20


@pytest.mark.covering(1)
@pytest.mark.parametrize(("method", "normed"), [("kangaroo", True), ("del", True), ("del", False)])
def test_a_drafter_inside_the_target_and_a_verifier_see_of_one_forward(folder: Path, method: str, normed: bool) -> None:
    """Of drafts, `del` is shown depths of its own next to what the verifier is shown; `kangaroo` has seen its own."""
    target = load(folder, device="cpu")
    settings: dict[str, Any] = {"exit_layer": 1, "draft_length": 3}
    if method == "kangaroo":
        adapter = untrained(Adapter, target, folder / "adapter", exit_layer=1)
        settings = {"threshold": 0, "max_depth": 3, "adapter": adapter}
    inner = with_config({"method": method, **settings}, target=target).recipe.drafter

    class Inside(Recorder):
        """A record of a drafter that gets hidden states, too."""

        @property
        def needs(self) -> Needs:  # type: ignore[override]
            return inner.needs

        @property
        def offers(self) -> Offers:  # type: ignore[override]
            return inner.offers

        def attach(self, cache: Any) -> None:
            inner.attach(cache)

        def on_forward(self, features: Any) -> None:
            inner.on_forward(features)

    rule, drafter = Looking(LastState(normed)), Inside(inner)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    counts = []
    for verifier in (rule, GreedyVerifier()):
        config = {"method": drafter, "verifier": verifier, "num_speculative_tokens": 3}
        llm = with_config(config, target=target, max_num_seqs=2, max_rows_per_step=9)
        before = target.layer_rows
        outputs = llm.generate(PROMPTS, params)
        counts.append((ids(outputs), target.layer_rows - before))
    assert counts[0] == counts[1]  # nothing is computed for the verifier's sake
    assert compare(rule, drafter, reference(folder)) > 20


def test_nothing_is_kept_without_a_request(folder: Path) -> None:
    target = load(folder, device="cpu")
    rule = Looking(LastState())
    spans: list[Any] = []
    forward = target.forward

    def watched(batch: Any, plan: Any, **options: Any) -> Any:
        spans.append(options.get("span"))
        return forward(batch, plan, **options)

    target.forward = watched  # type: ignore[method-assign]
    for verifier, asks in ((GreedyVerifier(), False), (rule, True)):
        drafter = Random(VOCAB_SIZE, tree=False, full=True)
        config = {"method": drafter, "verifier": verifier, "num_speculative_tokens": 16}
        llm = with_config(config, target=target)
        spans.clear()
        ids(llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True)))
        assert spans[0] is None  # the prompt has no draft after it
        assert [span is not None for span in spans[1:-1]] == [asks] * (len(spans) - 2)
    assert rule.shown


def test_a_verifier_that_does_not_say_so_is_shown_nothing() -> None:
    with pytest.raises(ValueError, match=r"says so \(needs = Needs\(last_state=LastState\(\)\)\)"):
        _ = Laws(torch.zeros(1, 4), greedy=True, positions=(0,)).hidden_MD


def test_a_target_without_storable_states_is_refused_at_construction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folder, device="cpu")
    state = LastStates._state
    monkeypatch.setattr(LastStates, "_state", lambda self, rows, normed: state(self, rows, normed=False))  # no norm
    with pytest.raises(UnsupportedArchitecture, match="cannot carry a head on its last hidden state: its head reads"):
        with_config({"method": "ngram", "verifier": Looking(LastState())}, target=target)
    assert isinstance(with_config({"method": "ngram"}, target=target), LLM)
