"""``foretoken chat``: a conversation in the terminal."""

import contextlib
import sys
from typing import Annotated, Any

import typer

from foretoken.cli.run.answers import statistics
from foretoken.cli.shared import options
from foretoken.cli.shared.console import emit, note
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.settings import DEFAULT_MODEL
from foretoken.core.errors import ConfigError, InputError
from foretoken.engine.text.reasoning import Thinking, marks_of
from foretoken.options.sampling import SamplingParams

_HELP = "/new starts a new conversation, /quit (or Ctrl-D) ends; Ctrl-C stops an answer"


@with_flags
def chat(
    *,
    model: options.Model = DEFAULT_MODEL,
    recipe: options.Recipe,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer without reasoning, if the model's chat template supports it.")
    ] = False,
    params: Annotated[
        SamplingParams, Flags("Sampling", ("max_tokens", "temperature", "seed"), defaults={"max_tokens": 1024})
    ],
    loading: options.Loading,
    verbose: options.Verbose = False,
) -> int:
    """Chat with a model in the terminal. The conversation may be as long as the model's context.

    Answers go to stdout. Everything else goes to stderr, including the reasoning between <think> and </think>. Piped
    input has one message per line; the exit code is 1 if a message got no answer.

    [bold]Examples[/bold]

      foretoken chat

      foretoken chat --model ./my-model --system "Be brief." --temperature 0.7
    """
    config = recipe.config(model)
    options.check_model_name(model)
    llm = options.load_model(
        model, config, verbose=verbose, loading=loading, max_num_seqs=1, enable_prefix_caching=True
    )
    if not llm.is_chat_model:
        raise ConfigError(f"{model} has no chat template: use foretoken generate")
    settings = {"enable_thinking": False} if no_thinking else {}
    if no_thinking and "enable_thinking" not in str(llm.tokenizer.chat_template):
        raise ConfigError(f"--no-thinking: the chat template of {model} has no enable_thinking: leave it out")
    begin = [] if system is None else [{"role": "system", "content": system}]
    try:
        return _converse(llm, begin, params, settings)
    finally:
        llm.close()


def _converse(llm: Any, begin: list[dict[str, str]], params: SamplingParams, settings: dict[str, Any]) -> int:
    """Chat until the input ends; return 1 if a piped message got no answer."""
    asked = sys.stdin.isatty()
    failed = False
    if asked:
        note(_HELP)
    messages = list(begin)
    while (text := _read(asked)) is not None:
        if not text:
            continue
        if text == "/quit":
            break
        if text == "/new":
            messages = list(begin)
            continue
        if text.startswith("/"):
            note(_HELP)
            continue
        answer = _answer(llm, [*messages, {"role": "user", "content": text}], params, settings)
        failed |= answer is None and not asked
        if answer is not None:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return int(failed)


def _read(asked: bool) -> str | None:
    """Read the next message; None at the end."""
    try:
        if asked:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text") from None
    return line.strip() if line else None


def _answer(llm: Any, messages: list[dict[str, str]], params: SamplingParams, settings: dict[str, Any]) -> str | None:
    """Stream one answer; return None if it failed."""
    output, answer = None, ""
    try:
        prompt = llm.chat_prompt(messages, chat_template_kwargs=settings)
        ids = prompt["prompt_token_ids"]
        thinking = Thinking(llm.tokenizer, ids) if marks_of(llm.tokenizer) else None
        with contextlib.closing(llm.stream(prompt, params)) as chunks:
            for chunk in chunks:
                output, text = chunk.output, chunk.text
                if thinking is not None:
                    thought, text = thinking.read(text, chunk.token_ids, final=chunk.finished)
                    print(thought, end="", file=sys.stderr, flush=True)
                    if text and not answer and thinking.num_tokens:
                        note("")  # end the line of the reasoning
                emit(text, end="")
                answer += text
    except InputError as error:  # too long for the context, or invalid Unicode: the conversation is unchanged
        note(f"error: {error}; /new starts a new conversation")
        return None
    except KeyboardInterrupt:
        pass
    emit("")
    if output is None:
        return None
    if output.error:
        note(f"error: {output.error}")
        return None
    note(statistics([output], output.metrics.seconds, llm))
    return answer
