"""Random models (programs.py): under the identity scheme the result does what the float model does, in every call, to the bit."""

import copy

import pytest
import torch
from programs import KINDS, copied, difference, program, quantized
from torch import nn

import inro_fx

SEEDS = range(40)
PER_KIND = 1          # more with tests/programs.py --minutes 60


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                # small operators
    yield
    torch.set_num_threads(threads)


def check(made, quantize=quantized):
    found = difference(made, quantize)
    if found is not None:
        kinds = f" --kinds {','.join(made.kinds)}" if made.kinds else ""
        pytest.fail(f"{made.source}\n{found}\npython tests/programs.py --seed {made.seed}{kinds} --shrink", pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed):
    check(program(seed))


@pytest.mark.parametrize("seed", range(PER_KIND))
@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_a_kind_of_statement_alone(kind, seed):
    check(program(seed, (kind,)))


def test_the_float_model_agrees_with_its_copy():
    for seed in range(1000, 1030):
        check(program(seed), copied)


def test_a_program_is_its_seed():
    assert program(5).source == program(5).source != program(6).source
    assert "bernoulli" in "".join(program(seed, ("draw_like",)).source for seed in range(9))


def test_what_is_compared():
    """A copy that differs in any of these respects is found out."""
    class Altered(nn.Module):
        def __init__(self, model, alter):
            super().__init__()
            self.__dict__.update(vars(copy.deepcopy(model)))
            self.__class__ = type(model.__class__.__name__, (type(model),), {"forward": lambda own, *args, **kwargs: alter(own, super(type(own), own).forward, args, kwargs)})

    def twice(own, forward, args, kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    def draws(own, forward, args, kwargs):
        torch.rand(())
        return forward(*args, **kwargs)

    def writes(own, forward, args, kwargs):
        result = forward(*args, **kwargs)
        args[0].detach().add_(1)
        return result

    def remembers(own, forward, args, kwargs):
        own.seen = True
        return forward(*args, **kwargs)

    def doubles(own, forward, args, kwargs):
        result = forward(*args, **kwargs)
        return result.double() if isinstance(result, torch.Tensor) else [result]

    def swallows(own, forward, args, kwargs):
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            raise KeyError("another") from error

    def altered(alter):
        return lambda model, args, kwargs: Altered(model, alter)

    positional = [made for made in map(program, range(40)) if "    return (x," in made.source and "raise" not in made.source][:5]
    assert all(difference(made, altered(lambda own, forward, args, kwargs: forward(*args, **kwargs))) is None for made in positional)
    for alter, word in ((draws, "generator"), (writes, "inputs"), (remembers, "attribute"), (doubles, "output")):
        assert all(difference(made, altered(alter)) is not None for made in positional), alter
        assert any(word in difference(made, altered(alter)) for made in positional), alter
    assert any(".calls" in (difference(program(seed, ("counter",)), altered(twice)) or "") for seed in range(20))
    assert any("raises: " in (difference(program(seed, ("raises",)), altered(swallows)) or "") for seed in range(5))
    assert any("hooks: " in (difference(program(seed, ("forward_hook",)), altered(twice)) or "") for seed in range(5))


def test_many_become_one_graph():
    graphs = [inro_fx.report(statistics["model"]) for seed in range(25) if difference(program(seed), statistics=(statistics := {})) is None]
    assert sum(report.nodes > 0 for report in graphs) > len(graphs) / 6
