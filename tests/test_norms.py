"""Squared norms: accurate for large buffers, and the same for every layout, type and size."""

from __future__ import annotations

import pytest
import torch

from elastane import norms
from elastane.norms import (
    ROW,
    Run,
    runs_of_groups,
    squared_norm,
    squared_norm_of_all,
    squared_norm_twin,
    squared_norms_of_runs,
)

LOOSE = 1e-5  # one row in float32; equal elements all round to the same side


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a dot product split over many threads is less wrong
    yield
    torch.set_num_threads(before)


# BC-59
@pytest.mark.usefixtures("one_thread")
def test_a_large_buffer_is_right_to_1e_7_where_one_dot_product_is_wrong_by_1e_4():
    tensor = normal(25_000_000)
    truth = squared_norm_twin(tensor)
    assert abs(float(squared_norm(tensor)) / truth - 1) < 1e-7
    assert abs(float(tensor.dot(tensor)) / truth - 1) > 1e-4


def test_the_twin_is_exact_where_float64_is():
    assert squared_norm_twin(torch.tensor([3.0, -4.0, 0.5])) == 25.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 2, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 17])
def test_every_size_and_type_agrees_with_the_twin(size, dtype):
    tensor = normal(size, seed=size, dtype=dtype)
    found = squared_norm(tensor)
    assert found.dtype == torch.float64
    assert found.shape == ()
    rel = 1e-13 if dtype == torch.float64 else LOOSE
    assert float(found) == pytest.approx(squared_norm_twin(tensor), rel=rel)


def test_the_tail_counts_once():
    tensor = torch.zeros(2 * ROW + 3)
    tensor[-1] = 3.0
    assert float(squared_norm(tensor)) == 9.0
    tensor[-1], tensor[ROW - 1], tensor[ROW] = 0.0, 2.0, 1.0
    assert float(squared_norm(tensor)) == pytest.approx(5.0, rel=1e-15)


