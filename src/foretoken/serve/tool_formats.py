"""How models write tool calls: a file of ``tool_forms/`` for each family, recognised by its mark in the chat template.

A call is written as text around its name and its arguments, which are JSON or named parameters:

    <tool_call>\\n<function=    add    >\\n    <parameter=a>\\n1\\n</parameter>\\n    </function>\\n</tool_call>
    opens                      name   writes  parameters                           closers

Marks may be special tokens: the reader gets the text with them, and the grammar names them by their ids.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, nearest

log = logging.getLogger(__name__)
_MOST_COUNTED = 1000  # characters of a string that a grammar counts


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


NAMES = (  # the most special mark first
    *("harmony", "kimi_k2", "deepseek_v4", "deepseek_v32", "deepseek_v3", "deepseek_v31", "minimax_m2", "gemma4"),
    *("functiongemma", "seed_oss", "qwen3_coder", "glm45", "mistral", "mistral_v3", "hermes", "llama4_pythonic"),
    "llama3_json",
)


def _read(name: str) -> ToolFormat:
    """Return the form of ``tool_forms/NAME.json``: the attributes of :class:`ToolFormat`, patterns as texts."""
    file = Path(__file__).with_name("tool_forms") / f"{name}.json"
    form: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    written: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in form.items()}
    if parameters := written.get("parameters"):
        pattern = parameters["pattern"] and re.compile(parameters["pattern"], re.DOTALL)
        written["parameters"] = Parameters(**{**parameters, "pattern": pattern, "writes": tuple(parameters["writes"])})
    return ToolFormat(**{**written, "name": name, "head": form["head"] and re.compile(form["head"])})


FORMATS = tuple(map(_read, NAMES))
# gpt-oss writes a sequence of messages, of which some are calls: see harmony.py
HARMONY, HERMES, PYTHONIC = (FORMATS[NAMES.index(name)] for name in ("harmony", "hermes", "llama4_pythonic"))


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
