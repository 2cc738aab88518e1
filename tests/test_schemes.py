"""Contract tests over SCHEMES, and finding one."""

import pytest
import torch

import inro_fx
from inro_fx.schemes import find_scheme

SCHEMES = [*inro_fx.SCHEMES, inro_fx.uniform(100), inro_fx.uniform(5, 3), inro_fx.uniform(2**40, "tensor")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (5, 31), (5, 32), (5, 40), (7, 33)])
def test_contract(scheme, shape):
    assert isinstance(scheme, inro_fx.Scheme)
    w = torch.randn(shape)
    parts = scheme.pack(w)
    assert tuple(parts) == scheme.parts
    assert all(p.shape[0] in (1, shape[0]) and p.dim() == 2 for p in parts.values())
    restored = scheme.unpack(parts, shape[1], w.dtype)
    assert ((restored - w).abs() <= scheme.bound(w)).all()
    for row in range(shape[0]):                                    # rows can be taken without the others
        piece = {k: p if p.shape[0] == 1 else p[row:row + 1] for k, p in parts.items()}
        assert torch.equal(scheme.unpack(piece, shape[1], w.dtype), restored[row:row + 1])


@pytest.mark.parametrize("scheme", inro_fx.SCHEMES, ids=lambda s: s.name)
def test_found_by_name_and_as_itself(scheme):
    assert find_scheme(scheme.name) is scheme
    assert find_scheme(scheme) is scheme


def test_the_numbers_of_the_subclass():
    """int8_rowwise_full: scale = max / 127.5, codes -128..127."""
    w = torch.tensor([[-127.5, 127.5, 64.0]])
    parts = find_scheme("int8_rowwise_full").pack(w)
    assert parts["scale"].item() == 1
    assert parts["codes"].tolist() == [[-128, 127, 64]]


def test_weights_on_the_grid_come_back_exactly():
    w = torch.arange(-7, 8).float()[None] * 0.1
    assert torch.allclose(inro_fx.uniform(7).unpack(inro_fx.uniform(7).pack(w), 15, w.dtype), w, atol=1e-7)


@pytest.mark.parametrize("columns", [40, 31, 32, 1])
@pytest.mark.parametrize("group", [1, 32, 100])
def test_the_last_group_may_be_short(columns, group):
    w = torch.randn(3, columns)
    w[:, -1] = 50
    scheme = inro_fx.uniform(7, group)
    parts = scheme.pack(w)
    assert parts["scale"].shape == (3, -(-columns // group))
    assert ((scheme.unpack(parts, columns, w.dtype) - w).abs() <= scheme.bound(w)).all()


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(inro_fx.SchemeError, match=r"unknown scheme 'int_8': did you mean 'int8'\?"):
        find_scheme("int_8")
    with pytest.raises(inro_fx.SchemeError, match="it lacks name, parts, pack"):
        find_scheme(object())
