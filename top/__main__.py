"""`python -m vitgraph`, the command line."""

import sys

from vitgraph.graphs.cli.__main__ import main

sys.exit(main())
