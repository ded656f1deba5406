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
``rules/``            other rules for sharing, one file each                 of other papers
``alignment.py``      trust by the measured alignment of gradients           theorem 4.3
``context.py``        what some rules know of a step besides rewards         not in the paper
``mismatch.py``       weight for a sampler whose numerics differ             not in the paper
``kl.py``             penalty on the distance to a reference policy          not in the paper
``methods.py``        an advantage function and a loss function by name
====================  =====================================================  ================
"""
