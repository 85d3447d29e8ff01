"""What a run came to: its verdict, its summary, why memory ran out."""
