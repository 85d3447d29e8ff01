"""The guides' advice for this machine: the knob to turn next, with the reason."""
