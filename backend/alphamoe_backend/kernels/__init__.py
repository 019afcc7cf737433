"""CUDA sources, their launch rules and the just-in-time compiler."""
