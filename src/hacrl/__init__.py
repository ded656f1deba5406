"""hacrl: train several different LLMs together, so that every verified rollout teaches all of them."""

__version__ = "0.1.0"
