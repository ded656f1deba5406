"""Rollouts from vLLM: one engine per agent, in a child process or behind HTTP, kept at the agent's policy.

``engine`` is what the trainer sees; ``child`` and ``server`` are the two ways to reach vLLM; ``weights``
and ``transports`` carry an agent's weights into it; ``agreement`` proves that they arrived; ``in_vllm`` is
the only code that runs inside vLLM's own processes.
"""
