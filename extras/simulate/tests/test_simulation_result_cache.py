"""Repeated operations on simulated tensors give what torch's fake tensors give."""

from __future__ import annotations

import pytest
import torch
from mppo_simulate.gpu.result_cache import ResultCache
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


class Cuda(FakeTensorMode):
    avoid_device_init = True  # pyright: ignore[reportAssignmentType]


@pytest.fixture
def cache():
    mode = Cuda(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return ResultCache(mode)


def tensor(cache, *shape, dtype=torch.float32):
    return cache.empty(shape, torch.empty(shape, device="meta").stride(), dtype, CUDA)


def described(x):
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


CALLS = {
    "product": (aten.mm.default, lambda t: (t(4, 6), t(6, 8)), {}),
    "sum with a number": (aten.add.Tensor, lambda t: (t(4, 1), 2.5), {}),
    "transpose": (aten.t.default, lambda t: (t(4, 6),), {}),
    "slice": (aten.slice.Tensor, lambda t: (t(4, 6), 1, 2, 5), {}),
    "split": (aten.split.Tensor, lambda t: (t(4, 6), 2), {}),
    "join": (aten.cat.default, lambda t: ([t(4, 6), t(2, 6)],), {}),
    "cast": (aten._to_copy.default, lambda t: (t(4, 6),), {"dtype": torch.bfloat16}),
    "largest": (aten.topk.default, lambda t: (t(4, 6), 2), {}),
    "added in place": (aten.add_.Tensor, lambda t: (t(4, 6), t(6)), {}),
    "into another": (aten.mm.out, lambda t: (t(4, 6), t(6, 8)), {"out": (4, 8)}),
    "from the host": (aten.copy_.default, lambda t: (t(3), torch.ones(3)), {}),
    "another strided view": (aten.as_strided.default, lambda t: (t(4, 6), (2, 2), (1, 3), 5), {}),
    "new": (aten.full.default, lambda t: ([2, 3], 1.0), {"device": CUDA}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_result_equals_torchs_and_shares_what_the_first_shares(cache, name):
    func, arguments, options = CALLS[name]
    found = []
    for _ in range(3):
        args = arguments(lambda *shape: tensor(cache, *shape))
        kwargs = {k: tensor(cache, *v) if k == "out" else v for k, v in options.items()}
        out = cache.run(func, args, kwargs)
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, FakeTensor)]
        relations = [
            [(x is y, x.untyped_storage()._cdata == y.untyped_storage()._cdata) for y in inputs]
            for x in outputs
        ]
        found.append((type(out), [described(x) for x in outputs], relations))
    with cache._mode:
        out = func(*args, **kwargs)
    outputs = list(out) if isinstance(out, tuple | list) else [out]
    assert found[0] == found[1] == found[2]
    assert found[1][1] == [described(x) for x in outputs]
    known = [key for key in cache._known if key[0] is func]
    assert len(known) == 1, "the forms of the arguments are the same"


def test_a_view_begins_where_its_argument_begins(cache):
    whole = tensor(cache, 10, 6)
    for begin in (1, 4):
        part = cache.run(aten.slice.Tensor, (whole, 0, begin, begin + 2), {})
        row = cache.run(aten.select.int, (part, 0, 1), {})
        assert (row.shape, row.storage_offset()) == ((6,), 6 * (begin + 1))
    assert len([key for key in cache._known if key[0] is aten.select.int]) == 1


def test_numbers_of_another_type_are_another_operation(cache):
    whole = tensor(cache, 3, dtype=torch.int64)
    kinds = [cache.run(aten.mul.Tensor, (whole, by), {}).dtype for by in (2, 2.0, True, 2)]
    assert kinds == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_mistakes_are_found_every_time(cache):
    for _ in range(2):
        with pytest.raises(RuntimeError):
            cache.run(aten.mm.default, (tensor(cache, 4, 6), tensor(cache, 5, 8)), {})
        with pytest.raises(RuntimeError, match="device"):
            cache.run(aten.mm.default, (tensor(cache, 4, 6), torch.ones(6, 8)), {})


def test_an_operation_that_changes_a_shape_is_never_repeated(cache):
    for _ in range(2):
        x = tensor(cache, 4, 6)
        assert cache.run(aten.t_.default, (x,), {}) is x
        assert x.shape == (6, 4)
