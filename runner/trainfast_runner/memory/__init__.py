"""Predict a training's memory before it runs, and explain running out of it. Read in this order:

- warm_tracer, tracing, traces: trace one step in the training Python without allocating memory; cache the traces
- timeline: the step's live bytes for any batch and depth, rebuilt from the traced segments
- sharding, one_process, pipeline: from one process's live bytes to those of one rank of a strategy
- model, prediction: the peak of the fullest rank, by category and phase
- corrections, record_correction: bytes that this machine's finished runs took beyond their trace
- available, headroom: the prediction beside the available memory; the largest batch that fits
- predict_rows, cached_prediction: predictions for `predict` and for `run.json`
- model_size, step_work: estimates without a trace; the FLOPs and bytes moved of a step
- oom: after running out of memory, the cause and the changes that fit
"""
