"""Strip charts with the time axis they share, fit charts and scatter charts."""
