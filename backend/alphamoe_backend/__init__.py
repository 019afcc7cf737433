"""The AlphaMoE fused MoE backend and the small tensor-parallel engine that drives it."""
