"""Checkpoints that cannot be half-written: safetensors and JSON in a folder that appears as a whole."""
