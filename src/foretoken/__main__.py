"""``python -m foretoken``: the ``foretoken`` command."""

import sys


def run() -> int:
    """Run the command; Ctrl-C during its import exits like Ctrl-C later."""
    try:
        from foretoken.cli.main import main
        from foretoken.core.stand_ins import allow_stand_ins
    except KeyboardInterrupt:
        return 130
    allow_stand_ins()
    return main()


if __name__ == "__main__":
    sys.exit(run())
