"""The words of the two searches, shared by screens, commands and reports: the question, the state, the answer."""
