"""Explain running out of memory. Read in this order:

- fixes: the changes of each knob that may free memory, in words
- candidates: their values, and combinations of knobs
- predicted_changes: those that fit by the memory model, the cheapest first
- explain: the cause, the missing bytes and the changes for a run
"""
