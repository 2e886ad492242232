"""The public doubles do what their names say, in a real engine: the fate of their drafts is known beforehand."""

from __future__ import annotations

import pytest

from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken_lab.testing import AlwaysWrong, EvenlySpoilt, Oracle, Random, Recorder, Scripted, ScriptRule, Stub
from helpers.zoo_llms import PROMPTS, greedy, ids, prompt_ids, target, truth, with_drafter

LENGTH = 40
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


def run(drafter: object, prompt: str = PROMPTS[0], **options: object):
    (output,) = with_drafter(drafter, num_nodes=4, **options).generate(prompt, PARAMS)  # type: ignore[arg-type]
    assert output.error is None, output.error
    return output


@pytest.mark.parametrize(("double", "accepted"), [(Oracle, 1.0), (AlwaysWrong, 0.0)], ids=["oracle", "wrong"])
def test_an_oracle_is_always_right_and_its_opposite_never(double, accepted):
    metrics = run(double(truth())).metrics
    assert metrics.num_draft_tokens
    assert metrics.num_accepted_tokens == accepted * metrics.num_draft_tokens


def test_a_stub_is_plain_decoding():
    output = run(Stub())
    assert output.token_ids == greedy(PROMPTS[0], LENGTH)
    assert output.metrics.num_draft_tokens == 0


def test_spoilt_positions_depend_on_prompt_and_position_only():
    drafter = Scripted(truth(), 0.5)
    long, short = Recorder(drafter), Recorder(drafter)
    first, again = run(long), run(short, max_num_seqs=1)
    assert ids([first]) == ids([again])
    assert 0 < first.metrics.num_accepted_tokens < first.metrics.num_draft_tokens
    assert [each[1:] for each in long.proposed] == [each[1:] for each in short.proposed]


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_evenly_spoilt_drafts_reach_the_expected_tokens_per_step_in_a_short_run(acceptance):
    """That is (1 - a^(N+1)) / (1 - a) for drafts of N tokens."""
    script = greedy(PROMPTS[0], 2 * LENGTH + 1)
    llm = LLM.from_target(
        target(),
        speculative_config={
            "method": EvenlySpoilt({tuple(prompt_ids(PROMPTS[0])): script}, acceptance),
            "verifier": ScriptRule([*prompt_ids(PROMPTS[0]), *script]),
            "num_speculative_tokens": 4,
        },
    )
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=2 * LENGTH, ignore_eos=True))
    assert output.token_ids == script[:-1]
    expected = (1 - acceptance**5) / (1 - acceptance)
    assert output.metrics.tokens_per_step == pytest.approx(expected, rel=0.12)


def test_the_script_rule_emits_the_script_whatever_the_target_says():
    prompt, script = prompt_ids(PROMPTS[0]), list(range(200, 200 + LENGTH + 1))
    recipe = {
        "method": Oracle({tuple(prompt): script}),
        "verifier": ScriptRule([*prompt, *script]),
        "num_speculative_tokens": 3,
    }
    (output,) = LLM.from_target(target(), speculative_config=recipe).generate(PROMPTS[0], PARAMS)
    assert output.token_ids == script[:-1] != greedy(PROMPTS[0], LENGTH)
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens


def test_random_tokens_come_from_the_chosen_ones():
    record = Recorder(Random(8192, tree=True, full=True, tokens=(7, 9)))
    run(record)
    assert {token for *_, draft in record.proposed for token in draft.tree.tokens} == {7, 9}
    assert sum(record.released.values()) == 1
    assert not record.after_release
