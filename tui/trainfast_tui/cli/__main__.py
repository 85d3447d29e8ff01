"""`python -m trainfast_tui.cli`: the console script without its entry point."""

import sys

from trainfast_tui.cli import main

sys.exit(main())
