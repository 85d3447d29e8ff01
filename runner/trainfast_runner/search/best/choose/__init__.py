"""What a best-fit search does next, decided from its journal alone, and its answer."""
