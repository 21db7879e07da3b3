"""Flat buffers: tensors stay views, gradients are in place, untouched parameters are skipped."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import BadRequest, NotFinite
from paceline.registry import models
from paceline.replica.flat import FlatModel
from paceline.replica.memory_format import measure_memory_format
from paceline.replica.refusals import refuse_optimizer
from paceline.replica.replica import Replica
from paceline.types import Batch


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def replica_of(model: nn.Module, **options: object) -> Replica:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return Replica(model, optimizer, mean_square, **options)


def batch(inputs: Tensor, targets: Tensor, step: int = 0) -> Batch:
    return Batch(inputs, targets, len(inputs), len(inputs), 0, step)


class Branches(nn.Module):
    """Two heads of which a forward pass uses one; tied and frozen parameters; a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.body.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.use = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.use](self.frozen(self.norm(self.tied(torch.tanh(self.body(x))))))


def test_layout_holds_everything_once() -> None:
    model = Branches()
    flat = FlatModel(model)
    (region,) = flat.regions
    names = [s.name for s in region.param_layout.slots]
    assert "tied.weight" not in names
    assert "body.weight" in names
    assert (
        region.params.numel()
        == sum(p.numel() for p in model.parameters())
        == region.param_layout.numel
    )
    frozen = {s.name for s in region.param_layout.slots} - {
        s.name for s in region.grad_layout.slots
    }
    assert frozen == {"frozen.weight", "frozen.bias"}
    for params, grads in zip(region.param_layout.slots, region.grad_layout.slots, strict=False):
        assert (params.name, params.offset) == (grads.name, grads.offset)
    assert {s.name for s in region.buffer_layout.slots} == {"norm.running_mean", "norm.running_var"}
    assert len(flat.integer_buffers) == 1


def test_parameters_stay_views_and_state_dicts_round_trip() -> None:
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    replica = replica_of(model)
    assert {k: v.tolist() for k, v in replica.state_dict().items()} == {
        k: v.tolist() for k, v in plain.state_dict().items()
    }
    other = Branches()
    replica.load_state_dict(other.state_dict())
    region = replica.regions[0]
    slot = next(s for s in region.param_layout.slots if s.name == "heads.1.weight")
    assert torch.equal(slot.view(region.params), other.heads[1].weight)
    plain.load_state_dict(replica.state_dict())
    region.params.zero_()
    assert not model.body.weight.detach().any()


def test_steps_equal_a_plain_loop_with_untouched_parameters() -> None:
    """Weight decay and momentum leave the unused head alone, bit for bit as in a plain loop."""
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    replica = replica_of(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(12):
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        model.use = plain.use = (step // 3) % 2
        replica.forward_backward(batch(x, y, step), 1.0)
        replica.update()
        optimizer.zero_grad()
        mean_square(plain(x), y).backward()
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@given(
    st.lists(
        st.lists(
            st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, -2.0])), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=5,
    )
)
def test_sums_tell_untouched_from_zero(ranks: list[list[float | None]]) -> None:
    """After a sum in any order, exactly the parameters that no rank touched are skipped (also
    where gradients are ±0).
    """
    totals, flats = None, []
    for grads in ranks:
        model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
        flat = FlatModel(model)
        flat.forget_gradients()
        for parameter, value in zip(model, grads, strict=True):
            if value is not None:
                (parameter * torch.full((2,), value)).sum().backward()
        flat.settle_gradients()
        totals = flat.regions[0].grads.clone() if totals is None else totals + flat.regions[0].grads
        flats.append((flat, model))
    for flat, model in flats:
        flat.regions[0].grads.copy_(totals)
        flat.skip_untouched()
        for index, parameter in enumerate(model):
            assert (parameter.grad is None) == all(grads[index] is None for grads in ranks)


def test_a_gradient_that_was_replaced_is_taken_back() -> None:
    model = nn.Linear(3, 1)
    flat = FlatModel(model)
    flat.forget_gradients()
    model(torch.ones(2, 3)).sum().backward()
    model.weight.grad = torch.full((1, 3), 7.0)
    model.bias.grad = None
    flat.settle_gradients()
    assert model.weight.grad.data_ptr() == flat.trainable[0][1].data_ptr()
    assert flat.regions[0].grads[:3].tolist() == [7.0, 7.0, 7.0]


def test_second_backward_accumulates() -> None:
    model = nn.Linear(3, 1, bias=False)
    flat = FlatModel(model)
    flat.forget_gradients()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    flat.settle_gradients()
    assert flat.regions[0].grads.tolist() == [2.0, 2.0, 2.0]


def test_sparse_gradients_are_made_dense_with_a_notice() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    flat = FlatModel(model)
    flat.forget_gradients()
    model(torch.tensor([1, 1])).sum().backward()
    flat.settle_gradients()
    assert flat.regions[0].grads.view(5, 2)[1].tolist() == [2.0, 2.0]
    assert "sparse" in flat.notices[0]


