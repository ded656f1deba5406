"""One loss a file, one signature for all: ``loss(batch, settings) -> LossTerms``."""
