"""Sortable tables with a cursor, and the details of one row."""
