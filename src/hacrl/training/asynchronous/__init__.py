"""Asynchronous runs: every agent samples while it learns, with bounded staleness (docs/asynchronous.md)."""
