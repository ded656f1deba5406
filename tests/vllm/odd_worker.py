"""A worker that can be told to go wrong. Imported by vLLM's own processes."""

from __future__ import annotations

from hacrl.engines.vllm.in_vllm import hacrl_vllm_worker


class Forgetful(hacrl_vllm_worker.WeightReceiver):
    """The real one, until it is told."""

    def hacrl_forget_the_tied_head(self) -> None:
        """From now on the output layer's packed copy of tied embeddings is not renewed."""
        hacrl_vllm_worker._repack_tied_head = lambda model: None

    def hacrl_break_the_next_step(self) -> None:
        """From now on nothing is computed."""

        def broken(*_, **__):
            raise RuntimeError("the next step is broken")

        self.model_runner.execute_model = broken

    def hacrl_say_no_json(self) -> set[int]:
        """What cannot be said to another process."""
        return {1, 2}
