"""What a sanitize session came to: its records, its scope in words, a terminal's report, JUnit and markdown."""
