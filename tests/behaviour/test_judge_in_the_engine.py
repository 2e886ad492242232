"""The rule `judge` in the engine: planted judges, the row that is judged, guards, other drafters, heads, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.cli.main import main
from foretoken.cli.prove.methods import parse_methods
from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Budget, Context
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.logistic import Logistic
from foretoken.engine import compose
from foretoken.engine.llm import LLM
from foretoken.forward import anatomy
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab.testing import Random, Recorder, Stub
from helpers.judges import head, shelved_judge
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, ids, target, with_config

NEVER, ALWAYS = -1e4, 1e4  # biases
LENGTH = 32
DISPUTED = (  # target and draft disagree about the best token of each
    *("The king of the island wrote a letter to", "The history of the river begins"),
    *("Of all the ships that sailed", "Whether the earth moves"),
)
RUNS = (
    "import os\nimport json\n",
    "The professor explained",
    "When we consider the distributions of nature",
)  # of several in a row
DRAFT = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 5}


def judged(bias: float = 0.0, spread: float = 0.0, **settings: Any) -> LLM:
    return with_config({**DRAFT, "verifier": "judge", "head": shelved_judge(bias, spread), **settings})


def plan(temperature: float = 0.0, seed: int = 1, length: int = LENGTH, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=temperature, seed=seed, ignore_eos=True, **options)


# ---------------------------------------------------------------------- planted judges


@pytest.mark.parametrize(("bias", "options"), [(NEVER, {}), (ALWAYS, {"threshold": 1})])
def test_a_judge_that_is_off_gives_the_exact_decisions(bias: float, options: dict[str, Any]) -> None:
    ours, exact = judged(bias, **options), with_config({**DRAFT, "tree": "chain", "verifier": "ratio"})
    assert ids(ours.generate(PROMPTS, plan())) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    outputs, wanted = (each.generate(PROMPTS, plan(0.9, top_p=0.9)) for each in (ours, exact))
    assert ids(outputs) == ids(wanted)
    assert [each.metrics.num_steps for each in outputs] == [each.metrics.num_steps for each in wanted]
    assert {each.metrics.distortion for each in outputs} == {0.0}
    assert_idle(ours)


def noted(llm: LLM) -> list[tuple[Draft, Verdict]]:
    """Every draft that is verified from now on, and its verdict."""
    rule: Any = llm.recipe.verifier
    decide, found = rule.verify_within, []

    def noting(draft: Draft, *arguments: Any) -> Verdict:
        found.append((draft, decide(draft, *arguments)))
        return found[-1][1]

    rule.verify_within = noting
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_judge_that_approves_of_everything_lets_every_draft_stand_but_guarded_tokens(temperature: float) -> None:
    llm = judged(ALWAYS)
    found = noted(llm)
    outputs = llm.generate(RUNS, plan(temperature))
    for draft, verdict in found:
        tokens = draft.tree.tokens
        assert len(verdict.path) == len(draft) or tokens[len(verdict.path)] in target().special_ids
    whole = sum(len(verdict.path) == len(draft) > 0 for draft, verdict in found)
    assert whole > 10
    assert min(output.metrics.distortion for output in outputs) > 0.05
    bound = judged(ALWAYS, max_run=1).generate(RUNS, plan(temperature))
    steps = [sum(output.metrics.num_steps for output in each) for each in (outputs, bound)]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_is_judged_the_same_alone_and_in_a_batch(temperature: float) -> None:
    llm = judged(0.0, 0.3)
    params = [plan(temperature, seed) for seed in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate([prompt], [each])[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert ids(together) == ids(alone)
    assert sum(each.metrics.distortion_sum for each in together) > 1.0  # the judge has had its say
    assert [each.metrics.distortion for each in together] == pytest.approx([each.metrics.distortion for each in alone])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_hold_on_every_prefix_of_every_request(temperature: float) -> None:
    llm = judged(ALWAYS, max_distortion=0.05)
    rule: Any = llm.recipe.verifier
    decide = rule.verify_within
    spent: dict[int, list[float]] = {}

    def noting(draft: Draft, laws: Any, rng: Any, metrics: Metrics) -> Verdict:
        verdict: Verdict = decide(draft, laws, rng, metrics)
        spent.setdefault(id(rng), []).extend(verdict.distortions)
        return verdict

    rule.verify_within = noting
    ids(llm.generate(DISPUTED, plan(temperature)))
    assert len(spent) == len(DISPUTED)
    for history in spent.values():
        totals = list(itertools.accumulate(history))
        assert all(total <= 0.05 * number + 1e-9 for number, total in enumerate(totals, 1))
        assert totals[-1] > 0.0
    assert ids(judged(ALWAYS, max_distortion=0).generate(PROMPTS, plan())) == [greedy(each, LENGTH) for each in PROMPTS]


# ---------------------------------------------------------------------- the row that is judged


class Fixed(Stub):
    """Proposes the same tokens after the first token of every request, then nothing."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def draft(self, context: Context, budget: Budget) -> Draft:
        first = len(context.tokens) - context.num_prompt == 1
        tokens = self.tokens[: min(budget.max_nodes, budget.max_depth)]
        return Draft(TokenTree(tokens)) if first and tokens else NO_DRAFT


