"""``foretoken generate``: generate text from prompts."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.run.answers import answer_all, answer_one
from foretoken.cli.shared import options
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.settings import DEFAULT_MODEL
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_readable
from foretoken.data.prompts import Prompt, check_text, read_prompts
from foretoken.options.lora import LoRARequest
from foretoken.options.model import ModelOptions
from foretoken.options.sampling import SamplingParams

_FACE = "Prompts and output"
_face = functools.partial(typer.Option, rich_help_panel=_FACE)
_SHORT_PROMPT = 512  # bytes that fit into every model's context


@with_flags
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. Without it (or with '-') standard input is read.", show_default=False),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    recipe: options.Recipe,
    params: Annotated[SamplingParams, Flags("Sampling")],
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--prediction",
            metavar="FILE",
            help="A text that the answers are expected to repeat, such as a file to edit: its tokens are drafts.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        _face(
            "--prompts",
            metavar="FILE.jsonl",
            help="One JSON object a line: 'prompt', 'messages' or 'turns' (the first); next to it its own "
            "'max_tokens', "
            "'temperature', …",
        ),
    ] = None,
    loras: Annotated[
        list[str] | None,
        _face("--lora", metavar="NAME=DIR", help="LoRA folder for all prompts, applied next to the model's weights."),
    ] = None,
    system: Annotated[str | None, _face("--system", metavar="TEXT", help="System message before the prompt.")] = None,
    raw: Annotated[
        bool, _face("--raw", "--no-chat", help="Do not apply the chat template: continue the prompt.")
    ] = False,
    json: Annotated[
        bool, _face("--json", help="Print one JSON object per prompt on stdout, and nothing else.")
    ] = False,
    loading: options.Loading,
    engine: options.Engine,
    verbose: options.Verbose = False,
) -> int:
    """Generate text with several tokens per model call.

    The text goes to stdout, one line of statistics to stderr. The chat template is applied if the model has one (--raw
    omits it). Without a prompt, standard input is read; with --prompts a whole file, many prompts at a time.

    [bold]Examples[/bold]

      foretoken generate "Tom has 12 marbles. He buys 30 more. How many has he now?"

      foretoken generate "I need a hotel in London." --method draft_model

      foretoken generate "Anna has 15 apples and eats 4. How many are left?" --set num_speculative_tokens=4

      echo "def add(a, b):" | foretoken generate --raw --temperature 0.8 --seed 1

      foretoken generate --prompts questions.jsonl --json > answers.jsonl
    """
    config = recipe.config(model)
    options.check_model_name(model)
    if params.logprobs is not None and not json:
        raise ConfigError("--logprobs appear only in the JSON objects: add --json")
    if system is not None and raw:
        raise ConfigError("--system needs the chat template that --raw leaves out: keep one")
    if prediction is not None:
        params = dataclasses.replace(params, prediction=_read_prediction(prediction))
    adapters = [LoRARequest(name, 1, folder) for name, folder in options.named_folders(loras or ()).items()]
    if len(adapters) > 1:
        raise ConfigError("--lora: one adapter is applied to all prompts; keep one")
    adapter = next(iter(adapters), None)
    # check the whole input before loading the model
    records = _gather_prompts(prompt, prompts)
    for record in () if json else records:
        for name in ("logprobs", "prompt_logprobs"):
            if record.params.get(name) is not None:
                raise InputError(f"{record.place}: {name} appear only in the JSON objects: add --json")
    _check_lengths(records, loading, model)
    llm = options.load_model(model, config, verbose=verbose, loading=loading, **dataclasses.asdict(engine))
    try:
        if system is not None and not llm.is_chat_model:
            raise ConfigError(f"--system needs a chat model, and {model} has no chat template")
        chat = llm.is_chat_model and not raw
        inputs = [_token_ids(llm, record, system, chat=chat) for record in records]
        if prompts is None and params.n == 1:
            return answer_one(llm, records[0], inputs[0], params, json=json, adapter=adapter)
        every = [_params_of(record, params) for record in records]
        return answer_all(llm, records, inputs, every, json=json, adapter=adapter)
    finally:
        llm.close()


def _check_lengths(records: Sequence[Prompt], loading: ModelOptions, model: str) -> None:
    """Refuse a prompt that is too long before the weights are read.

    A token has at least one byte of text, so only long prompts are tokenised. The tokens of the chat template are not
    counted here; they only make a prompt longer.
    """
    texts = ["\n".join(str(each["content"]) for each in record.messages) or record.text for record in records]
    longest = max(len(text.encode()) for text in texts)
    if longest < min(_SHORT_PROMPT, loading.max_model_len or _SHORT_PROMPT):
        return
    from foretoken.models.load import load_config, load_tokenizer

    text_config = load_config(model, **loading.origin).get_text_config(decoder=True)
    limits = [loading.max_model_len, getattr(text_config, "max_position_embeddings", None)]
    context = min((each for each in limits if isinstance(each, int)), default=None)
    if context is None or longest < context:
        return
    tokenizer = load_tokenizer(model, **loading.origin)
    for record, text in zip(records, texts, strict=True):
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"]) if len(text.encode()) >= context else 0
        if count >= context:
            raise InputError(
                f"{record.place} has {count} tokens; the context is {context}, including the output: shorten it"
            )


def _gather_prompts(argument: str | None, path: Path | None) -> list[Prompt]:
    if path is not None:
        if argument is not None:
            raise ConfigError("both a prompt and --prompts were given: keep one")
        return read_prompts(path, requests=True)
    if argument is not None and argument != "-":
        return [Prompt("0", check_text(argument, "the prompt"))]
    if argument is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, on standard input, or with --prompts FILE.jsonl")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start + 1})") from None
    # remove the line end that echo and editors add
    place = "the prompt on standard input"
    return [Prompt("0", check_text(text.removesuffix("\n").removesuffix("\r"), place), place=place)]


def _read_prediction(path: Path) -> str:
    check_readable(path, "--prediction")
    try:
        return check_text(path.read_bytes().decode("utf-8"), f"--prediction {path}")
    except UnicodeDecodeError as error:
        raise InputError(f"--prediction {path} is not UTF-8 text (byte {error.start + 1})") from None


def _params_of(record: Prompt, params: SamplingParams) -> SamplingParams:
    """Return the command's params, overridden by those of a record."""
    try:
        return dataclasses.replace(params, **record.params)
    except ConfigError as error:
        raise InputError(f"{record.place}: {error}") from None


def _token_ids(llm: Any, record: Prompt, system: str | None, *, chat: bool) -> list[int]:
    """Return a prompt as the engine's input; the error for one that is too long names its place."""
    if record.messages and not chat:
        raise InputError(f"{record.place} is a conversation, which needs the chat template: leave out --raw")
    if record.messages and system is not None and record.messages[0]["role"] == "system":
        raise InputError(f"{record.place} has a system message, and --system gives another: keep one")
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        said = record.messages or ({"role": "user", "content": record.text},)
        try:
            ids = llm.chat_prompt([*first, *said])["prompt_token_ids"]
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from None
    else:
        ids = list(llm.tokenizer(record.text)["input_ids"])
    room = llm.target.max_length
    if len(ids) >= room:
        raise InputError(
            f"{record.place} has {len(ids)} tokens; the context is {room}, including the output: shorten it"
        )
    return ids
