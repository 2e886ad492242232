"""``python -m foretoken``: the same as the ``foretoken`` command."""

import sys


def run() -> int:
    """The command; Ctrl-C while it is imported is no more than Ctrl-C later."""
    try:
        from foretoken.cli.main import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