def states(folder: Path, tokens: list[int]) -> dict[bool, Tensor]:
    """The library's own states of a text: what its final norm reads (False) and gives (True), [T, D]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[bool, Tensor] = {}
    norm = anatomy.find(model).final_norm
    norm.register_forward_hook(lambda module, args, output: found.update({False: args[0][0], True: output[0]}))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]))
    return found


def save_judge(folder: Path, wanted_T: list[float], hidden_TD: Tensor, *, normed: bool, target: Path) -> str:
    """A head that says 1 or 0 of these states as wanted: as many numbers as states have to be met."""
    hidden_TD = hidden_TD.double()
    middle_D = hidden_TD.mean(0)
    goal_T = torch.tensor([12.0 if each else -12.0 for each in wanted_T], dtype=torch.float64)
    weight_D = torch.linalg.lstsq(hidden_TD - middle_D, goal_T - goal_T.mean()).solution
    bias = float(goal_T.mean() - weight_D @ middle_D)
    config = JudgeConfig(
        width=hidden_TD.shape[1],
        threshold=0.5,
        target=str(target),
        target_fingerprint=fingerprint(target),
        normed=normed,
    )
    JudgeHead(config, Logistic(weight_D, bias)).save(folder)
    return str(folder)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("family", ["llama", "stablelm"])  # fused, and not
def test_a_planted_wrong_token_falls_where_it_stands(family: str, normed: bool, tmp_path: Path) -> None:
    """Of a drafted text one token is wrong, and a head knows that token's state: the text breaks off there."""
    folder = save_model(family, tmp_path / "model")
    model = load(folder, device="cpu")
    prompts = [[1, 7, 30, 12], [1, 9, 9, 40, 41]]
    (root,) = ids(with_config(None, target=model).generate([{"prompt_token_ids": prompts[0]}], plan(length=1)))[0]
    drafted = [11, 52, 33, 74, 25]
    hidden_TD = states(folder, [*prompts[0], root, *drafted])[normed][-len(drafted) :]
    for wrong_at in range(len(drafted)):
        wanted = [float(place != wrong_at) for place in range(len(drafted))]
        place = save_judge(tmp_path / f"head-{wrong_at}", wanted, hidden_TD, normed=normed, target=folder)
        drafter = Recorder(Fixed(drafted))
        settings = {"method": drafter, "verifier": "judge", "head": place, "num_speculative_tokens": 5}
        llm = with_config(settings, target=model)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], plan(length=8))
        first = next(each for each in drafter.observed if each.request_id == 0)
        assert first.verdict.path == tuple(range(wrong_at))
        assert outputs[0].token_ids[1 : 1 + wrong_at] == drafted[:wrong_at]
        assert outputs[0].metrics.distortion_sum == wrong_at


# ---------------------------------------------------------------------- guards


def test_special_tokens_are_those_that_are_not_text() -> None:
    names = target().tokenizer.convert_ids_to_tokens(sorted(target().special_ids))
    assert names == ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_no_text_ends_and_no_turn_begins_on_the_judge_s_word(ignore_eos: bool) -> None:
    word = greedy(PROMPTS[2], 1)[0] + 1  # some token of no special kind
    for token, options in [*((each, {}) for each in sorted(target().special_ids)), (word, {"stop_token_ids": [word]})]:
        settings = {"verifier": "judge", "head": shelved_judge(ALWAYS), "num_speculative_tokens": 2}
        llm = with_config({"method": Fixed([token, token]), **settings})
        params = SamplingParams(max_tokens=8, ignore_eos=ignore_eos, **options)  # type: ignore[arg-type]
        (output,) = llm.generate(PROMPTS[2], params)
        assert output.token_ids == greedy(PROMPTS[2], 8, ignore_eos=ignore_eos)
        assert output.metrics.num_draft_tokens == 2
    llm = with_config({"method": Fixed([word, word]), **settings})
    (output,) = llm.generate(PROMPTS[2], SamplingParams(max_tokens=8))
    assert output.token_ids[1:3] == [word, word]  # where it ends nothing it stands


