"""The only place that knows the internals of Textual and of the terminal."""
