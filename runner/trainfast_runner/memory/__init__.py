"""Predict a training's memory before it runs, and explain running out of it. Read in this order:

- tracing: trace one step in the training Python without allocating memory; cache the traces
- timeline: the traced model; its live bytes by category for any batch and depth, rebuilt from the traced segments
- sharding, pipeline: from one process's live bytes to those of one rank of a strategy
- model: the peak of the fullest rank, by category and phase; the FLOPs and bytes moved of a step
- corrections: bytes that this machine's finished runs took beyond their trace
- headroom: the prediction beside the available memory, and the largest batch that fits; estimates without a trace
- oom, oom_changes: after running out of memory, the cause and the changes that fit
"""
