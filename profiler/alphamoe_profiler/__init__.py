"""Record traced runs, keep them as run bundles, attribute kernels and judge what was witnessed."""
