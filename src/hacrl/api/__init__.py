"""The Python interface: trainer, config and callbacks."""
