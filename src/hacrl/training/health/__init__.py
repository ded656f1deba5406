"""Notes on symptoms of a run that goes wrong: each names the agent, the number, the likely cause and the fix.

One module a subject; :mod:`hacrl.training.health.monitor` says each symptom once an episode.
"""
