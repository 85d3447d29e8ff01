"""Settings that exclude each other: `check.py` asks every rule, each a function of `facts.py`."""
