"""`vitgraph`, `python -m vitgraph` and `python -m vitgraph.graphs.cli`."""

import signal
import sys


def main() -> int:
    """Run the command line; Ctrl-C before it has begun ends the process without a word."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vitgraph.graphs.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
