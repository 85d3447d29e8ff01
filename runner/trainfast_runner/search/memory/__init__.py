"""Memory by batch size in a search: each rank's limit, and a fit to measured peaks."""
