"""The bundled target after other chat templates: with tools, and with reasoning as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

import copy

from foretoken.models.language_model import LanguageModel
from helpers.zoo_llms import target

_TURNS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' }}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}{% endfor %}"""
_TOOLS = "{% if tools %}{{ '<|system|>\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}"
_ANSWER = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
_OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"

TOOLS = _TOOLS + _TURNS + _ANSWER + "{% endif %}"
_PAST = "{{- m.reasoning_content is defined and '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' or '' }}"
_THOUGHT = _TURNS.replace("{{- m.content }}", _PAST + "{{- m.content }}")
MAY_THINK = _THOUGHT + _ANSWER + _OFF + "{% endif %}"
THINKS = _THOUGHT + _ANSWER + "{{ '<think>\\n' }}{% endif %}"

# as Gemma 2's: no system message, and turns in turn
IN_TURNS = (
    """\
{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- endfor %}"""
    + _TURNS
    + _ANSWER
    + "{% endif %}"
)
USER_AND_ASSISTANT = _TURNS.replace("in messages %}", "in messages if m.role != 'system' %}") + _ANSWER + "{% endif %}"


def templated(template: str) -> LanguageModel:
    """The target with another chat template; weights are shared."""
    twin = copy.copy(target())
    twin.tokenizer = copy.deepcopy(target().tokenizer)
    twin.tokenizer.chat_template = template
    return twin
