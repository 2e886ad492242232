"""The drafter `entropy_adaptive` on the real pair: limits, batches, text and meter recomputed, faults, bad input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.randomness import gumbel
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.entropy_adaptive.drafter import EntropyAdaptiveDrafter
from foretoken.methods.entropy_adaptive.turns import EntropyTurn, entropy
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS as ALL_PROMPTS
from helpers.zoo_llms import _load_once, assert_idle, base, ids, prompt_ids, target, with_config

LENGTH = 16
PROMPTS = ALL_PROMPTS[:3]
SMALL = "zoo:draft"
PARAMS = {
    "greedy": SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=LENGTH, temperature=0.8, top_p=0.9, repetition_penalty=1.2, min_tokens=4, seed=5
    ),
}
every_params = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)


def adaptive(threshold, **options):
    settings = {key: options.pop(key) for key in ("max_num_seqs", "max_rows_per_step", "target") if key in options}
    return with_config({"method": "entropy_adaptive", "model": SMALL, "threshold": threshold, **options}, **settings)


def alone(model, params):
    """The plain stream of one model."""
    return ids(with_config(None, target=_load_once(model, dtype="float32", device="cpu")).generate(PROMPTS, params))


@every_params
@pytest.mark.parametrize("options", [{"dwell": 1, "window": 1, "max_draft": 3}, {"redo": False}], ids=str)
def test_the_limits_are_the_two_plain_streams(params, options):
    for threshold, expected in ((0, ids(base().generate(PROMPTS, params))), (math.inf, alone(SMALL, params))):
        llm = adaptive(threshold, **options)
        assert ids(llm.generate(PROMPTS, params)) == expected, threshold
        assert_idle(llm)


@every_params
def test_a_budget_of_nothing_is_the_large_model_and_a_budget_is_kept(params):
    plain = ids(base().generate(PROMPTS, params))
    assert ids(adaptive(1e9, max_distortion=0.0).generate(PROMPTS, params)) == plain
    free = adaptive(1e9).generate(PROMPTS, params)
    bounded = adaptive(1e9, max_distortion=0.2).generate(PROMPTS, params)
    assert max(each.metrics.distortion for each in free) > 0.2
    assert all(each.metrics.distortion <= 0.2 + 1e-9 for each in bounded)
    assert ids(bounded) != plain


@every_params
def test_a_model_that_takes_turns_with_itself_is_that_model(params):
    llm = with_config({"method": "entropy_adaptive", "model": "zoo:base", "threshold": 3.0, "dwell": 2, "max_draft": 5})
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == ids(base().generate(PROMPTS, params))
    assert max(each.metrics.distortion for each in outputs) < 1e-6
    assert any(each.metrics.num_draft_tokens for each in outputs)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_batch_budget_and_draft_length_change_nothing(name):
    """Alone, together, in small steps next to prompts that want every row, and with turns cut into pieces."""
    params = PARAMS[name]
    expected = [ids(adaptive(2.5, dwell=3).generate(prompt, params))[0] for prompt in PROMPTS]
    assert len({tuple(each) for each in expected} - set(map(tuple, ids(base().generate(PROMPTS, params))))) > 0
    assert ids(adaptive(2.5, dwell=3).generate(PROMPTS, params)) == expected
    assert ids(adaptive(2.5, dwell=3, max_draft=1).generate(PROMPTS, params)) == expected
    tight = adaptive(2.5, dwell=3, max_num_seqs=8, max_rows_per_step=16)
    long = (prompt_ids(PROMPTS[1]) * 40)[:300]
    crowd = tight.generate([*PROMPTS, long], [*[params] * len(PROMPTS), PARAMS["greedy"]])
    assert ids(crowd)[: len(PROMPTS)] == expected
    assert_idle(tight)


def test_two_calls_propose_the_same():
    llm = adaptive(2.5, dwell=2)
    drafter, once = llm.recipe.drafter, []
    propose = drafter.propose

    def twice(contexts, budgets):
        first, second = propose(contexts, budgets), propose(contexts, budgets)
        assert [(each.tree, each.evidence and each.evidence.yields) for each in first] == [
            (each.tree, each.evidence and each.evidence.yields) for each in second
        ]
        once.extend(first)
        return second

    drafter.propose = twice
    assert ids(llm.generate(PROMPTS, PARAMS["greedy"])) == ids(
        adaptive(2.5, dwell=2).generate(PROMPTS, PARAMS["greedy"])
    )
    assert any(map(len, once))


def rows(model, tokens):
    """Raw logits at every position of a text, read from scratch."""
    cache, batch = model.new_cache(1), PackedBatch()
    slot = cache.acquire()
    cache.reserve(slot, len(tokens))
    batch.add_chunk(slot, 0, tokens, wanted=len(tokens))
    return model.forward(batch, DensePlan(cache, batch)).logits_MV


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("redo", [True, False])
def test_text_turns_and_meter_are_those_of_the_plain_algorithm(name, redo):
    """The whole method again from the specification: one token at a time, every distribution read from scratch by both
    models, the writers, the emitted tokens, and TV summed over the small model's tokens."""
    params, small = PARAMS[name], _load_once(SMALL, dtype="float32", device="cpu")
    llm = adaptive(2.0, dwell=3, window=3, redo=redo, max_draft=7)
    for prompt in PROMPTS[:3]:
        (output,) = llm.generate(prompt, params)
        begin = output.prompt_token_ids if hasattr(output, "prompt_token_ids") else prompt_ids(prompt)
        text = [*begin, *output.token_ids]
        q_MV, p_MV = rows(small, text), rows(target(), text)
        turn, total, writers = EntropyTurn.first(llm.recipe.drafter._rule), 0.0, ""
        for position in range(len(begin), len(text)):
            q_V, p_V = q_MV[position - 1], p_MV[position - 1]
            if turn.large:
                by_small, turn = False, turn.read_by_large(entropy(p_V))
            else:
                by_small, turn = turn.read_by_small(entropy(q_V))
            writers += "s" if by_small else "l"
            chosen_V = q_V if by_small else p_V
            if params.greedy:
                assert text[position] == int(chosen_V.argmax())
                total += by_small and text[position] != int(p_V.argmax())
            else:
                noise_V = gumbel(params.seed, (position,), len(q_V))[0]
                assert text[position] == int((chosen_V + noise_V).argmax())
                total += by_small * 0.5 * float((q_V.softmax(-1) - p_V.softmax(-1)).abs().sum())
        assert output.metrics.distortion * len(output.token_ids) == pytest.approx(total, abs=1e-4)
        if prompt == PROMPTS[1]:
            assert {"s", "l"} == set(writers)


