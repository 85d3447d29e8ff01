"""Plans a best-fit search: its question, its candidates and their predicted memory.

The conductors use `flops_bounds`, `script_memory` and `survey` after the start too.
"""
