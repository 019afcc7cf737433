"""One replay: what the parent tells the replay process, that process, and what its result is worth."""
