"""Everything that commands print: tables, progress, results and the journals of searches."""
