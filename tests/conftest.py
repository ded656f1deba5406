"""Settings that every test shares."""

import os
import signal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for a download

# Some virtual machines report tile instructions (AMX) but do not support them: oneDNN's bfloat16 products
# would crash the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)  # more threads slow each other down on a busy machine

# Shells start background jobs with SIGINT ignored, nohup with SIGHUP. Tests interrupt processes, which would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
