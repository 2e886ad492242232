"""How models write tool calls: one row for each family, recognised by its mark in the chat template.

A call is written as text around its name and its arguments, which are JSON or named parameters:

    <tool_call>\\n<function=    add    >\\n    <parameter=a>\\n1\\n</parameter>\\n    </function>\\n</tool_call>
    opens                      name   writes  parameters                           closers

Marks may be special tokens: the reader gets the text with them, and the grammar names them by their ids.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.errors import ConfigError, nearest

log = logging.getLogger(__name__)
_MOST_COUNTED = 1000  # characters of a string that a grammar counts
_NAME = r"\s*(?P<name>[\w.\-]+)\s*"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments that are written one by one.

    Attributes:
        pattern: a parameter with the groups ``key``, ``value`` and perhaps ``string``: "true" or, for JSON, "false";
            None: the reader of the form finds them in another way.
        opens: what each parameter begins with.
        end: what ends them.
        writes: what a grammar writes between the key and a string, between it and another value, and after the value.
        separator: what a grammar writes between parameters; then only strings have an end.
    """

    pattern: re.Pattern[str] | None
    opens: str
    end: str
    writes: tuple[str, str, str]
    separator: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's form of calls.

    Attributes:
        name: for ``--tool-parser``.
        marks: texts that its chat templates contain, all of them.
        opens: what a call begins with, the longest first; empty: a call is the beginning of the text.
        head: the text up to the arguments, with the name as its group, and perhaps ``id``; None: a call is a JSON
            object with its name and arguments.
        closers: what may follow the arguments, in order.
        around: what a grammar writes before the first and after the last call.
        writes: the texts of a grammar before the name, after it, and after the arguments.
        between: a grammar's text between calls.
        parameters: named parameters; None: the arguments are JSON.
        short_ids: ids have nine letters and digits.
        quote: mark around a string in arguments like ``{key:value}``; empty: they are not written so.
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    head: re.Pattern[str] | None
    closers: tuple[str, ...]
    writes: tuple[str, str, str]
    around: tuple[str, str] = ("", "")
    between: str = "\n"
    parameters: Parameters | None = None
    short_ids: bool = False
    quote: str = ""

    @property
    def close(self) -> str:
        """The end of a call, at which an answer with one call may stop; "": none is written."""
        return (*self.closers, "")[0]


HERMES = ToolFormat(
    name="hermes",
    marks=("<tool_call>",),
    opens=("<tool_call>",),
    head=None,
    closers=("</tool_call>",),
    writes=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
)
_TAGGED = Parameters(
    re.compile(
        r"<parameter=(?P<key>[^>\n]*)>\n?(?P<value>.*?)(?:\n?</parameter>|\n(?=<parameter=|</function>))", re.DOTALL
    ),
    "<parameter=",
    "</function>",
    (">\n", ">\n", "\n</parameter>\n"),
)
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DSML = Parameters(
    re.compile(
        r'<｜DSML｜parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">(?P<value>.*?)</｜DSML｜parameter>',
        re.DOTALL,
    ),
    "<｜DSML｜parameter",
    "</｜DSML｜invoke>",
    ('" string="true">', '" string="false">', "</｜DSML｜parameter>\n"),
)


def _dsml(name: str, section: str) -> ToolFormat:
    begin, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    call = '<｜DSML｜invoke name="'
    return ToolFormat(
        name=name,
        marks=("DSML", f"DSML｜{section}" if section == "tool_calls" else "DSML"),
        opens=(f"{begin}\n{call}", begin + call, call),
        head=re.compile(r'(?P<name>[^"\n]+)">'),
        closers=(end,),
        writes=(call, '">\n', "</｜DSML｜invoke>"),
        around=(f"{begin}\n", f"\n{end}"),
        parameters=_DSML,
    )


def _tagged(name: str, mark: str, tag: str) -> ToolFormat:
    begin, end, call = f"<{tag}>", f"</{tag}>", "<function="
    return ToolFormat(
        name=name,
        marks=(mark, call),
        opens=(f"{begin}\n{call}", begin + call, call),
        head=re.compile(_NAME + ">"),
        closers=(end,),
        writes=(f"{begin}\n{call}", ">\n", f"</function>\n{end}"),
        parameters=_TAGGED,
    )


def _gemma(name: str, begin: str, end: str, quote: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        marks=(begin,),
        opens=(f"{begin}call:",),
        head=re.compile(_NAME + r"(?=\{)"),
        closers=(end,),
        writes=(f"{begin}call:", "{", "}" + end),
        between="",
        parameters=Parameters(None, "", "}", (":" + quote, ":", quote), ","),
        quote=quote,
    )


