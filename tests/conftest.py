"""Settings that every test shares."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for a download

import torch

torch.set_num_threads(1)  # busy threads on a shared machine stall each other
