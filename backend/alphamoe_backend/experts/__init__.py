"""The experts: the AlphaMoE kernel, FlashInfer's, the stock Triton path and a torch reference."""
