"""The batch search: the largest batch that fits, by probes in one warm process, confirmed by a run in a fresh one."""
