"""`python -m trainfast_tui.cli`: the same as the console script `trainfast-tui`."""

import sys

from trainfast_tui.cli import main

sys.exit(main())
