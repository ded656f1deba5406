"""Generate with vLLM: one engine per agent, in a child process or behind HTTP, kept at the agent's policy.

``engine`` is what the trainer sees. ``child`` and ``server`` are the two ways to reach vLLM.
``weight_transfer`` carries an agent's weights into it. ``in_vllm`` is the only code that runs inside vLLM's
own processes.
"""