def test_empty_batch_leaves_a_gradient_that_counts_nothing() -> None:
    replica = replica_of(nn.Linear(2, 2))
    replica.forward_backward(batch(torch.ones(1, 2), torch.ones(1, 2)), 1.0)
    replica.forward_backward(Batch(None, None, 0, 8, 0, 1), 0.0)
    assert float(replica.regions[0].grads.abs().sum()) == 0


def test_channels_last_weights_are_views_with_permuted_strides() -> None:
    torch.manual_seed(0)
    model = models.build("cnn:dropout=0", input_shape=(3, 28, 28), classes=4)
    plain = copy.deepcopy(model)
    model = model.to(memory_format=torch.channels_last)
    replica = Replica(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.cross_entropy,
        channels_last=True,
    )
    weight = model[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    x, y = torch.randn(4, 3, 28, 28), torch.tensor([0, 1, 2, 3])
    replica.forward_backward(batch(x, y), 1.0)
    assert weight.grad.stride() == weight.stride()
    nn.functional.cross_entropy(plain(x), y).backward()
    torch.testing.assert_close(weight.grad, plain[3].weight.grad, rtol=1e-4, atol=1e-6)
    assert all(v.is_contiguous() for v in replica.state_dict().values())


def test_mixed_dtypes_get_regions_of_their_own() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    assert [r.params.dtype for r in FlatModel(model).regions] == [torch.float32, torch.float64]


def test_other_references_to_a_buffer_stay_valid() -> None:
    """r22 of the core's review: a list, a cache or a second module may hold a buffer, too."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.norm, self.held = nn.BatchNorm1d(2), [self.scale]

    model = Holds()
    scale, mean = model.scale, model.norm.running_mean
    flat = FlatModel(model)
    model.norm(torch.randn(4, 2))
    model.scale.fill_(5.0)
    assert model.scale is scale is model.held[0]
    assert model.norm.running_mean is mean
    assert mean is not None
    flat.regions[0].buffers.fill_(7.0)
    assert scale.tolist() == mean.tolist() == [7.0, 7.0], "they are views of the flat buffer"
    model.scale = torch.zeros(2)  # the module replaces its buffer
    flat.gather_buffers()
    assert model.scale is scale
    assert scale.tolist() == [0.0, 0.0]


def test_buffers_that_a_module_replaces_come_back() -> None:
    model = nn.BatchNorm1d(2)
    flat = FlatModel(model)
    model.running_mean = torch.tensor([3.0, 4.0])
    flat.gather_buffers()
    assert flat.regions[0].buffers[:2].tolist() == [3.0, 4.0]
    flat.regions[0].buffers.zero_()
    assert model.running_mean.tolist() == [0.0, 0.0]


def test_parameter_groups_are_in_the_layout() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=0.1
    )
    replica = Replica(model, optimizer, mean_square)
    assert [s.group for s in replica.regions[0].param_layout.slots] == [0, 0, 1, 1]
    replica.set_lr_factor(0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.25]


def test_compiled_and_autocast_models_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    replica = replica_of(torch.compile(model, backend="eager"))
    assert replica.state_dict().keys() == plain.state_dict().keys()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x).float()

    for candidate in (replica, replica_of(Mixed())):
        before = candidate.regions[0].params.clone()
        candidate.forward_backward(batch(torch.randn(5, 4), torch.randn(5, 2)), 1.0)
        candidate.update()
        assert not torch.equal(before, candidate.regions[0].params)
        assert candidate.regions[0].grads.dtype is torch.float32


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    with pytest.raises(BadRequest, match="LBFGS"):
        refuse_optimizer(torch.optim.LBFGS(nn.Linear(1, 1).parameters()))
    replica = replica_of(nn.Linear(2, 2))
    replica.loss = lambda outputs, targets: outputs - targets
    with pytest.raises(BadRequest, match="one number"):
        replica.forward_backward(batch(torch.ones(1, 2), torch.ones(1, 2)), 1.0)
    replica.loss = lambda outputs, targets: outputs.sum() * float("nan")
    with pytest.raises(NotFinite, match="step 1"):
        replica.forward_backward(batch(torch.ones(1, 2), torch.ones(1, 2)), 1.0)


def test_holding_other_weights_for_a_while() -> None:
    replica = replica_of(nn.Linear(2, 2))
    own = replica.regions[0].params.clone()
    with replica.holding([torch.zeros_like(own)]):
        assert not replica.model.weight.detach().any()
    assert torch.equal(replica.regions[0].params, own)


def test_measuring_the_memory_format_leaves_no_trace() -> None:
    model = models.build("cnn", input_shape=(1, 28, 28), classes=10)
    loss, images, labels = (
        nn.functional.cross_entropy,
        torch.randn(8, 1, 28, 28),
        torch.zeros(8, dtype=torch.int64),
    )
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert measure_memory_format(model, loss, images, labels) in ("contiguous", "channels_last")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert (
        measure_memory_format(nn.Linear(2, 2), loss, torch.randn(8, 2), torch.zeros(8))
        == "contiguous"
    )
