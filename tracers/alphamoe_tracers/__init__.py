"""The ground floor: what records (CUPTI, NVTX ranges, receipts) and the schemas of its records."""