@dataclass(frozen=True)
class Settled:
    """A turn that is settled beforehand: the large model writes where it says so."""

    writers: tuple[bool, ...]
    position: int = 0

    @property
    def large(self):
        return self.writers[min(self.position, len(self.writers) - 1)]

    def read_by_small(self, entropy):
        return True, Settled(self.writers, self.position + 1)

    def read_by_large(self, entropy):
        return Settled(self.writers, self.position + 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("gap", [1, 63, 600])
@pytest.mark.parametrize("large_first", [True, False])
def test_a_model_that_was_silent_goes_on_as_if_it_had_read_along(gap, large_first, monkeypatch):
    """Each turn is what that model alone makes of the text so far, over gaps of a chunk and more; there and back."""
    turn = Settled((large_first,) * gap + (not large_first,) * 6 + (large_first,) * 6)
    monkeypatch.setattr(EntropyAdaptiveDrafter, "first_turn", lambda self, context: turn)
    small = with_config(None, target=_load_once(SMALL, dtype="float32", device="cpu"))
    models = [base(), small] if large_first else [small, base()]
    begin = prompt_ids(PROMPTS[1])
    if large_first and gap > 512:  # the small model has not read the prompt either: most of the gap may be that
        begin, gap = (begin * gap)[: gap - 20], 20
        turn = Settled((True,) * gap + (False,) * 6 + (True,) * 6)

    def params(count):
        return SamplingParams(max_tokens=count, temperature=1.0, seed=7, ignore_eos=True)

    expected: list[int] = []
    for model, count in zip([*models, models[0]], (gap, 6, 6), strict=True):
        expected += ids(model.generate([[*begin, *expected]], params(count)))[0]
    assert ids(adaptive(1.0).generate([begin], params(gap + 12))) == [expected]


def test_over_many_seeds_the_small_model_s_first_token_follows_q():
    """Goodness of fit over seeds, and the target's distribution as the one that must not fit."""
    prompt, count = PROMPTS[1], 200  # where both have a choice, and not the same
    llm = adaptive(1e9, max_num_seqs=64, max_rows_per_step=1024)
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in range(count)]
    tokens = [each[0] for each in ids(llm.generate([prompt] * count, params))]
    small = _load_once(SMALL, dtype="float32", device="cpu")
    q_V, p_V = (rows(model, prompt_ids(prompt))[-1].softmax(-1) for model in (small, target()))
    seen_V = torch.bincount(torch.tensor(tokens), minlength=len(q_V)) / count
    own, other = (0.5 * float((seen_V - law_V).abs().sum()) for law_V in (q_V, p_V))
    null = [
        0.5
        * float(
            (
                torch.bincount(
                    torch.multinomial(q_V, count, replacement=True, generator=torch.Generator().manual_seed(k)),
                    minlength=len(q_V),
                )
                / count
                - q_V
            )
            .abs()
            .sum()
        )
        for k in range(40)
    ]
    assert min(null) - 0.02 < own < max(null) + 0.02 < other


