"""The processor: asked for by a knob, how busy others keep it, and how a run's threads wait on it."""
