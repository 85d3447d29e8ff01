"""Predict the next run's memory and speed in threads.

NextRunPredictions asks when an input has changed; Predictor answers the newest request in a thread; ModelTracer fills
the cache of traces; SpeedPredictor adds the speed; SharedTracer holds the one process that traces.

Modules of the runner that the first frame does not need are imported where they are used.
"""
