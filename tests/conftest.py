"""Settings that every test shares."""

import os
import signal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for a download

# Some virtual machines report tile instructions (AMX) but do not let them run: oneDNN's bfloat16 products
# would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)  # busy threads on a shared machine stall each other

# Shells start background jobs with the first one ignored, nohup with the second, and so would every process
# be that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
