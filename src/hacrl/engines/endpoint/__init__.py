"""An OpenAI-compatible endpoint as the source of an agent's responses."""
