"""Losses, one per file, all with the signature ``loss(batch, settings) -> LossTerms``."""
