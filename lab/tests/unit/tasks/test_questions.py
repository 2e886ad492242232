"""The generated tasks as questions for the judge: answers that stay right, and labels that can be checked again."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.models.load import load
from foretoken_lab.judge import mining as judge_mining
from foretoken_lab.judge.mining import RANDOM, Mining, mine
from foretoken_lab.tasks import catalog, scoring
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.question_sets import find_questions
from foretoken_lab.tasks.questions import still_right
from foretoken_lab.tasks.training import TASKS
from helpers.threads import one_thread  # noqa: F401  (a fixture)


def still(task: catalog.Task, said: str, example: Example) -> bool:
    return still_right(task, example, said)


def test_an_answer_in_words_is_still_right_if_it_holds_the_right_one() -> None:
    task = catalog.find("arithmetic")
    example = Example(id="Q", prompt="Q", answer="Ada Lovelace", response="", category="planted", alternatives=("Ada",))
    words = replace(task, score=scoring.score_span)
    right = ("Ada Lovelace", "the Ada Lovelace", "It was Ada Lovelace.", "ada!", "it's Ada")
    wrong = ("Ada of Lovelace said so", "Lovelace", "not in any way Ada at all", "")
    assert [still(words, said, example) for said in right] == [True] * len(right)
    assert [still(words, said, example) for said in wrong] == [False] * len(wrong)
    assert not still(task, "8 7 9", replace(example, answer="7"))  # numbers: as the checker says


def test_other_code_is_still_right_if_it_does_the_same_and_an_object_that_says_a_key_twice_is_not() -> None:
    code = next(each for each in TASKS["code"](1) if "return a + b\n" in each.answer)
    other = code.answer.replace("a + b", "b + a")
    assert catalog.find("code").score(other, code)["correct"] == 0.0
    assert still(catalog.find("code"), other, code)
    assert not still(catalog.find("code"), code.answer.replace("a + b", "a - b"), code)
    example = Example(id="j", prompt="", answer='{"a": 1, "b": {"c": 2}}', response="", category="")
    for said, right in (
        ('{"b": {"c": 2}, "a": 1}', True),
        ('{"a": 1, "a": 1, "b": {"c": 2}}', False),
        ('{"a": 1, "b": {"c": 3, "c": 2}}', False),
        ('{"a": 1}', False),
    ):
        assert still(catalog.find("json"), said, example) == right


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--task cod: did you mean 'code'\?"):
        Mining(tasks=("profiles", "cod"))
    with pytest.raises(ConfigError, match="--task: name at least one"):
        Mining(tasks=("",))


def test_on_the_bundled_pair_every_label_can_be_checked_again() -> None:
    target = load("zoo:base", device="cpu")
    llm = LLM.from_target(
        target, max_num_seqs=judge_mining.ABREAST, enable_prefix_caching=True, speculative_config=None
    )
    seen: list[int] = []
    names = ("code", "keys")
    found = mine(llm, load("zoo:draft", device="cpu"), Mining(tasks=names, count=6), seen.append)
    assert seen[-1] == 6
    examples = {
        tuple(llm.chat_prompt([{"role": "user", "content": each.prompt}])["prompt_token_ids"]): (name, each)
        for name in names
        for each in islice(TASKS[name](1000), 20)
    }
    assert 0 < len(found.questions) == sum(found.right.values())
    plain = LLM.from_target(
        target, max_num_seqs=judge_mining.ABREAST, speculative_config=None
    )  # without what the run reuses
    tried: list[tuple[int, list[int], bool]] = []
    for number, question in enumerate(found.questions):
        for node, label in enumerate(question.labels):
            inside = node in question.tree.parents  # of the text: not tried by itself
            if label is not None and label[0] != RANDOM and not inside:
                tried.append((number, [question.tree.tokens[each] for each in question.tree.path_to(node)], label[1]))
    asked = [(number, [], True) for number in range(len(found.questions))] + tried
    tasks = [catalog.find(examples[tuple(each.prompt)][0]) for each in found.questions]
    outputs = plain.generate(
        [{"prompt_token_ids": [*found.questions[number].prompt, *begun]} for number, begun, _ in asked],
        [greedy(tasks[number].max_tokens - len(begun)) for number, begun, _ in asked],
    )
    answers = [[*begun, *output.token_ids] for (_, begun, _), output in zip(asked, outputs, strict=True)]
    for (number, _, fine), answer in zip(asked, answers, strict=True):
        _, example = examples[tuple(found.questions[number].prompt)]
        said = llm.tokenizer.decode(answer, skip_special_tokens=True).strip()
        short = len(answer) - 1 <= judge_mining.LONGER * (len(answers[number]) - 1)  # without the token that ends it
        assert (short and still(tasks[number], said, example)) == fine, said
    assert sum(not fine for *_, fine in tried) > 20
    assert sum(fine for *_, fine in tried) > 5


def greedy(most: int) -> Any:
    from foretoken.options.sampling import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=most)


def test_a_task_is_found_next_to_a_file_of_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    assert find_questions("code").max_tokens == catalog.find("code").max_tokens
