"""Settings of the methods: GRPO, GSPO, Naive and HACPO with the paper's defaults, and methods of your own.

Settings of the other rules for sharing are in :mod:`hacrl.config.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from hacrl.config.method_base import (
    Aggregation,
    CrossBaseline,
    CrossRange,
    MethodSettings,
    SharingSettings,
    check_baseline_scale,
)
from hacrl.config.rules import (
    AlignedSettings,
    FtisSettings,
    S2lpoSettings,
    SapoSettings,
    SuccessGatedSettings,
    XgrpoSettings,
)
from hacrl.errors import ConfigError
from hacrl.plugins import check_options, installed_plugins, is_reference, load_plugin, parameters_of

ENTRY_POINTS = "hacrl.methods"  # group under which installed packages offer methods
ROUNDING = 1e-9  # a clip interval narrower than this is empty but for rounding


@dataclass(frozen=True, kw_only=True)
class SingleAgentSettings(MethodSettings):
    """Settings of methods in which each agent learns from its own responses alone."""

    aggregation: Aggregation = "response"
    """How the tokens of a mini-batch are weighed. `response`: every response counts as much (GRPO);
    `token`: every token (DAPO); `constant`: every token, and the sum is divided by
    `rollout.max_new_tokens` (Dr. GRPO)."""
    divide_by_std: bool = True
    """Whether advantages are divided by the standard deviation of the prompt's rewards. False: Dr. GRPO."""
    baseline_scale: float = 1.0
    """Factor of the mean reward in the baseline. Below 1, right responses count more than wrong ones (as in
    AsymRE, arXiv 2506.20520): what a partner that never succeeds does to baselines that rewards share."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        check_baseline_scale(self.baseline_scale)


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(SingleAgentSettings):
    """GRPO, each agent alone: token-level ratio."""

    name: Literal["grpo"] = "grpo"
    """The method."""
    clip_low: float = 0.2
    """Ratios of single tokens are clipped to [1 - `clip_low`, 1 + `clip_high`]."""
    clip_high: float = 0.28
    """Upper half of that interval; above `clip_low`, as in DAPO (clip-higher)."""


@dataclass(frozen=True, kw_only=True)
class GspoSettings(SingleAgentSettings):
    """GSPO, each agent alone: sequence-level ratio."""

    name: Literal["gspo"] = "gspo"
    """The method."""


@dataclass(frozen=True, kw_only=True)
class NaiveSettings(SharingSettings):
    """Shared rollouts without the four mechanisms: joint mean and deviation, GSPO's ratio and clip."""

    name: Literal["naive"] = "naive"
    """The method."""

    @property
    def cross_range(self) -> CrossRange | None:
        """The same interval as for own responses."""
        lower, upper = 1 - self.clip_low, 1 + self.clip_high
        return CrossRange(lower, upper, "method.clip_low", "method.clip_high")


@dataclass(frozen=True, kw_only=True)
class HacpoSettings(SharingSettings):
    """HACPO: the four mechanisms, each with its switch."""

    name: Literal["hacpo"] = "hacpo"
    """The method."""
    capability_baseline: bool = True
    """Mechanism 1, capability-aware advantage. False: all agents count as equally capable in the baseline."""
    cross_baseline: CrossBaseline | None = None
    """Whose baseline another agent's response is compared with: the `source`'s or the `learner`'s. By
    `reading`: `source` (paper), `learner` (public)."""
    baseline_overshoot: Literal["own_mean", "keep"] = "own_mean"
    """What replaces a baseline above the highest reward: `own_mean`, the agent's own mean reward, or nothing
    (`keep`)."""
    discrepancy: bool = True
    """Mechanism 2, capability discrepancy coefficient. False: advantages of others' responses are not
    scaled."""
    alpha: float = 1.0
    """Mechanism 3, exponential importance sampling: exponent on the ratio of others' responses. 0: off."""
    cross_clip: bool = True
    """Mechanism 4, stepwise clipping. False: ratios of others' responses are not clipped."""
    delta: float = 0.2
    """Ratios of others' responses are clipped to [1 - `delta` + u * `delta_step`, `cross_upper`] in
    update u."""
    delta_step: float = 0.025
    """How much the lower bound rises with each update of a step. 0: it does not."""
    cross_upper: float = 1.0
    """Upper bound of that interval, at least 1."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if self.alpha < 0:
            raise ValueError(f"alpha must not be negative, not {self.alpha}")
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must be in (0, 1), not {self.delta}: the lower bound is 1 - delta "
                "(the paper's table 5 lists the bound itself; its 0.8 is delta: 0.2)"
            )
        if self.delta_step < 0:
            raise ValueError(f"delta_step must not be negative, not {self.delta_step}")
        if self.cross_upper < 1:
            raise ValueError(f"cross_upper must be at least 1, not {self.cross_upper}")

    @property
    def cross_range(self) -> CrossRange | None:
        """The interval of mechanism 4."""
        if not self.cross_clip:
            return None
        return CrossRange(1 - self.delta, self.cross_upper, "method.delta", "method.cross_upper")

    def check_updates(self, updates_per_step: int) -> None:
        """Raise ValueError if the clip interval closes before a step's last update."""
        if self.cross_clip:
            check_schedule(self.delta, self.delta_step, self.cross_upper, updates_per_step)


