"""What every painted widget is built on: rows that repaint alone, styled text, and the colours of both."""
