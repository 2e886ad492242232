"""``foretoken certify``: prove the guarantee of a recipe."""

from typing import Annotated

import typer

from foretoken.cli.shared.console import emit, emit_json, note
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import DraftModel, Model, Verbose, check_model_name
from foretoken.cli.shared.settings import DEFAULT_MODEL, parse_settings, speculative_config
from foretoken.options.model import ModelOptions


@with_flags
def certify(
    *,
    method: Annotated[str, typer.Option("--method", help="Drafting method of the recipe.", show_default=False)],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the method, or verifier=NAME. Repeatable."),
    ] = None,
    draft_model: DraftModel = None,
    model: Model = DEFAULT_MODEL,
    loading: Annotated[ModelOptions, Flags("Model", defaults={"dtype": "float32"})],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts and samples: faster, with less statistical power.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> int:
    """Prove a recipe's guarantee about its output. The exit code is 1 if any part fails.

    It computes the distribution of the output in closed form on a tiny vocabulary, runs a sequential test on a real
    model, checks that deliberately biased verifiers fail, and compares texts or streams that must be equal.
    docs/certify.md explains how much that proves.

    [bold]Examples[/bold]

      foretoken certify --method ngram --quick

      foretoken certify --method draft_model --set verifier=block --json

      foretoken certify --method ngram --dtype int4 --quick
    """
    config = speculative_config(method, parse_settings(sets or []), target=model, draft_model=draft_model)
    check_model_name(model)
    from foretoken.cli.shared.console import quiet_transformers

    quiet_transformers(verbose)
    import torch

    from foretoken.certify.certify import certify as prove

    if loading.threads is not None:
        torch.set_num_threads(loading.threads)
    settings = {key: value for key, value in config.items() if key != "method"}
    certificate = prove(method, settings, model=model, quick=quick, progress=note, loading=loading)
    if json:
        emit_json(certificate.to_dict())
    else:
        emit(str(certificate))
    return 0 if certificate.passed else 1
