"""The tensors here are tiny: a second thread only costs time."""

import torch

torch.set_num_threads(1)