@dataclass(frozen=True, kw_only=True)
class PluginMethodSettings(MethodSettings):
    """A method of an installed package or of the user's own code: the shared settings, and its own options.

    Its code is imported when it is first needed, not when a recipe is read.
    """

    options: dict[str, Any] = field(default_factory=dict)
    """Options of a method of your own."""

    @property
    def shares_rollouts(self) -> bool:
        """What the method itself says."""
        return bool(self.make().shares_rollouts)

    @property
    def needs_source_logprobs(self) -> bool:
        """What the method itself says; if it does not say, whether it shares rollouts."""
        made = self.make()
        return bool(made.shares_rollouts and getattr(made, "needs_source_logprobs", True))

    @property
    def title(self) -> str:
        """The name without the module."""
        return self.name.rpartition(":")[2]

    def make(self) -> Any:
        """Return the method's object, made from its options and, if it takes them, these settings.

        Raise ConfigError if the method cannot be imported or does not take the options.
        """
        subject = f"method {self.name!r}"
        factory = load_plugin("method", self.name, METHOD_SETTINGS, ENTRY_POINTS, key="method.name")
        if not callable(factory):
            raise ConfigError(f"method.name: {self.name!r} is not a class or function that makes a method")
        given = {"settings": self} if "settings" in parameters_of(factory) else {}
        check_options(subject, factory, self.options, key="method.options", given=("settings",))
        try:
            made = factory(**given, **self.options)
        except (TypeError, ValueError) as error:  # an option of the wrong type
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"method.options: {self.options} do not fit {subject}: {error}") from error
        missing = [name for name in METHOD_MEMBERS if not hasattr(made, name)]
        if missing:
            raise ConfigError(
                f"method.name: {self.name!r} does not make a method: it has no {', '.join(missing)} "
                "(docs/extending.md)"
            )
        return made


def methods_without_logprobs() -> list[str]:
    """Return hacrl's methods that learn from sources whose log-probabilities are not known."""
    settings = [kind() for kind in METHOD_SETTINGS.values()]  # type: ignore[call-arg]
    return [one.name for one in settings if one.shares_rollouts and not one.needs_source_logprobs]


METHOD_MEMBERS = ("shares_rollouts", "advantages", "loss")  # of hacrl.algorithms.methods.OwnMethod
METHOD_SETTINGS: dict[str, type[MethodSettings]] = {
    "grpo": GrpoSettings,
    "gspo": GspoSettings,
    "naive": NaiveSettings,
    "hacpo": HacpoSettings,
    "success_gated": SuccessGatedSettings,
    "xgrpo": XgrpoSettings,
    "ftis": FtisSettings,
    "sapo": SapoSettings,
    "s2l_po": S2lpoSettings,
    "aligned": AlignedSettings,
}
_PLUGIN = "plugin"  # pydantic's tag of all methods that are not hacrl's own


def _settings_tag(given: Any) -> str:
    """Return which record a method's section is validated as; an unknown name is refused."""
    if not isinstance(given, dict):
        return HacpoSettings.name  # refuses what is no mapping
    name = given.get("name")
    if not isinstance(name, str):
        return ""
    if name not in METHOD_SETTINGS and (is_reference(name) or name in installed_plugins(ENTRY_POINTS)):
        return _PLUGIN
    return name


AnyMethodSettings = Annotated[
    Annotated[GrpoSettings, Tag("grpo")]
    | Annotated[GspoSettings, Tag("gspo")]
    | Annotated[NaiveSettings, Tag("naive")]
    | Annotated[HacpoSettings, Tag("hacpo")]
    | Annotated[SuccessGatedSettings, Tag("success_gated")]
    | Annotated[XgrpoSettings, Tag("xgrpo")]
    | Annotated[FtisSettings, Tag("ftis")]
    | Annotated[SapoSettings, Tag("sapo")]
    | Annotated[S2lpoSettings, Tag("s2l_po")]
    | Annotated[AlignedSettings, Tag("aligned")]
    | Annotated[PluginMethodSettings, Tag(_PLUGIN)],
    Discriminator(_settings_tag),
]


def method_names() -> list[str]:
    """Return the short names of all methods, those of installed packages included."""
    return list(dict.fromkeys((*METHOD_SETTINGS, *installed_plugins(ENTRY_POINTS))))


def method_settings(name: object) -> type[MethodSettings]:
    """Return the settings record of a method."""
    return METHOD_SETTINGS.get(name, PluginMethodSettings) if isinstance(name, str) else PluginMethodSettings


def check_schedule(delta: float, delta_step: float, upper: float, updates_per_step: int) -> None:
    """Raise ValueError if the stepwise clip interval is empty before a step's last update."""
    bounds = [1.0 - delta + u * delta_step for u in range(updates_per_step)]
    usable = sum(bound < upper - ROUNDING for bound in bounds)
    if usable == updates_per_step:
        return
    last_bound = bounds[-1]
    largest = (upper - 1.0 + delta) / max(updates_per_step - 1, 1)
    raise ValueError(
        f"the cross-agent clip interval [1 - delta + u * delta_step, upper] is empty from update "
        f"{usable + 1} of {updates_per_step} on (delta={delta}, delta_step={delta_step}, upper={upper}, "
        f"last lower bound {last_bound:.4g}): use delta_step below {largest:.4g}, a larger "
        "delta, or fewer updates per step"
    )