LAYOUTS = {
    "scalar": lambda: normal(1)[0],
    "matrix": lambda: normal(70, 90),
    "transposed": lambda: normal(70, 90).t(),
    "permuted": lambda: normal(7, 11, 13, 17).permute(2, 0, 3, 1),
    "channels_last": lambda: normal(8, 16, 9, 9).to(memory_format=torch.channels_last),
    "channels_last_one_channel": lambda: normal(8, 1, 9, 9).to(memory_format=torch.channels_last),
    "every_second": lambda: normal(20_000)[::2],
    "columns": lambda: normal(300, 50)[:, 3:40],
    "columns_transposed": lambda: normal(300, 50)[:, 3:40].t(),
    "rows_from_the_middle": lambda: normal(300, 50)[100:250],
    "transposed_from_the_middle": lambda: normal(300, 50)[100:250].t(),
    "expanded": lambda: normal(100, 1).expand(100, 60),
    "one_wide": lambda: normal(5000, 2)[:, :1],
    "empty_and_strided": lambda: normal(10, 6)[:, ::2][:0],
    "three_dims_with_a_gap": lambda: normal(10, 20, 30)[:, ::2, :],
    "bfloat16_transposed": lambda: normal(70, 90, dtype=torch.bfloat16).t(),
    "parameter": lambda: torch.nn.Parameter(normal(70, 90).t()).detach(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_agrees_with_the_twin(layout):
    tensor = LAYOUTS[layout]()
    kept = tensor.clone()
    expected = pytest.approx(squared_norm_twin(tensor), rel=LOOSE)
    assert float(squared_norm(tensor)) == expected
    assert float(squared_norm_of_all([tensor])) == expected
    assert torch.equal(tensor, kept)


def test_a_dense_layout_is_read_in_place(monkeypatch):
    def refuse(*_):
        raise AssertionError("this layout was copied")

    monkeypatch.setattr(torch.Tensor, "reshape", refuse)
    for layout in ("transposed", "permuted", "channels_last", "transposed_from_the_middle"):
        squared_norm(LAYOUTS[layout]())
    with pytest.raises(AssertionError, match="copied"):
        squared_norm(LAYOUTS["every_second"]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_list_is_the_sum_of_its_tensors(dtype):
    sizes = [1, 0, 5, ROW - 1, ROW, ROW + 1, 10_000, 300]
    tensors = [normal(size, seed=size, dtype=dtype) for size in sizes]
    found = squared_norm_of_all(tensors)
    assert found.dtype == torch.float64
    assert found.shape == ()
    expected = sum(float(squared_norm(tensor)) for tensor in tensors)
    assert float(found) == pytest.approx(expected, rel=LOOSE)


@pytest.mark.parametrize("sizes", [[ROW + 1], [2 * ROW, 3 * ROW], [7], [7, 8]])
def test_a_list_of_only_large_or_only_small_tensors_works(sizes):
    tensors = [normal(size, seed=size) for size in sizes]
    expected = sum(squared_norm_twin(tensor) for tensor in tensors)
    assert float(squared_norm_of_all(tensors)) == pytest.approx(expected, rel=LOOSE)


def test_a_list_may_mix_precisions():
    types = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    tensors = [normal(50, seed=i, dtype=dtype) for i, dtype in enumerate(types)]
    tensors += [normal(5000, seed=i, dtype=dtype) for i, dtype in enumerate(types)]
    expected = sum(squared_norm_twin(tensor) for tensor in tensors)
    assert float(squared_norm_of_all(tensors)) == pytest.approx(expected, rel=LOOSE)


@pytest.mark.parametrize("size", [100, 50_000])
def test_squares_beyond_the_range_of_float16_do_not_overflow(size):
    tensor = torch.full((size,), 6e4, dtype=torch.float16)  # 3.6e9 each; float16 ends at 65504
    expected = pytest.approx(float(tensor[0]) ** 2 * size, rel=LOOSE)
    assert float(squared_norm(tensor)) == expected
    assert float(squared_norm_of_all([tensor])) == expected


@pytest.mark.parametrize("size", [100, 50_000])
def test_sums_of_squares_beyond_float32_do_not_overflow(size):
    tensor = torch.full((size,), 1e17)
    tensor[0] = 1.0
    assert float(squared_norm(tensor)) == pytest.approx(squared_norm_twin(tensor), rel=LOOSE)
    many = torch.full((50_000,), 2.5e17)  # 3e39 in all, above float32; each row below it
    assert float(squared_norm(many)) == pytest.approx(50_000 * 6.25e34, rel=LOOSE)


def test_a_list_whose_sum_is_beyond_float32_does_not_overflow():
    tensors = [torch.full((100,), 2.5e17)] * 100  # 6e38 in all; each row below float32's end
    assert float(squared_norm_of_all(tensors)) == pytest.approx(1e4 * 6.25e34, rel=LOOSE)


def test_small_tensors_are_read_together_in_bounded_pieces(monkeypatch):
    sizes, pieces = [40, 7, 30, 25, 3, 90, 60, 1], []
    monkeypatch.setattr("elastane.norms._SMALL", 50)
    monkeypatch.setattr("elastane.norms._MOST_TOGETHER", 64)
    real = norms.flatten_together
    monkeypatch.setattr(norms, "flatten_together", lambda some: pieces.append(some) or real(some))
    tensors = [normal(size, seed=size) for size in sizes]
    expected = sum(squared_norm_twin(tensor) for tensor in tensors)
    assert float(squared_norm_of_all(tensors)) == pytest.approx(expected, rel=LOOSE)
    assert [[len(one) for one in some] for some in pieces] == [[40, 7], [30, 25, 3, 1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_may_be_read_with_others(layout):
    tensor, other = LAYOUTS[layout](), normal(500, seed=1)
    expected = squared_norm_twin(tensor) + squared_norm_twin(other)
    found = squared_norm_of_all([other, tensor, other[:0]])
    assert float(found) == pytest.approx(expected, rel=LOOSE)


@pytest.mark.parametrize("size", [100, 5000])
def test_small_squares_in_half_precision_do_not_vanish(size):
    tensor = torch.full((size,), 1e-4, dtype=torch.float16)
    expected = pytest.approx(float(tensor[0]) ** 2 * size, rel=LOOSE)
    assert float(squared_norm(tensor)) == expected
    assert float(squared_norm_of_all([tensor])) == expected


@pytest.mark.parametrize("size", [100, 5000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_shows(size, bad):
    tensor = normal(size)
    tensor[-1] = bad
    assert not squared_norm(tensor).isfinite()
    assert not squared_norm_of_all([normal(10), tensor]).isfinite()


def test_stretches_of_a_buffer_are_joined_by_group_and_measured_apart():
    sizes, groups = [3, 5000, 2, 7], [0, 0, None, 1]
    runs = runs_of_groups(groups, sizes)
    assert runs == [Run(0, 0, 5003), Run(None, 5003, 5005), Run(1, 5005, 5012)]
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    found = squared_norms_of_runs(buffer, runs, num_groups=3).tolist()
    parts = [buffer[:5003], buffer[5005:]]
    assert found == pytest.approx([*(squared_norm_twin(part) for part in parts), 0.0], rel=1e-6)
    whole = runs_of_groups([0, 0], [12, 5000])
    found = squared_norms_of_runs(buffer, whole, num_groups=1)
    assert found.tolist() == [squared_norm(buffer).item()]
