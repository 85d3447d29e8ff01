"""Strip charts and the time axis they share."""
