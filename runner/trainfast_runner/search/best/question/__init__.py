"""What a best-fit search asks before its first trial: the candidates, what is known, and the cost."""
