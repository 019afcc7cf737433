"""What one run under one tool proves."""
