"""One candidate measured: a warm trial or a cold run, written as one line of the journal."""
