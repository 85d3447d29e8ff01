"""Every word that the screen and the command line share: figures with units, sentences, lines of text."""
