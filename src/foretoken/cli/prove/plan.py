"""``foretoken plan``: the fastest method and draft length for a model and prompts, and its gain."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.suite import read_suite
from foretoken.cli.shared import options
from foretoken.cli.shared.console import display, emit, emit_json
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.outputs import check_outputs, write_json, write_text
from foretoken.cli.shared.settings import DEFAULT_MODEL, find_method, parse_numbers
from foretoken.core.errors import ConfigError, InputError
from foretoken.data.prompts import Prompt, limit_per_category, read_prompts
from foretoken.options.sampling import SamplingParams

_WORK, _CHOICE, _OUTPUT = "Your prompts", "What may draft", "Output"
_work = functools.partial(typer.Option, rich_help_panel=_WORK)
_choice = functools.partial(typer.Option, rich_help_panel=_CHOICE)
_output = functools.partial(typer.Option, rich_help_panel=_OUTPUT)


@with_flags
def plan(
    *,
    model: options.Model = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        _work(
            "--prompts",
            metavar="FILE.jsonl",
            help="Your prompts, one JSON object a line: 'prompt', 'messages' or 'turns' (the first).",
            show_default="the prompts of --suite",
        ),
    ] = None,
    suite: Annotated[str | None, options.suite_option(_WORK)] = None,
    data: Annotated[Path | None, options.data_option(_WORK)] = None,
    limit: Annotated[int | None, options.limit_option(_WORK, "Maximum prompts per category.")] = None,
    params: Annotated[
        SamplingParams, Flags(_WORK, ("max_tokens", "temperature", "seed"), defaults={"seed": 0, "max_tokens": 256})
    ],
    raw: Annotated[bool, _work("--raw", "--no-chat", help="Do not apply the chat template.")] = False,
    batch_sizes: Annotated[
        str,
        _work(
            "--batch-sizes",
            "--concurrency",
            metavar="N,…",
            help="Numbers of requests that run together; the gain at each is predicted.",
        ),
    ] = "1",
    contexts: Annotated[
        str,
        _work(
            "--contexts",
            metavar="N,…",
            help="Contexts in tokens at which forwards are timed, as far as model and time allow.",
        ),
    ] = "128,2048,8192",
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            min=0.1,
            max=24 * 60,
            metavar="X",
            help="About the time to take after loading; half of it for recording the target's answers.",
        ),
    ] = 5.0,
    drafts: Annotated[
        str | None,
        _choice(
            "--draft-model",
            "--drafts",
            metavar="MODEL",
            help="Draft models and folders of published heads, with commas between them.",
            show_default="zoo:draft for zoo:base",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        _choice(
            "--methods",
            metavar="A,B,…",
            help="Look at these methods only; 'foretoken methods' lists them.",
            show_default="all",
        ),
    ] = None,
    loading: options.Loading,
    json: Annotated[bool, options.json_option("Print the plan as one JSON object on stdout.", _OUTPUT)] = False,
    out: Annotated[
        Path | None,
        options.out_option("Write the plan to a file for --plan FILE and speculative_config={'plan': FILE}.", _OUTPUT),
    ] = None,
    report: Annotated[Path | None, _output("--report", metavar="PATH", help="Write an HTML page with charts.")] = None,
    keep_trace: Annotated[
        Path | None, _output("--keep-trace", metavar="DIR", help="Keep the recorded answers.")
    ] = None,
    verbose: options.Verbose = False,
) -> int:
    """Find the fastest method for a model and your prompts, and say why the others lose.

    The model answers the prompts once by plain decoding. Every method that could draft for it is replayed along these
    answers at every length, and costs measured on this machine turn steps into tokens per second. Plain decoding and
    the best three then run for real, and the measurement decides. The text stays the model's own with all of them.

    [bold]Examples[/bold]

      foretoken plan --minutes 1

      foretoken plan --model ./my-model --prompts mine.jsonl --out plan.json

      foretoken plan --model ./my-model --draft-model ./my-draft --concurrency 1,8 --report plan.html

      foretoken generate --model ./my-model --plan plan.json "Hello"
    """
    options.check_model_name(model)
    named = [] if drafts is None else drafts.split(",")
    for each in named:
        options.check_model_name(each, "--draft-model")
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    for name in names or ():
        find_method(name)
    sizes = parse_numbers(batch_sizes, "--batch-sizes", int, least=1)
    lengths = parse_numbers(contexts, "--contexts", int, least=1)
    check_outputs({"--out": out, "--report": report})
    if keep_trace is not None and keep_trace.is_file():
        raise ConfigError(f"--keep-trace {keep_trace}: this is a file; name a folder to make")
    texts = limit_per_category(_read(prompts, suite, data), limit)
    llm = options.load_model(model, {"method": "none"}, verbose=verbose, loading=loading, max_num_seqs=max(1, *sizes))

    from foretoken.planner.plan import Wanted, make
    from foretoken.planner.report import screen

    wanted = Wanted(
        prompts=texts,
        params=params,
        chat=llm.is_chat_model and not raw,
        minutes=minutes,
        drafts=named,
        methods=names,
        contexts=lengths,
        requests=sizes,
    )
    with display("planning", live=False) as show:
        made, trace = make(llm, wanted, lambda state, share: show(f"{share:.0%}", share, state))
    llm.close()
    found: dict[str, Any] = made.record()
    if json:
        emit_json(found)
    else:
        for line in screen(made, "" if out is None else str(out)):
            emit(line)
    if out is not None:
        write_json(out, found)
    if report is not None:
        from foretoken.planner.page import page

        write_text(report, page(made))
    if keep_trace is not None:
        trace.save(keep_trace)
    return 0


def _read(prompts: Path | None, suite: str | None, data: Path | None) -> Sequence[Prompt]:
    if prompts is None:
        return read_suite(suite, data)
    if suite is not None:
        raise ConfigError("both --prompts and --suite were given: keep one")
    found = read_prompts(prompts, requests=True)
    for each in found:
        for name in each.params:
            raise InputError(f"{each.place}: field '{name}': the prompts of a plan share parameters: leave it out")
    return found
