"""compute-sanitizer: how a program is run under it, and what its log and XML say."""
