"""The base of every painted widget: rows that repaint alone, styled text, and the colours of the terminal."""
