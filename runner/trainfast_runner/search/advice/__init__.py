"""What the guides would tell a person to turn next on this machine, with the reason."""
