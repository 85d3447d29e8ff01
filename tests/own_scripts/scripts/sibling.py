"""A module beside the scripts, as they import their own."""

hidden_size = 32
