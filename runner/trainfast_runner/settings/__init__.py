"""knob_type knob_values knobs presets spec saving toml_places export"""
