"""How much memory a training needs, known before it runs: by category, phase and batch size.

`tracing` has the training Python take a step without memory (seconds, once) or finds an earlier trace at once;
`model.MemoryModel` answers from it for any batch, number of ranks and sharding, by arithmetic.
"""
