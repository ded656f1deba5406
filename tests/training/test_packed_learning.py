"""Learning from samples laid end to end, and with compiled layers: the same losses, gradients and weights.

On a GPU that is the usual way. Here it is made to be, with attention that is not fused and a compiler that
traces as on a GPU but generates no code.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import HacpoSettings, LearningSettings
from hacrl.models import compile as compiled
from hacrl.models import compile_trial, logprobs, packing
from hacrl.models import lm_head as output_layer
from hacrl.models.agent import Agent
from hacrl.models.attention.key_copies import KeyCopies, group_copies
from hacrl.models.packing_support import supports_packing
from hacrl.training import layer_compilation
from hacrl.training.learner import Learner
from tests.models.linear_case import set_spare_memory
from tests.support.compiler import use_compiler
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, largest_difference, sample, weights

METHOD = HacpoSettings(kl_coefficient=0.01)


def fresh(checkpointing: bool) -> Agent:
    agent = sharpened(char_agent(), 10.0)
    assert supports_packing(agent.model)  # as is found out before it is used
    if checkpointing:
        agent.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return agent


def pack(monkeypatch: pytest.MonkeyPatch, as_tree: bool) -> None:
    """As on a GPU, gradients of shared prompts included; there heads that are too wide make no tree."""
    monkeypatch.setattr(logprobs, "has_fused_attention", lambda model: True)
    monkeypatch.setattr(logprobs, "has_tree_attention", lambda model: as_tree)

    def with_a_way_back(places: torch.Tensor, tokens: int, device: torch.device) -> KeyCopies:
        return KeyCopies(places, *group_copies(places, tokens))

    monkeypatch.setattr(packing, "plan_key_copies", with_a_way_back)


def learn(agent: Agent, **settings):
    learner = Learner(agent, make_method(METHOD), LearningSettings(lr=1e-2, **settings), SAMPLING)
    samples = [
        sample(agent, 0, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=1.2, advantage=2.0),
        sample(agent, 2, ratio=0.9, advantage=-1.0),
        sample(agent, 3, ratio=1.05, advantage=-1.5),
        # of the first two prompts so many that some are in one mini-batch, wherever they go
        sample(agent, 3, ratio=0.95, advantage=0.5),
        sample(agent, 0, ratio=1.1, advantage=-0.5),
        sample(agent, 4, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=0.8, advantage=-1.0),
    ]
    return learner.learn(samples, updates=2, seed=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at them
@pytest.mark.parametrize(("budget", "as_tree"), [(12, True), (4096, True), (4096, False)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiling", [False, True])
def test_packed_and_compiled_learning_gives_the_same_results(
    monkeypatch, checkpointing, compiling, budget, as_tree
) -> None:
    plain = fresh(checkpointing)
    before = weights(plain)
    expected = learn(plain, micro_batch_tokens=budget, compile=False)
    assert largest_difference(weights(plain), before) > 1e-2
    pack(monkeypatch, as_tree)
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    packed = fresh(checkpointing)
    found = learn(packed, micro_batch_tokens=budget, compile=compiling)
    assert found.notes == []
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert largest_difference(weights(packed), weights(plain)) < 1e-4


def test_layers_are_compiled_within_the_block_only(monkeypatch) -> None:
    compiled_with: list[object] = []

    def compile_nothing(function, dynamic):
        compiled_with.append(dynamic)
        return lambda *arguments, **keywords: function(*arguments, **keywords)

    use_compiler(monkeypatch, compile_nothing)
    model = char_agent().model
    layers = compiled.decoder_layers(model)
    own = [layer.forward for layer in layers]
    for _ in range(2):
        with compiled.compiled(model):
            assert all(layer.forward != mine for layer, mine in zip(layers, own, strict=True))
        assert [layer.forward for layer in layers] == own
    assert compiled_with == [True]  # once for all of a kind
    with compiled.compiled(model, enabled=False):
        assert [layer.forward for layer in layers] == own


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_can_be_freed(monkeypatch) -> None:
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    agent = fresh(False)
    assert learn(agent, compile=True).notes == []
    gone = weakref.ref(agent.model.model.layers[0])
    del agent
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("as_tree", [True, False])
def test_all_that_learning_needs_is_compiled_once(monkeypatch, as_tree) -> None:
    """Compiling takes a minute for a real model, so only what is needed is compiled, and only once."""
    from torch._dynamo.utils import counters

    pack(monkeypatch, as_tree)
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(output_layer, "MAX_COMPILED_LOGITS", 2000)  # several pieces
    torch._dynamo.reset()
    counters.clear()
    agent = char_agent(layers=2)
    supports_packing(agent.model)
    settings = LearningSettings(lr=1e-2, compile=True)
    learner = Learner(agent, make_method(HacpoSettings()), settings, SAMPLING)
    given = [sample(agent, which % 5, ratio=1.0, advantage=1.0 - which % 3) for which in range(60)]
    for count in (11, 60, 17):  # some always have the same prompt
        assert learner.learn(given[:count], updates=1, seed=count).notes == []
    assert counters["stats"]["unique_graphs"] == 2  # a layer and the output layer, forward and backward


def test_small_models_are_not_compiled_unless_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "has_fused_attention", lambda model: True)
    model = char_agent().model
    assert not compiled.compiles_by_default(model)
    monkeypatch.setattr(compiled, "MIN_PARAMETERS_TO_COMPILE", model.num_parameters())
    assert compiled.compiles_by_default(model)
    monkeypatch.setattr(compiled, "has_fused_attention", lambda model: False)
    assert not compiled.compiles_by_default(model)


def test_learning_continues_without_compilation_if_it_fails(monkeypatch) -> None:
    def no_compiler(function, dynamic):
        def fail(*arguments, **keywords):
            raise RuntimeError("no C compiler found\nand much more")

        return fail

    expected = learn(fresh(False), compile=False)
    use_compiler(monkeypatch, no_compiler)
    found = learn(fresh(False), compile=True)
    assert found.losses == expected.losses
    assert found.notes == [
        "agent 'char': its layers could not be compiled (RuntimeError: no C compiler found), so learning is "
        "slower than it could be. learning.compile=false skips the attempt"
    ]


def test_memory_that_runs_out_in_a_trial_is_not_a_compile_error(monkeypatch) -> None:
    def full(model, tokens) -> str | None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected = learn(fresh(False), compile=False)
    monkeypatch.setattr(layer_compilation, "find_compile_problem", full)
    found = learn(fresh(False), compile=True)
    assert (found.losses, found.notes, found.oom_retries) == (expected.losses, [], 0)


def test_a_trial_that_ran_out_of_memory_is_repeated_in_the_next_step(monkeypatch) -> None:
    tried: list[int] = []

    def full_at_first(model, tokens) -> str | None:
        tried.append(tokens)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "no compiler"

    monkeypatch.setattr(layer_compilation, "find_compile_problem", full_at_first)
    agent = fresh(False)
    settings = LearningSettings(lr=1e-2, compile=True, micro_batch_tokens=12)
    learner = Learner(agent, make_method(METHOD), settings, SAMPLING, exact_sampler=False)
    given = [sample(agent, which, ratio=1.0, advantage=1.0) for which in range(4)]
    assert learner.learn(given, 2, 0).notes == []
    assert len(tried) == 1  # not with every micro-batch
    (note,) = learner.learn(given, 2, 1).notes  # also if pi_old's passes are the first
    assert "(no compiler)" in note
    assert learner.learn(given, 2, 2).notes == []
    assert len(tried) == 2


@pytest.mark.parametrize("unused_first", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_trial_runs_backward_through_all_layers(monkeypatch, unused_first) -> None:
    """Also if the first parameters are unused, e.g. those of a vision tower."""
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    model = fresh(False).model
    if unused_first:
        unused = torch.nn.Parameter(torch.zeros(3))
        parameters = model.parameters
        monkeypatch.setattr(model, "parameters", lambda: iter([unused, *parameters()]))
    reached = []
    model.model.layers[0].register_full_backward_hook(lambda *_: reached.append(0))
    assert compile_trial.find_compile_problem(model, 100) is None
    assert reached == [0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_trial_keeps_no_logits(monkeypatch) -> None:
    """A trial must not run out of memory: that would leave a step without compilation."""
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", ("cpu",))
    asked = set_spare_memory(monkeypatch, 10**9)
    model = fresh(False).model.to(torch.bfloat16)
    assert compile_trial.find_compile_problem(model, 100) is None
    assert asked == []
    pairs = [((1, 2), (3, 4)), ((1, 2), (5, 6))]
    assert logprobs.packed_logprobs(model, pairs, SAMPLING, model.device).requires_grad
    assert len(asked) == 1  # as others do


def test_an_update_is_repeated_if_the_compiler_fails_in_it(monkeypatch) -> None:
    """The trial succeeds, but a real batch makes the compiler fail."""
    from torch._dynamo.exc import InternalTorchDynamoError

    calls = []

    def fails_later(function, dynamic):
        def called(*arguments, **keywords):
            calls.append(function)
            if len(calls) > 9:  # two layers and the output layer, tried by a few passes
                raise InternalTorchDynamoError("a guard has no such key")
            return function(*arguments, **keywords)

        return called

    plain, agent = fresh(False), fresh(False)
    expected = learn(plain, compile=False)
    use_compiler(monkeypatch, fails_later)
    found = learn(agent, compile=True)
    assert len(calls) == 10
    assert found.losses == expected.losses
    assert largest_difference(weights(agent), weights(plain)) == 0
    assert found.notes == [
        "agent 'char': its layers could not be compiled (InternalTorchDynamoError), so learning is slower "
        "than it could be. learning.compile=false skips the attempt"
    ]


def test_other_errors_are_not_taken_for_compile_errors(monkeypatch) -> None:
    calls = []

    def broken(function, dynamic):
        def called(*arguments, **keywords):
            calls.append(function)
            if len(calls) > 9:  # as above
                raise ValueError("a mistake in the model")
            return function(*arguments, **keywords)

        return called

    use_compiler(monkeypatch, broken)
    with pytest.raises(ValueError, match="a mistake in the model"):
        learn(fresh(False), compile=True)
