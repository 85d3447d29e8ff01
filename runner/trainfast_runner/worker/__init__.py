"""The code of the training process.

It imports the standard library and the training stack only, by relative names, so that any Python with torch and
transformers can load this folder by path (see `bootstrap.py`).
"""