def test_what_a_filter_excludes_does_not_stand() -> None:
    word = greedy(PROMPTS[2], 1)[0] + 1
    settings = {"verifier": "judge", "head": shelved_judge(ALWAYS), "num_speculative_tokens": 2}
    llm = with_config({"method": Fixed([word, word]), **settings})
    (output,) = llm.generate(PROMPTS[2], plan(1.0, length=8, top_k=1))
    assert output.token_ids == greedy(PROMPTS[2], 8)
    (output,) = llm.generate(PROMPTS[2], plan(1.0, length=8))
    assert output.token_ids[1:3] == [word, word]


# ---------------------------------------------------------------------- other drafters


def test_a_drafter_inside_the_target_and_the_judge_share_a_forward() -> None:
    settings = {"method": "kangaroo", "adapter": "random:2", "max_depth": 4, "verifier": "judge"}
    head_of = {bias: shelved_judge(bias) for bias in (NEVER, ALWAYS)}
    off = with_config({**settings, "head": head_of[NEVER], "kangaroo.threshold": 0.0})
    assert ids(off.generate(PROMPTS, plan())) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    on = with_config({**settings, "head": head_of[ALWAYS], "kangaroo.threshold": 0.0, "judge.threshold": 0.5})
    for temperature in (0.0, 1.0):
        outputs = on.generate(PROMPTS, plan(temperature))
        ids(outputs)
        assert min(output.metrics.tokens_per_step for output in outputs) > 3.5
    half = with_config({**settings, "head": shelved_judge(0.0, 0.3), "kangaroo.threshold": 0.0})
    exact = with_config({**settings, "verifier": "greedy", "threshold": 0.0})
    steps = []
    for llm in (half, exact):
        before = target().layer_rows
        outputs = llm.generate(PROMPTS, plan())
        rows = target().layer_rows - before
        steps.append(sum(output.metrics.num_steps for output in outputs))
        # every row goes through every layer once, whoever looks at it
        assert rows == target().num_layers * (rows // target().num_layers)
    assert steps[0] < steps[1]
    assert_idle(on)


def test_the_general_path(tmp_path: Path) -> None:
    """A model that never runs fused, random drafts: a judge that refuses leaves its text alone, another changes it."""
    folder = save_model("stablelm", tmp_path / "model")
    model = load(folder, device="cpu")
    prompts = [{"prompt_token_ids": [1, 7, 30, 12]}, {"prompt_token_ids": [1, 9, 9, 40, 41]}]
    plain = ids(with_config(None, target=model).generate(prompts, plan(length=16)))
    found = []
    for bias in (NEVER, ALWAYS):
        head(bias=bias, target=folder, width=64).save(tmp_path / str(bias))
        drafter = Random(VOCAB_SIZE, tree=False, seed=1)
        settings = {"verifier": "judge", "head": str(tmp_path / str(bias)), "num_speculative_tokens": 3}
        llm = with_config({"method": drafter, **settings}, target=model)
        found.append(llm.generate(prompts, plan(length=16)))
    assert ids(found[0]) == plain
    assert ids(found[1]) != plain
    assert min(output.metrics.tokens_per_step for output in found[1]) > 1.5


# ---------------------------------------------------------------------- heads, options, refusals


def build(**settings: Any) -> Any:
    return compose.build({**DRAFT, "verifier": "judge", **settings}, target()).verifier


def test_a_head_next_to_the_target_is_found(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    model = load(folder, device="cpu")
    config = {"method": "ngram", "verifier": "judge"}
    with pytest.raises(ModelError, match=r"no judge for '.*model' in .*model/judge: make one with"):
        compose.build(config, model)
    head(target=folder, width=64, threshold=0.9).save(folder / "judge")
    verifier: Any = compose.build(config, model).verifier
    assert verifier.threshold == 0.9
    assert verifier.guarded == model.special_ids


def test_heads_that_are_missing_foreign_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no judge for 'zoo:base' in .*nowhere: make one"):
        build(head=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no user's home folder"):
        build(head="~nobody-of-this-name/head")
    with pytest.raises(ModelError, match="no judge for"):
        build(head=str(tmp_path))
    folder = save_model("llama", tmp_path / "model")
    head(target=folder, width=64).save(tmp_path / "foreign")
    with pytest.raises(MismatchError, match="the judge was trained for the target"):
        build(head=str(tmp_path / "foreign"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.5}, r"threshold=1.5 must be a number in \[0, 1\]"),
        ({"max_run": 0}, "max_run=0 must be an integer, at least 1"),
        ({"max_runs": 2}, "unknown option 'max_runs' .*did you mean 'max_run'"),
        ({"method": "suffix", "model": None}, "verifies chains, but method 'suffix' is set to propose trees"),
        ({"tree": "hub"}, "verifies chains"),
        ({"tree": "coupled"}, "not valid for drafts of kind Coupled"),
        ({"verifier": "ratio"}, "unknown option 'head' .*an option of verifier 'judge'"),
        ({"method": "kangaroo", "model": None, "threshold": 0.5}, "write 'judge.threshold' for the verifier's"),
        ({"threshold": 0.5, "judge.threshold": 0.6}, "'threshold' and 'judge.threshold' are one option: keep one"),
        ({"judge.max_runs": 0.6}, "unknown option 'judge.max_runs'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    merged = {**DRAFT, "verifier": "judge", "head": shelved_judge(), **settings}
    with pytest.raises(ConfigError, match=message):
        compose.build({key: value for key, value in merged.items() if value is not None}, target())


def test_options_that_both_sides_have_are_written_with_their_owner_s_name() -> None:
    built = compose.build(
        {
            "method": "kangaroo",
            "adapter": None,
            "kangaroo.threshold": 0.2,
            "verifier": "judge",
            "judge.threshold": 0.8,
            "head": shelved_judge(),
        },
        target(),
    )
    drafter, verifier = built.drafter, built.verifier
    assert (drafter.threshold, verifier.threshold) == (0.2, 0.8)  # type: ignore[attr-defined, union-attr]
    text = "kangaroo+verifier=judge+judge.threshold=0.8+head=x"
    _, method = parse_methods(text, ["kangaroo.kangaroo.threshold=0.2"], target="zoo:base")
    wanted = {"kangaroo.threshold": 0.2, "judge.threshold": 0.8, "verifier": "judge", "head": "x"}
    assert method.config == {"method": "kangaroo", **wanted}


def test_log_probabilities_and_certificates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.certify import certify
    from foretoken.engine import llm

    with pytest.raises(ConfigError, match="logprobs=2 with verifier='judge'"):
        judged().generate(PROMPTS[0], SamplingParams(max_tokens=2, logprobs=2))
    assert judged().recipe.promise_for(SamplingParams()) == "approximate"
    monkeypatch.setattr(llm, "LLM", lambda *args, **options: SimpleNamespace(with_method=with_config))
    with pytest.raises(ConfigError, match="'judge' is approximate by design: this recipe is not lossless"):
        certify.certify("draft_model", {"model": "zoo:draft", "verifier": "judge", "head": shelved_judge()})


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import foretoken

    def load_config(model: str, speculative_config: Any = None, **options: Any) -> LLM:
        return with_config(speculative_config)

    monkeypatch.setattr(foretoken, "LLM", load_config)
    typed = [
        "generate",
        PROMPTS[0],
        "--raw",
        "--method",
        "draft_model",
        "--set",
        "verifier=judge",
        "--max-tokens",
        "24",
    ]
    typed += ["--set", f"head={shelved_judge(ALWAYS)}", "--set", "num_speculative_tokens=4", "--ignore-eos", "--json"]
    assert main(typed) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["promise"] == "approximate"
    assert answer["distortion"] > 0.0
    assert main([*typed, "--set", "threshold=1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["distortion"], answer["token_ids"]) == (0.0, greedy(PROMPTS[0], 24))
    assert main([*typed, "--set", "threshold=2"]) == 2
    assert "threshold=2 must be a number in [0, 1]" in capsys.readouterr().err
