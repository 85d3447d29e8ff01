"""Predict a training's memory by category, phase and batch size, before it runs, and explain running out of it.

`tracing` has the training Python take a step without memory (seconds, once) or reads an earlier trace;
`model.MemoryModel` predicts from it for any batch, number of ranks and sharding, by arithmetic.
"""
