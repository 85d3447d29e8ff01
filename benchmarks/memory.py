"""How well memory is predicted, and how fast the largest batch is found: `python benchmarks/memory.py`.

Exits 1 when a bound is not held.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import batch_search, memory_prediction


def main() -> int:
    """Print the tables; `--quick` takes three presets, and one model for the search."""
    quick = "--quick" in sys.argv
    held = memory_prediction.print_tables(some=3 if quick else None)
    held &= batch_search.print_table(["llama"] if quick else None)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
