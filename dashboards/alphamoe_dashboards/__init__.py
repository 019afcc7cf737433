"""The interactive dashboard of M buckets."""
