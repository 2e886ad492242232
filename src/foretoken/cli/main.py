"""The ``foretoken`` command: its subcommands, and errors as one line with an exit code.

Exit codes: 0 success; 1 a model, a request or a proof failed; 2 a mistake of the user; 130 interrupted.
"""

import atexit
import contextlib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from foretoken.cli import methods, zoo
from foretoken.cli.learn import datastore, train
from foretoken.cli.prove import bench, certify, doctor, plan
from foretoken.cli.run import batch, chat, generate, serve
from foretoken.cli.shared.console import OutputClosed, emit, note, prepare_output, silence_libraries
from foretoken.cli.shared.extended import ExtendedGroup
from foretoken.cli.shared.given import check_given
from foretoken.cli.shared.options import HELP_NAMES, name_values
from foretoken.cli.shared.outputs import json_in_a_file
from foretoken.core.errors import ConfigError, ForetokenError

INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="foretoken",
    cls=ExtendedGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": HELP_NAMES},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("methods")(methods.methods)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")
app.command("certify")(certify.certify)
app.command("doctor")(doctor.doctor)
app.add_typer(train.app, name="train")
app.add_typer(datastore.app, name="datastore")
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
app.command("batch")(batch.batch)
app.add_typer(zoo.app, name="zoo")


def _show_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for each in context.obj:  # other arguments; the parser would ignore them
            if each != "--version":
                raise ConfigError(f"--version only prints the version: leave '{each}' out")
        from foretoken import __version__

        emit(f"foretoken {__version__}")
        raise typer.Exit


@app.callback(
    epilog='Example: foretoken generate "Tom has 12 marbles. He buys 30 more. How many now?" --method draft_model'
)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Generate text from Hugging Face language models with several tokens per model call: the same text in less time.

    A small bundled pair (zoo:base and zoo:draft) needs no download, so every example works as written.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: arguments without the program's name; default: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "--verbose" in arguments
    silence_libraries(verbose)
    prepare_output()
    atexit.register(
        gc.freeze
    )  # otherwise Python's last collection visits all objects of torch and transformers, which takes a second
    try:
        command = typer.main.get_command(app)
        name_values(command)
        given = json_in_a_file(arguments)
        check_given(command, given)
        code = command.main(given, prog_name="foretoken", standalone_mode=False, obj=arguments)
    except OutputClosed:
        _forget_stdout()
        return OutputClosed.exit_code
    except ForetokenError as error:
        note(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as stop:
        if isinstance(
            stop.__context__, BrokenPipeError
        ):  # typer exits this way when the reader of a help text closes the pipe
            _forget_stdout()
            return OutputClosed.exit_code
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the command-line parser
            return _usage_error(error)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            note(f"error: {error.filename!s:.60}…: the file name is too long")
            return 2
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            note(f"error: cannot write: {error.strerror}")
            return 1
        if verbose:
            traceback.print_exc()
        note(f"error: internal: {type(error).__name__}: {error}")
        if not verbose:
            note("this is a bug; add --verbose for the traceback")
        return 1
    if code == INTERRUPTED:
        note("interrupted")
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message().replace("Value error, ", "")  # type: ignore[attr-defined]  # pydantic's words
    if message:  # empty if the help was printed instead
        note(f"error: {message[:1].lower()}{message[1:].rstrip('.')}")
        if context is not None:
            note(f"see: {context.command_path} --help")
    return int(getattr(error, "exit_code", 2))


def _forget_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush does not fail on the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
