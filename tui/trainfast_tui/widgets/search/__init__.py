"""The views of both kinds of search."""
