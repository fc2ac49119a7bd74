"""What does a plan look like to a person? Text of 120 columns, and a page for a browser."""
