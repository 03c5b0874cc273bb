"""`python -m vitgraph.graphs.cli`."""

import sys

from vitgraph.graphs.cli.main import main

sys.exit(main())
