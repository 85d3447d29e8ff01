"""Which settings cannot work together: `check.py` asks every rule, each a function of `facts.py`."""
