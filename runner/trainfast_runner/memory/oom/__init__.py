"""Explain running out of memory. Read in this order:

- fixes: the changes of each knob that may free memory, in words
- candidates: their values, and combinations of knobs
- predicted_fixes: those that fit by the memory model, the cheapest first
- explain: the cause, the missing bytes and the fixes of a run
"""
