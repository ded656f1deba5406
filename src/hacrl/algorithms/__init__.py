"""The paper (arXiv 2603.02604) as pure functions on floats and tensors: one mechanism a file.

====================  =====================================================  ================
file                  mechanism                                              equations
====================  =====================================================  ================
``capability.py``     capability P_k and capability ratio omega              8, 9
``advantage.py``      agent-capability-aware advantage                       6, 7
``discrepancy.py``    capability discrepancy coefficient                     10
``importance.py``     sequence ratio and exponential importance sampling     11, 12
``clipping.py``       asymmetric and stepwise clipping                       13, 14
``losses/``           GRPO, GSPO, Naive, HACPO                               47-53
``mismatch.py``       weight for a sampler whose numerics differ             not in the paper
``kl.py``             penalty on the distance to a reference policy          not in the paper
``methods.py``        an advantage function and a loss function by name
====================  =====================================================  ================
"""
