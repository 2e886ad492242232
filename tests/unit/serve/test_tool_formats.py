"""Calls in the forms of other families: read however the text is split, and written where they are forced."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.serve.harmony import HarmonyReader
from foretoken.serve.schema import Tool
from foretoken.serve.tool_choice import ToolChoice
from foretoken.serve.tool_formats import FORMATS, HERMES, NAMES, ToolGrammar, format_of
from foretoken.serve.tool_reader import reader_of
from foretoken.serve.tools import joined
from helpers.serving import NAME, served
from helpers.zoo_llms import with_config

TOOLS = {"add": {"a": {"type": "integer"}, "text": {"type": "string"}}, "now": {}}
TEXT = 'a "b" \\ </function> {é}\nx'  # a mark inside a value, quotes and a line end
JSON = json.dumps({"a": 7, "text": TEXT}, ensure_ascii=False)
WRITTEN = {  # a call with arguments, and one without
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    + JSON
    + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    + "<|tool_calls_section_end|>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">7'
    + '</｜DSML｜parameter>\n<｜DSML｜parameter name="text" string="true">'
    + f"{TEXT}</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
    + '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    + JSON
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    + "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">7</parameter>\n'
    + f'<parameter name="text">{TEXT}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"
    + f"<parameter=text>\n{TEXT}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
    + "</tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"
    + f"<arg_key>text</arg_key>\n<arg_value>{TEXT}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "mistral": f"[TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral_v3": f'[TOOL_CALLS][{{"name": "add", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>\n'
    + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "harmony": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}<|call|><|start|>assistant"
    + " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "gemma4": f'<|tool_call>call:add{{a:7,text:<|"|>{TEXT}<|"|>}}<tool_call|><|tool_call>call:now{{}}<tool_call|>',
    "functiongemma": f"<start_function_call>call:add{{a:7,text:<escape>{TEXT}<escape>}}<end_function_call>"
    + "<start_function_call>call:now{}<end_function_call>",
    "llama4_pythonic": f"[add(a=7, text={TEXT!r}), now()]",
    "llama3_json": f'{{"name": "add", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
}
WRITTEN["seed_oss"] = WRITTEN["qwen3_coder"].replace("tool_call>", "seed:tool_call>")
WRITTEN["deepseek_v32"] = WRITTEN["deepseek_v4"].replace("tool_calls", "function_calls")
BEGINNING = ("llama3_json", "llama4_pythonic")  # a text begins with its calls
BY_NAME = {each.name: each for each in FORMATS}


def read(name: str, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    reader, text, calls = reader_of(BY_NAME[name], TOOLS, only=False), "", list[dict[str, Any]]()
    for place, piece in enumerate(pieces):
        more, found = reader.read(piece, final=place == len(pieces) - 1)
        text, calls = text + more, calls + found
    return text, joined(calls)


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_every_form_has_a_sample() -> None:
    assert set(WRITTEN) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read_however_they_are_split(name: str) -> None:
    before = "" if name in BEGINNING else "Let me see. <"
    whole = before + WRITTEN[name]
    expected = [("add", {"a": 7, "text": TEXT}), ("now", {})]
    for pieces in (
        [whole],
        list(whole),
        *([whole[:place], whole[place:]] for place in range(1, len(whole))),
        *([whole[place : place + size] for place in range(0, len(whole), size)] for size in (2, 3, 7, 50)),
    ):
        text, calls = read(name, pieces)
        assert functions(calls) == expected
        assert text == before
        assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_has_the_beginning_of_its_arguments(name: str) -> None:
    written = WRITTEN[name]
    first = read(name, [written])[1][0]["function"]["arguments"]
    for end in range(written.index("add") + 30, len(written)):
        for call in read(name, [written[:end]])[1]:
            if call["function"]["name"] == "add":
                assert first.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("name", NAMES)
def test_text_without_a_call_stays_text(name: str) -> None:
    mark = BY_NAME[name].opens[-1]
    for text in ("plain", f"a {mark[:3]}", "  {no json", "[1, 2] ; {"):
        assert read(name, list(text)) == (text, [])


def test_text_may_follow_a_call() -> None:
    text, calls = read("qwen3_coder", [f"One. {WRITTEN['qwen3_coder']}\nTwo."])
    assert (text, len(calls)) == ("One. \n\nTwo.", 2)


def test_a_missing_end_of_a_parameter_is_forgiven() -> None:
    written = "<function=add>\n<parameter=a>\n7\n<parameter=text>\nb\n</function>"
    assert functions(read("qwen3_coder", list(written))[1]) == [("add", {"a": 7, "text": "b"})]


def test_a_value_that_is_no_json_is_a_string() -> None:
    written = "<function=f>\n<parameter=a>\nNaN\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</function>"
    assert functions(read("qwen3_coder", [written])[1]) == [("f", {"a": "NaN", "b": [1]})]


def test_ids_are_those_of_the_family() -> None:
    assert [call["id"] for call in read("kimi_k2", [WRITTEN["kimi_k2"]])[1]] == ["functions.add:0", "functions.now:1"]
    assert all(len(call["id"]) == 9 for call in read("mistral", [WRITTEN["mistral"]])[1])


def test_a_function_that_is_not_offered_is_no_call_of_llama() -> None:
    written = '{"name": "other", "parameters": {}}'
    assert read("llama3_json", list(written)) == (written, [])


HARMONY = (
    "<|channel|>analysis<|message|>Two < numbers.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I add. <|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>7.<|return|>"
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (HARMONY, ("Two < numbers.", "I add. 7.", [("add", {})])),
        (" to=functions.now<|channel|>commentary json<|message|>", ("", "", [("now", {})])),
        (HARMONY[: HARMONY.index("bers")], ("Two < num", "", [])),
        ("to b <|or not", ("", "to b <|or not", [])),
        ("<|channel|>final<|message|>{}", ("", "{}", [])),
    ],
)
def test_channels_of_harmony(written: str, expected: tuple[str, str, list[Any]]) -> None:
    for pieces in ([written], list(written), *([written[:at], written[at:]] for at in range(1, len(written)))):
        reader, parts = HarmonyReader(), []
        for place, piece in enumerate(pieces):
            parts.append(reader.parts(piece, final=place == len(pieces) - 1))
        calls = joined(call for _, _, found in parts for call in found)
        for call in calls:
            call["function"]["arguments"] = call["function"]["arguments"] or "{}"  # a call that is cut has none
        assert ("".join(each[0] for each in parts), "".join(each[1] for each in parts)) == expected[:2]
        assert functions(calls) == expected[2]


def test_reasoning_of_harmony_is_counted_by_its_end() -> None:
    reader = HarmonyReader(end=9)
    reader.parts(HARMONY, final=True)
    reader.count([1, 2, 3, 9, 4])
    reader.count([5, 9])
    assert reader.reasoning_tokens == 4
    plain = HarmonyReader(end=9)
    plain.parts("<|channel|>final<|message|>7.", final=True)
    plain.count([1, 9])
    assert plain.reasoning_tokens == 0


def test_nested_values_of_gemma() -> None:
    written = '<|tool_call>call:add{a:[1,{b:<|"|>}<|"|>},true],n:-0.5,w:two words,d:{},s:"x:y"}<tool_call|>'
    expected = {"a": [1, {"b": "}"}, True], "n": -0.5, "w": "two words", "d": {}, "s": "x:y"}
    assert functions(read("gemma4", list(written))[1]) == [("add", expected)]


@pytest.mark.parametrize(
    "written",
    [
        "[add(1)]",
        "[other(a=1)]",
        "[add(a=open('x'))]",
        "[1, 2]",
        "[add(a=1), 3]",
        "add(a=1)",
        "[add(a=1)",
        "[add(**{})]",
    ],
)
def test_python_that_is_no_list_of_calls_is_text(written: str) -> None:
    assert read("llama4_pythonic", list(written)) == (written, [])


def test_constants_of_json_and_marks_around_python() -> None:
    written = '<|python_start|>[add(a=true, b=None, c=["x", {"d": 1.5}])]<|python_end|>'
    assert functions(read("llama4_pythonic", list(written))[1]) == [
        ("add", {"a": True, "b": None, "c": ["x", {"d": 1.5}]})
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_template_selects_the_form(name: str) -> None:
    marks = " ".join(BY_NAME[name].marks)
    written = WRITTEN[name]
    tokenizer = SimpleNamespace(
        chat_template=f"tools {marks} {written}", apply_chat_template=lambda talk, tokenize: written
    )
    assert format_of(tokenizer).name == name
    tokenizer.apply_chat_template = lambda talk, tokenize: "nothing of the kind"
    assert format_of(tokenizer) in (HERMES, BY_NAME["llama3_json"])
    assert format_of(tokenizer, "glm45").name == "glm45"


def test_a_parser_is_known_by_its_name() -> None:
    with pytest.raises(ConfigError, match="--tool-parser glm4: did you mean 'glm45'"):
        format_of(SimpleNamespace(chat_template=""), "glm4")


def test_special_tokens_are_named_by_their_ids_in_a_grammar() -> None:
    writes = ToolGrammar(BY_NAME["kimi_k2"], {"<|tool_call_begin|>": 9, "<|other|>": 8})
    assert writes.literal("<|tool_call_begin|>functions.") == '<[9]> "functions."'
    assert writes.marks == {"<|tool_call_begin|>"}


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("harmony", ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")),
        ("gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    ],
)
def test_forced_calls_with_marks_that_are_special_tokens(name: str, marks: tuple[str, ...]) -> None:
    llm = with_config({"method": "none"})
    ends = llm.target.end_ids  # any other special tokens do in the place of the marks
    special = dict(zip(marks, sorted(set(llm.tokenizer.all_special_ids) - ends), strict=False))
    assert len(special) == len(marks)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tool = Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": schema}})
    form, shown = BY_NAME[name], {token: text for text, token in special.items()}
    for choice in ("required", "auto"):
        writes = ToolChoice([tool], choice, None, parallel=False, writes=ToolGrammar(form, special))
        # under auto the answer has a form, so that it is that or a call
        wanted = writes.structure(None if choice == "required" else {"json": {"type": "object", "properties": {}}})
        assert wanted is not None
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, structured_outputs=dict(wanted))
        (output,) = llm.generate(["Hello"], params)
        assert output.finish_reason == "stop"
        text = "".join(shown.get(token) or llm.tokenizer.decode([token]) for token in output.token_ids[:-1])
        _, calls = read(name, [text])
        if choice == "required":
            assert [(call, set(arguments)) for call, arguments in functions(calls)] == [("weather", {"city"})]
        else:
            assert calls or text.removeprefix("<|channel|>final<|message|>").startswith("{")


WEATHER: dict[str, Any] = {
    "city": {"enum": ["Oslo", "Rome"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "comment": {"type": "string", "maxLength": 20},
}


@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_are_written_in_the_form(name: str) -> None:
    """A small model cannot write them by itself: the grammar does, and the text reads back."""
    parameters = {"type": "object", "properties": WEATHER, "required": ["city", "days"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "How warm is it in Oslo?"}],
        "tools": [tool, {"type": "function", "function": {"name": "now"}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 1.0,
        "seed": 4,
        "max_tokens": 200,
    }
    with served(with_config({"method": "suffix"}), tool_parser=name) as server:
        status, found, _ = server.send("/v1/chat/completions", body)
        assert status == 200, found
        (choice,) = found["choices"]
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9
        assert set(arguments) <= set(WEATHER)
        strict = {"type": "function", "function": {**tool["function"], "strict": True}}
        for more in ({"tool_choice": "required"}, {"tool_choice": "auto", "tools": [strict]}):
            status, found, _ = server.send("/v1/chat/completions", body | more | {"max_tokens": 4})
            assert status == 200, found
