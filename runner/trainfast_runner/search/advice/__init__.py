"""Advice by Hugging Face's performance guides ("Performance and Scalability" and its multi-GPU part): the knob to turn
next, with the reason."""
