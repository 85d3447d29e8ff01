"""The sizes that the scripts beside it share: a step takes tens of milliseconds on two cores."""

WIDTH, DEPTH, BATCH, STEPS = 384, 6, 128, 900
VOCABULARY, LENGTH, SEQUENCES = 512, 64, 4
