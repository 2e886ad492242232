"""The constraint of a tool choice: a grammar of calls with arguments that match the tools' schemas.

    none     text; the prompt knows no tools        required     calls and nothing else
    auto     text with calls, as the model likes    a function   one call of it

Like every structured output, it masks the distribution, and drafts are verified under the mask.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.errors import ConfigError
from foretoken.engine.text.grammars import refuse_contradictions
from foretoken.engine.text.json_schemas import LAYOUT, compilable
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import Tool
from foretoken.serve.tool_formats import HARMONY, HERMES, ToolFormat, ToolGrammar

_OPEN_ENDED = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "unevaluatedProperties")

HERMES_GRAMMAR = ToolGrammar(HERMES, {})


class ToolChoice:
    """The tools that an answer may call, and the number of calls.

    Args:
        tools: the request's tools.
        choice: "none", "auto" or "required"; None: "auto".
        function: the function to call, in place of a choice.
        parallel: whether an answer may have several calls.
        writes: the form of the model's calls.
    Raises:
        ApiError: 400: two tools have the same name, or the chosen function is not among the tools.
    Attributes:
        tools: the tools in the prompt; empty: none.
        forced: whether the answer consists of calls.
        stop: a string that ends the answer, in addition to the request's own; None: there is none.
    """

    def __init__(
        self,
        tools: Sequence[Tool] | None,
        choice: str | None,
        function: str | None,
        *,
        parallel: bool | None,
        writes: ToolGrammar = HERMES_GRAMMAR,
    ) -> None:
        offered = list(tools or ())
        names = [tool.function.name for tool in offered]
        for name in names:
            if names.count(name) > 1:
                raise ApiError(
                    400, f"two tools have the name '{name}', so calls would be ambiguous: rename one", param="tools"
                )
        self.forced = choice == "required" or function is not None
        if not offered and self.forced:
            raise ApiError(400, "tool_choice requires tools: give both or neither", param="tools")
        if function is not None and function not in names:
            message = f"tool_choice names '{function}', which is not among the tools: {', '.join(names)}"
            raise ApiError(400, message, param="tool_choice")
        self.tools = [] if choice == "none" else offered
        self._single = parallel is False or function is not None
        self._callable = [each for each in self.tools if function in (None, each.function.name)]
        self._writes = writes
        self.stop = (writes.form.close or None) if self.tools and self._single and not self.forced else None

    @property
    def form(self) -> ToolFormat:
        """The form of the calls."""
        return self._writes.form

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the text of the answer must keep, since calls are written with them."""
        return self._writes.marks if self.tools or self.form is HARMONY else frozenset()

    def structure(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the constraint on the whole answer as ``structured_outputs``; None: any text.

        Args:
            form: the constraint on an answer without calls (``json`` or ``json_object``); None: any text.
        """
        writes = self._writes
        before, after = map(writes.literal, writes.form.around)
        more = "" if self._single else f" ({writes.literal(writes.form.between)} call)*"
        calls = f"{before} call{more} {after}"
        if self.forced:
            return {"grammar": f"start: {calls}\n{self._calls()}"}
        answer = "answer" if form is None else f"answer: {_json(form.get('json', {'type': 'object'}))}"
        if form is not None and self.form is HARMONY:
            opened = writes.literal("<|channel|>final<|message|>")
            answer = f"answer: {opened} body\nbody{answer.removeprefix('answer')}"
            if not self.tools:
                return {"grammar": f"start: answer\n{answer}\n"}
        if not self.tools:
            return form
        if form is not None:
            return {"grammar": f"start: answer | {calls}\n{answer}\n{self._calls()}"}
        begin = writes.begin
        if any(tool.function.strict for tool in self.tools) and begin:
            whole = writes.form.around[0] + writes.form.writes[0]
            opened = writes.literal(begin)
            # a special token is no text, so that the end of the text before it needs no search
            lazy = "begun: TEXT" if begin in writes.marks else "begun[lazy]: TEXT"
            rest = f"{writes.literal(whole[len(begin) :])} inside{more if writes.form.around[0] else ''} {after}"
            text = f"start: (begun {rest})* TEXT\nTEXT: /(.|\\n)*/\n{lazy} {opened}\n"
            return {"grammar": text + self._calls()}
        return None

    def _calls(self) -> str:
        """Return the rules ``call``, and ``inside`` for a call from its name on."""
        writes = self._writes
        before, named, after = writes.form.writes
        rules = [f"call: {writes.literal(before)} inside"]
        rules.append("inside: " + " | ".join(f"one_{index}" for index in range(len(self._callable))))
        for index, tool in enumerate(self._callable):
            name = tool.function.name if writes.form.head else json.dumps(tool.function.name)[1:-1]
            head = writes.literal(name + named)
            arguments = _arguments(tool)
            try:
                refuse_contradictions(arguments)
                arguments = compilable(arguments)
            except ImportError:  # the grammar as a whole is refused, with the remedy
                pass
            except ConfigError as error:
                why = str(error).removeprefix("structured_outputs.json: ")
                raise ApiError(400, f"parameters of the tool '{tool.function.name}': {why}", param="tools") from None
            if writes.form.parameters is None:
                written = _json(arguments)
            else:
                properties, required = arguments.get("properties", {}), arguments.get("required", ())
                rules.append(writes.named(index, properties, required, arguments.get("$defs")))
                written = f"args_{index}"
            rules.append(f"one_{index}: {head} {written} {writes.literal(after)}")
        return "\n".join(rules) + "\n"


def _arguments(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object with the declared properties and no others."""
    schema = {"type": "object", **(tool.function.parameters or {})}
    if not any(each in schema for each in _OPEN_ENDED):
        schema["additionalProperties"] = False
    return schema


def _json(schema: Any) -> str:
    laid_out = {**schema, "x-guidance": LAYOUT} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(laid_out)}"
