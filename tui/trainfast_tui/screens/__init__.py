"""One file a screen; `base.py` and `search.py` are the bases. The action that opens a screen imports it."""
