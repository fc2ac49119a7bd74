"""What does a plan look like to a person? Tables of text."""
