"""Two runs held against each other: what was asked, under what conditions, and how sure the difference is."""
