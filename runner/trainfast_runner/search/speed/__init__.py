"""The speed of settings nobody has run: what each knob gives, from measured trials or from the step's work."""
