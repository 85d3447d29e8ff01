"""Explain running out of memory. Read in this order:

- knob_changes: the changes of each knob that may free memory, in words, and the combinations worth a trace
- predicted_changes: those that fit by the memory model, the cheapest first
- explain: the cause, the missing bytes and the changes for a preset's run
- explain_run: an ended run's explanation, of a preset or a script, from its records
- trace_changes: traces of the changes whose memory is not known yet
"""
