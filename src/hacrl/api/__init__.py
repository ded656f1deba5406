"""hacrl from Python: one trainer, one config, callbacks."""
