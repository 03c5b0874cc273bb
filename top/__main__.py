"""`python -m vitgraph`, the command line."""

import sys

from vitgraph.graphs.cli import main

sys.exit(main())
