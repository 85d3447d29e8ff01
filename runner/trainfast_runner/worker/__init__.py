"""What runs inside the training process.

Imports the standard library and the training stack only, by relative names, so that this folder can be loaded by
path into any Python that has torch and transformers (see `bootstrap.py`).
"""
