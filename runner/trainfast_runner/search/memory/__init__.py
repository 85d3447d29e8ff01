"""Memory by batch size in a search: each rank's limit, a fit to measured peaks, and a script's traced step."""
