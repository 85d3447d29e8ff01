"""The accuracy of predicted memory, and the speed of the batch search: two tables.

    python benchmarks/memory.py [--only prediction|search] [--quick]

The search is meant to take at most 20 minutes of two idle cores; each part prints its time at its end.
Exits 1 when a bound is not held.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QUICK_PRESETS = 3
QUICK_MODEL = "llama"


def main() -> int:
    """Print the tables that were asked for; 1 when a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("prediction", "search"), help="one of the tables; default: both")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_PRESETS} presets, and for the search one model: {QUICK_MODEL}"
    )
    options = parser.parse_args()
    # After the parser: --help needs none of what they import.
    from benchmarks import batch_search, memory_prediction

    held = True
    if options.only != "search":
        held &= timed("prediction", partial(memory_prediction.print_tables, QUICK_PRESETS if options.quick else None))
    if options.only != "prediction":
        held &= timed("search", partial(batch_search.print_table, [QUICK_MODEL] if options.quick else None))
    return 0 if held else 1


def timed(what: str, part: Callable[[], bool]) -> bool:
    """Return the result of the part, and print its time."""
    began = time.perf_counter()
    held = part()
    print(f"{what}: {(time.perf_counter() - began) / 60:.1f} min in all", flush=True)
    return held


if __name__ == "__main__":
    sys.exit(main())