HARMONY = ToolFormat(  # gpt-oss: a sequence of messages, of which some are calls; see harmony.py
    name="harmony",
    marks=("<|channel|>",),
    opens=("<|end|>", "<|return|>", "<|start|>", "<|channel|>"),
    head=re.compile(_NAME),
    closers=("<|call|>",),
    writes=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    between="<|start|>assistant",
)
PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    marks=("func_name1(",),
    opens=("<|python_start|>", ""),
    head=re.compile(_NAME + r"\("),
    closers=(),
    writes=("", "(", ")"),
    around=("[", "]"),
    between=", ",
    parameters=Parameters(None, "", ")", ("=", "=", ""), ", "),
)
FORMATS = (  # the most special mark first
    HARMONY,
    ToolFormat(
        name="kimi_k2",
        marks=("<|tool_calls_section_begin|>",),
        opens=(_KIMI[0] + "<|tool_call_begin|>", "<|tool_call_begin|>"),
        head=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"),
        closers=("<|tool_call_end|>", _KIMI[1]),
        writes=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        around=_KIMI,
        between="",
    ),
    _dsml("deepseek_v4", "tool_calls"),
    _dsml("deepseek_v32", "function_calls"),
    ToolFormat(
        name="deepseek_v3",
        marks=("tool▁sep", "```json"),
        opens=(_DEEPSEEK[0] + "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
        head=re.compile(r"\s*function<｜tool▁sep｜>" + _NAME + r"```json\s*"),
        closers=("```", "<｜tool▁call▁end｜>", _DEEPSEEK[1]),
        writes=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        around=_DEEPSEEK,
    ),
    ToolFormat(
        name="deepseek_v31",
        marks=("tool▁sep",),
        opens=(_DEEPSEEK[0] + "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
        head=re.compile(_NAME + "<｜tool▁sep｜>"),
        closers=("<｜tool▁call▁end｜>", _DEEPSEEK[1]),
        writes=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        around=_DEEPSEEK,
        between="",
    ),
    ToolFormat(
        name="minimax_m2",
        marks=("minimax:tool_call",),
        opens=('<minimax:tool_call>\n<invoke name="', '<minimax:tool_call><invoke name="', '<invoke name="'),
        head=re.compile(r'(?P<name>[^"\n]+)">'),
        closers=("</minimax:tool_call>",),
        writes=('<invoke name="', '">\n', "</invoke>"),
        around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        parameters=Parameters(
            re.compile(r'<parameter name="(?P<key>[^"]*)">(?P<value>.*?)</parameter>', re.DOTALL),
            '<parameter name="',
            "</invoke>",
            ('">', '">', "</parameter>\n"),
        ),
    ),
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _tagged("seed_oss", "<seed:tool_call>", "seed:tool_call"),
    _tagged("qwen3_coder", "<function=", "tool_call"),
    ToolFormat(
        name="glm45",
        marks=("<arg_key>",),
        opens=("<tool_call>",),
        head=re.compile(_NAME + r"(?=<arg_key>|</tool_call>)"),
        closers=(),
        writes=("<tool_call>", "\n", "</tool_call>"),
        parameters=Parameters(
            re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
            "<arg_key>",
            "</tool_call>",
            ("</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    ToolFormat(
        name="mistral",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        opens=("[TOOL_CALLS]",),
        head=re.compile(_NAME + r"(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*"),
        closers=(),
        writes=("[TOOL_CALLS]", "[ARGS]", ""),
        between="",
        short_ids=True,
    ),
    ToolFormat(
        name="mistral_v3",
        marks=("[TOOL_CALLS]",),
        opens=("[TOOL_CALLS]",),
        head=None,
        closers=(),
        writes=('{"name": "', '", "arguments": ', "}"),
        around=("[TOOL_CALLS][", "]"),
        between=", ",
        short_ids=True,
    ),
    HERMES,
    PYTHONIC,
    ToolFormat(
        name="llama3_json",
        marks=("ipython", '"parameters"'),
        opens=("<|python_tag|>", ""),
        head=None,
        closers=(),
        writes=('{"name": "', '", "parameters": ', "}"),
        between="; ",
    ),
)
NAMES = tuple(each.name for each in FORMATS)


def check_parser(name: str) -> None:
    """Refuse a name that is no row's, nor "auto".

    Raises:
        ConfigError: with the nearest name.
    """
    if name not in ("auto", *NAMES):
        raise ConfigError(f"--tool-parser {name}: {nearest(name, ('auto', *NAMES))}")


def format_of(tokenizer: Any, name: str = "auto") -> ToolFormat:
    """Return the form in which a model writes calls.

    Args:
        tokenizer: its chat template has the marks.
        name: a row's name; "auto": the row of the marks in the template and in its calls, else Hermes'.
    Raises:
        ConfigError: there is no such row.
    """
    if name != "auto":
        check_parser(name)
        return next(each for each in FORMATS if each.name == name)
    template = str(tokenizer.chat_template)
    if "tools" not in template:  # tools and calls are written into messages, in the form of Hermes
        return HERMES
    marked = [each for each in FORMATS if all(mark in template for mark in each.marks)]
    written = _sample(tokenizer) if marked and marked[0] is not HERMES else None
    for each in marked:
        if (
            each is HERMES
            or written is None
            or any(begin and begin in written for begin in (each.opens[-1], *each.marks))
            or (each is PYTHONIC and "[add(" in written)
        ):
            return each
    log.info("the chat template writes calls in no known form: they are read in that of Hermes; see --tool-parser")
    return HERMES


def _sample(tokenizer: Any) -> str | None:
    """Return what the chat template makes of a call; None: it refuses this conversation."""
    call = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # a template may raise any error
        return None


class ToolGrammar:
    """Writes a form's calls as rules of a grammar, where special tokens have their ids.

    Args:
        form: the form.
        special: texts of the tokenizer's special tokens, and their ids.
    """

    def __init__(self, form: ToolFormat, special: Mapping[str, int]) -> None:
        self.form = form
        self._special = {text: token for text, token in special.items() if any(text in each for each in _texts(form))}

    @property
    def marks(self) -> frozenset[str]:
        """The special tokens that its calls are written with."""
        return frozenset(self._special)

    @property
    def begin(self) -> str:
        """The begin of the first call, up to its name; "": other texts begin so, too."""
        if self.form in (HARMONY, PYTHONIC):
            return ""
        whole = self.form.around[0] + self.form.writes[0]
        return next(
            (whole[: len(each)] for each in (*self._special, *self.form.opens) if each and whole.startswith(each)),
            whole,
        )

    def literal(self, text: str) -> str:
        """Return a text as a grammar's terminal."""
        if not text:
            return '""'
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )

    def named(self, index: int, properties: Mapping[str, Any], required: Sequence[str], defs: Any) -> str:
        """Return the rule ``args_INDEX`` of named parameters, with their values' rules."""
        parameters = self.form.parameters
        assert parameters is not None
        rules, places, ends = [], [], parameters.writes[2]
        for number, (key, schema) in enumerate(properties.items()):
            schema = schema if isinstance(schema, Mapping) else {}
            value, (of_text, of_json, after) = f"value_{index}_{number}", parameters.writes
            free = ends and schema.get("type") == "string" and "enum" not in schema and "const" not in schema
            texts = schema.get("enum", [schema["const"]] if "const" in schema else []) if ends else []
            between = of_text
            if free:
                most = schema.get("maxLength")
                text = f"/(.|\\n){{0,{most}}}/" if isinstance(most, int) and most <= _MOST_COUNTED else "/(.|\\n)*/"
                if after in self._special:  # which is no text
                    rules.append(f"{value}: TEXT_{index}_{number} {self.literal(after)}")
                    rules.append(f"TEXT_{index}_{number}: {text}")
                else:
                    rules.append(f"{value}[suffix={json.dumps(after)}]: {text}")
            elif texts and all(isinstance(each, str) for each in texts):
                rules.append(f"{value}: ({' | '.join(map(self.literal, texts))}) {self.literal(after)}")
            else:
                between = of_json
                laid_out = {**schema, **({"$defs": defs} if defs else {})}
                rules.append(
                    f"{value}: %json {json.dumps(laid_out)} {self.literal('' if parameters.separator else after)}"
                )
            before = self.literal(f"{_before(parameters)}{key}{between}")
            places.append((f"{before} {value}", key in required))
        if parameters.separator and places:
            return "\n".join([f"args_{index}: rest_{index}_0_0", *self._separated(index, places), *rules])
        whole = " ".join(f"({place}){'' if needed else '?'}" for place, needed in places)
        return "\n".join([f"args_{index}: {whole or self.literal('')}", *rules])

    def _separated(self, index: int, places: Sequence[tuple[str, bool]]) -> Iterator[str]:
        """The rules of parameters from one on, with none before it (0), or some (1)."""
        assert self.form.parameters is not None
        separator = self.literal(self.form.parameters.separator)
        for number, (place, needed) in enumerate(places):
            for some in (0, 1) if number else (0,):
                last = number + 1 == len(places)
                after = "" if last else f" rest_{index}_{number + 1}_1"
                without = '""' if last else f"rest_{index}_{number + 1}_{some}"
                other = "" if needed else f" | {without}"
                yield f"rest_{index}_{number}_{some}: {f'{separator} ' if some else ''}{place}{after}{other}"


def _before(parameters: Parameters) -> str:
    """Return what a parameter begins with, up to its key."""
    return parameters.opens + (' name="' if parameters.opens.endswith("parameter") else "")


def _texts(form: ToolFormat) -> list[str]:
    found = [*form.opens, *form.closers, *form.writes, *form.around]
    return found + ([] if form.parameters is None else [form.parameters.opens, *form.parameters.writes])
