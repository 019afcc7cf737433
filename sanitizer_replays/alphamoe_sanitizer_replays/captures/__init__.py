"""What a capture is: its records, its files, and how a traced run makes captures of its own dispatches."""
