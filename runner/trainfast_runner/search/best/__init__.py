"""The best fit: the fastest settings that fit, found by trials and confirmed by runs in fresh processes."""
