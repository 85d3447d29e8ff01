"""A report of runs or of a search in one file: the document, its pictures, and its two forms."""
