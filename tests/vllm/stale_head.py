"""A worker that can be told to forget a step of a weight update. Imported by vLLM's own processes."""

from __future__ import annotations

from hacrl.rollout.vllm.in_vllm import hacrl_vllm_worker


class Forgetful(hacrl_vllm_worker.WeightReceiver):
    """The real one, until it is told."""

    def hacrl_forget_the_tied_head(self) -> None:
        """From now on the output layer's packed copy of tied embeddings is not renewed."""
        hacrl_vllm_worker._repack_tied_head = lambda model: None
