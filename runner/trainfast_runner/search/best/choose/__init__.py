"""The next step and the answer of a best-fit search, from its journal alone."""
