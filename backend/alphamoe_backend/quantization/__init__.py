"""Quantisation formats of weights and activations."""