def test_a_small_model_without_numbers_ends_its_own_request_only(monkeypatch):
    llm = adaptive(1e9)
    drafter, expand = llm.recipe.drafter, EntropyAdaptiveDrafter._expand

    def broken(self, drafts, rows):
        for draft, its in zip(drafts, rows, strict=True):
            if draft.context.request_id == 2 and len(draft.tokens) == 3:
                its.output.logits_MV[its.start] = math.nan
        return expand(self, drafts, rows)

    monkeypatch.setattr(EntropyAdaptiveDrafter, "_expand", broken)
    outputs = llm.generate(PROMPTS, PARAMS["greedy"])
    monkeypatch.undo()
    assert [each.error is not None for each in outputs] == [False, False, True]
    assert "logits are NaN" in outputs[2].error
    expected = alone(SMALL, PARAMS["greedy"])
    assert [each.token_ids for each in outputs if not each.error] == expected[:2]
    assert not drafter._requests
    assert_idle(llm)


@pytest.mark.parametrize("stop", [",", "def"])
def test_a_stop_string_inside_a_turn_ends_the_text_where_the_small_model_ends_it(stop):
    params = SamplingParams(max_tokens=LENGTH, stop=[stop])
    small = with_config(None, target=_load_once(SMALL, dtype="float32", device="cpu"))
    assert [each.text for each in adaptive(1e9).generate(PROMPTS, params)] == [
        each.text for each in small.generate(PROMPTS, params)
    ]


def test_under_a_lossless_rule_it_is_a_draft_model_with_an_entropy_stop():
    llm = adaptive(2.0, verifier="match", num_speculative_tokens=8)  # a given number is not weighed against its cost
    params = PARAMS["sampled"]
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == ids(base().generate(PROMPTS, params))
    assert llm.recipe.promise == "same stream"
    assert any(each.metrics.num_accepted_tokens for each in outputs)


@pytest.mark.parametrize(
    "options",
    [{"threshold": -0.1}, {"threshold": math.nan}, {"threshold": "high"}, {"threshold": True}, {"window": 0},
     {"dwell": 0}, {"dwell": 2.5}, {"max_draft": 0}, {"max_draft": 1000}, {"redo": 1}, {"model": ""}],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused_by_name_and_value(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=name) as caught:
        EntropyAdaptiveDrafter.Config(**{"model": SMALL, **options})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("spelt", ["inf", "Infinity"])
def test_infinity_may_be_spelt_on_a_command_line(spelt):
    assert EntropyAdaptiveDrafter.Config(model=SMALL, threshold=spelt).threshold == math.inf


def test_ids_that_the_tokenizer_does_not_have_are_left_out_of_the_entropy(tmp_path):
    """Tables padded far beyond the tokenizer: 101 entries of which 60 are tokens. One id is all the mass among tokens,
    the padding is flat and above it; so the mean is 0 bits among tokens, and more than 5 with the padding."""
    for name, seed in (("large", 1), ("small", 2)):
        save_model("llama", tmp_path / name, seed=seed)
    large = load(str(tmp_path / "large"), dtype="float32", device="cpu")
    small = load(str(tmp_path / "small"), dtype="float32", device="cpu")
    for model in (large, small):
        model.tokenizer = _Short(model.tokenizer)
    drafter = EntropyAdaptiveDrafter(EntropyAdaptiveDrafter.Config(model="small", threshold=0.5), large, small)
    logits_V = torch.zeros(large.vocab_size)
    logits_V[:60] = -1e4
    logits_V[7] = -50.0
    assert entropy(logits_V) > 5
    assert drafter.entropy_of(logits_V) == 0.0


class _Short:
    """A tokenizer of 60 entries."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __len__(self):
        return 60

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_a_model_of_another_vocabulary_is_refused_when_the_recipe_is_composed(tmp_path):
    with pytest.raises(MismatchError, match="another vocabulary"):
        compose.build({"method": "entropy_adaptive", "model": str(save_model("llama", tmp_path))}, target())


def test_turns_longer_than_the_context_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="two rows for every request"):
        adaptive(1.0, max_num_seqs=8, max_rows_per_step=15)
    with pytest.raises(ConfigError, match="num_speculative_tokens=0"):
        adaptive(1.0, num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="drafts of method 'ngram' carry none"):
        with_config({"method": "ngram", "verifier": "entropy_adaptive"})


def test_any_two_models_of_one_vocabulary_up_to_the_end_of_the_context(tmp_path):
    """On the library's path, too: the limits hold there, and where nothing fits after."""
    large = load(str(save_model("gpt2", tmp_path / "large", seed=1)), dtype="float32", device="cpu")
    small = load(str(save_model("llama", tmp_path / "small", seed=2)), dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    prompts = [[5, 9, 20], list(range(10, 100))]
    for threshold, expected in ((0, large), (1e9, small)):
        config = {"method": "entropy_adaptive", "model": str(tmp_path / "small"), "threshold": threshold}
        found = ids(with_config(config, target=large).generate(prompts, params))
        assert found == ids(with_config(None, target=expected).generate(prompts, params))
        assert len(found[1]) == large.max_length - 90
