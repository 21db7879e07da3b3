"""Every way of clipping gives what one sample at a time gives."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from paceline.errors import BadRequest, NotFinite
from paceline.objectives.losses import Loss
from paceline.privacy import convolution, native
from paceline.privacy import layers as rules
from paceline.privacy.bookkeeping import Bookkeeping
from paceline.privacy.checks import refuse_mixing, refuse_unequal_loss
from paceline.privacy.clip import Loop
from paceline.privacy.layers import Call, Linear

SAMPLES, CLASSES = 9, 3
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest number, or of 1
Inputs = Callable[[int, torch.dtype], Tensor]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x)).mean(1)


class Twice(nn.Module):
    """A model that uses one layer twice."""

    def __init__(self, layer: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x))))


class Scaled(nn.Module):
    """A model with a parameter outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale)


class Half(nn.Module):
    """A model with a layer whose output is not used, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.idle = nn.Linear(6, CLASSES), nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


class Watches(nn.Module):
    """A model that also uses a layer under no_grad, and in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.watched, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.watched(x)
        return self.out(x * torch.sigmoid(seen))


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, CLASSES).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.double())).float())


def rows(*shape: int) -> Inputs:
    return lambda n, dtype: torch.randn(n, *shape, dtype=dtype)


def words(count: int, most: int) -> Inputs:
    return lambda n, dtype: torch.randint(0, most, (n, count))


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


IMAGES = rows(2, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "linear": (
        lambda: layers(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)),
        rows(6),
    ),
    "linear without bias": (
        lambda: layers(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES)),
        rows(6),
    ),
    "short sequence": (
        lambda: layers(
            nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3), nn.Flatten(), nn.Linear(15, 3)
        ),
        rows(5, 6),
    ),
    "long sequence": (
        lambda: layers(nn.Linear(3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(60, CLASSES)),
        rows(30, 3),
    ),
    "embedding": (
        lambda: layers(nn.Embedding(7, 5, padding_idx=0), nn.Flatten(), nn.Linear(30, CLASSES)),
        words(6, 7),
    ),
    "layer norm": (
        lambda: layers(
            nn.Linear(6, 8), nn.LayerNorm((5, 8)), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3)
        ),
        rows(5, 6),
    ),
    "group norm": (
        lambda: layers(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)),
        IMAGES,
    ),
    "convolution": (
        lambda: layers(
            nn.Conv2d(2, 8, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 6, 3, dilation=2, padding="same", padding_mode="reflect"),
            nn.Flatten(),
            nn.Linear(96, CLASSES),
        ),
        IMAGES,
    ),
    "grouped convolution": (
        lambda: layers(
            nn.Conv2d(2, 8, 3),
            nn.Conv2d(8, 8, 3, groups=4),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        IMAGES,
    ),
    "one dimension": (
        lambda: layers(
            nn.Conv1d(2, 8, 3, padding=1, stride=2),
            nn.Conv1d(8, 4, 2, bias=False),
            nn.Flatten(),
            nn.Linear(28, 3),
        ),
        rows(2, 16),
    ),
    "used twice": (lambda: Twice(nn.Linear(6, 6), nn.Linear(6, CLASSES)), rows(6)),
    "convolution used twice": (
        lambda: Twice(
            nn.Conv2d(2, 2, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(128, CLASSES))
        ),
        IMAGES,
    ),
    "shared parameters": (Tied, words(4, 11)),
    "own parameter": (Scaled, rows(6)),
    "under no_grad": (Watches, rows(6)),
    "unused layers": (Half, rows(6)),
    "attention": (
        lambda: layers(
            nn.Linear(6, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(40, 3),
        ),
        rows(5, 6),
    ),
    "prelu": (lambda: layers(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, CLASSES)), rows(6)),
    "transposed convolution": (
        lambda: layers(nn.ConvTranspose2d(2, 3, 3), nn.Flatten(), nn.Linear(300, 3)),
        IMAGES,
    ),
}


def both(
    model: nn.Module, inputs: Tensor, targets: Tensor, per_layer: bool = False
) -> tuple[list[Tensor], list[Tensor], Tensor, Bookkeeping]:
    """Sums of clipped gradients by the loop and by book-keeping, with a bound that clips half of
    the samples.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    one, other = ([(p, torch.empty_like(p)) for p in trained] for _ in range(2))
    loop = Loop(model, F.cross_entropy, one, 1.0, per_layer)
    _, lengths = loop(inputs, targets, len(inputs))
    loop.bound = float(lengths.median())
    value, lengths = loop(inputs, targets, len(inputs))
    books = Bookkeeping(model, F.cross_entropy, other, loop.bound, per_layer)
    again, own = books(inputs, targets, len(inputs))
    torch.testing.assert_close(own, lengths.to(own), rtol=1e-4, atol=1e-7)
    assert again == pytest.approx(value, rel=1e-5)
    assert 0 < int((lengths > loop.bound).sum()) < len(inputs)
    assert all(p.requires_grad for p in trained)
    return [g for _, g in one], [g for _, g in other], lengths, books


def assert_agree(ones: list[Tensor], others: list[Tensor]) -> None:
    largest = max(1.0, *(float(one.abs().max()) for one in ones))
    for one, other in zip(ones, others, strict=True):
        assert float((one - other).abs().max()) <= TOLERANCE[one.dtype] * largest


@pytest.mark.parametrize("per_layer", [False, True], ids=["flat", "per layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_bookkeeping_is_the_loop(name: str, dtype: torch.dtype, per_layer: bool) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().to(dtype)
    ones, others, _, _ = both(
        model, inputs(SAMPLES, dtype), torch.randint(0, CLASSES, (SAMPLES,)), per_layer
    )
    assert_agree(ones, others)


@pytest.mark.parametrize(
    "name", ["convolution", "grouped convolution", "one dimension", "group norm"]
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_too_large_to_keep(
    name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large gradients are measured a few at a time (or from places) and summed in a second pass,
    with the same result.
    """
    monkeypatch.setattr(convolution, "KEEP_BYTES", 0)
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, images = make().double(), inputs(SAMPLES, torch.float64)
    if channels_last and images.dim() == 4:
        model, images = (
            model.to(memory_format=torch.channels_last),
            images.contiguous(memory_format=torch.channels_last),
        )
    ones, others, _, _ = both(model, images, torch.randint(0, CLASSES, (SAMPLES,)))
    assert_agree(ones, others)


@given(data=st.data())
@settings(max_examples=40)
def test_any_architecture(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    kind = data.draw(st.sampled_from(["rows", "images", "words"]))
    stack: list[nn.Module] = []
    if kind == "words":
        # one number cannot be normalised
        count, width = (data.draw(st.integers(1, 6)), data.draw(st.integers(2, 6)))
        inputs = torch.randint(0, 5, (SAMPLES, count))
        stack += [nn.Embedding(5, width)]
        if data.draw(st.booleans()):
            stack += [nn.LayerNorm(width)]
        shape: tuple[int, ...] = (count, width)
    elif kind == "images":
        channels, side = data.draw(st.integers(1, 3)), data.draw(st.integers(5, 9))
        inputs = torch.randn(SAMPLES, channels, side, side, dtype=torch.float64)
        for _ in range(data.draw(st.integers(1, 2))):
            stride, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
            fits = min(3, side + 2 * padding)
            out, kernel = 2 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, fits))
            stack += [
                nn.Conv2d(channels, out, kernel, stride, padding, bias=data.draw(st.booleans()))
            ]
            channels, side = out, (side + 2 * padding - kernel) // stride + 1
            # one number cannot be normalised
            if side * side * out > 2 and data.draw(st.booleans()):
                stack += [nn.GroupNorm(2, out)]
            stack += [nn.ReLU(inplace=data.draw(st.booleans()))]
        with torch.no_grad():
            shape = tuple(layers(*stack).double()(inputs).shape[1:])
    else:
        inputs = torch.randn(SAMPLES, data.draw(st.integers(1, 7)), dtype=torch.float64)
        shape = tuple(inputs.shape[1:])
    stack += [nn.Flatten()]
    width = int(torch.Size(shape).numel())
    for _ in range(data.draw(st.integers(0, 2))):
        hidden = data.draw(st.integers(1, 9))
        stack += [nn.Linear(width, hidden, bias=data.draw(st.booleans())), nn.Tanh()]
        width = hidden
    model = layers(*stack, nn.Linear(width, CLASSES)).double()
    trained = list(model.parameters())
    for parameter in trained[:-1]:
        parameter.requires_grad_(data.draw(st.booleans()))  # frozen layers anywhere
    per_layer = data.draw(st.booleans())
    targets = torch.randint(0, CLASSES, (SAMPLES,))
    here = [p for p in trained if p.requires_grad]
    one, other = ([(p, torch.empty_like(p)) for p in here] for _ in range(2))
    bound = data.draw(st.floats(0.01, 10.0))
    Loop(model, F.cross_entropy, one, bound, per_layer)(inputs, targets, SAMPLES)
    Bookkeeping(model, F.cross_entropy, other, bound, per_layer)(inputs, targets, SAMPLES)
    assert_agree([g for _, g in one], [g for _, g in other])


def test_two_precisions_in_one_model() -> None:
    torch.manual_seed(0)
    ones, others, _, _ = both(
        TwoPrecisions(), torch.randn(SAMPLES, 6), torch.randint(0, CLASSES, (SAMPLES,))
    )
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_is_refused() -> None:
    compiled = nn.Linear(2, 2)
    # as torch.compile leaves it; compiling takes seconds, and warns
    compiled._orig_mod = nn.Linear(2, 2)
    with pytest.raises(BadRequest, match=r"without torch\.compile"):
        refuse_mixing(compiled)


def test_no_sample_counts_for_more_than_the_bound() -> None:
    """One sample changes the sum by at most the clip norm, however large its gradient is."""
    torch.manual_seed(1)
    model = layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    inputs, targets = (
        torch.randn(SAMPLES, 6, dtype=torch.float64) * 100,
        torch.randint(0, CLASSES, (SAMPLES,)),
    )
    places = [(p, torch.empty_like(p)) for p in model.parameters()]
    books = Bookkeeping(model, F.cross_entropy, places, 0.5, False)
    books(inputs, targets, SAMPLES)
    whole = [g.clone() for _, g in places]
    for left_out in range(SAMPLES):
        rest = [i for i in range(SAMPLES) if i != left_out]
        books(inputs[rest], targets[rest], SAMPLES - 1)
        moved = (
            sum(float((a - g).square().sum()) for a, (_, g) in zip(whole, places, strict=True))
            ** 0.5
        )
        assert moved <= 0.5 * (1 + 1e-12)


class Centred(nn.Module):
    """Subtracts the mean over the places, so that the gradients of the places cancel."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).flatten(2) if x.dim() == 4 else self.layer(x).transpose(1, 2)
        return self.out(torch.tanh(h - h.mean(2, keepdim=True)).flatten(1))


@pytest.mark.parametrize("offset", [1e3, 1e4, 1e5])
@pytest.mark.parametrize("kind", ["few places", "many places", "convolution"])
def test_what_cancels_is_bounded_too(
    kind: str, offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths lose their digits where gradients cancel; such samples must still be clipped."""
    monkeypatch.setattr(convolution, "KEEP_BYTES", 0)
    for seed in range(5):
        torch.manual_seed(seed)
        if kind == "convolution":
            model, inputs = Centred(nn.Conv2d(2, 40, 3), 160), torch.randn(4, 2, 4, 4)
        elif kind == "few places":
            model, inputs = Centred(nn.Linear(64, 64), 512), torch.randn(4, 8, 64)
        else:
            model, inputs = Centred(nn.Linear(4, 4), 80), torch.randn(4, 20, 4)
        inputs[2] = inputs[2] * 1e-3 + offset
        places = [(p, torch.empty_like(p)) for p in model.parameters()]
        books, targets = (
            Bookkeeping(model, F.cross_entropy, places, 1.0, False),
            torch.randint(0, CLASSES, (4,)),
        )
        books(inputs, targets, 4)
        whole = [g.clone() for _, g in places]
        rest = [0, 1, 3]
        books(inputs[rest], targets[rest], 3)
        moved = (
            sum(
                float((a - g).double().square().sum())
                for a, (_, g) in zip(whole, places, strict=True)
            )
            ** 0.5
        )
        assert moved <= 1.001


def test_linear_layers_never_hold_one_gradient_per_sample() -> None:
    """With a batch of 64 and a layer of 4 MB, all gradients would take 256 MB; book-keeping takes a
    few MB.
    """
    from torch.profiler import ProfilerActivity, profile

    model = layers(nn.Linear(1000, 1000), nn.Linear(1000, 3))
    places = [(p, torch.empty_like(p)) for p in model.parameters()]
    books = Bookkeeping(model, F.cross_entropy, places, 1.0, False)
    inputs, targets = torch.randn(64, 1000), torch.randint(0, 3, (64,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        books(inputs, targets, 64)
    assert max(event.cpu_memory_usage for event in seen.events()) < 16 << 20


def test_notices_name_layers_without_a_rule() -> None:
    model = layers(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, CLASSES))
    books = Bookkeeping(
        model, F.cross_entropy, [(p, torch.empty_like(p)) for p in model.parameters()], 1.0, False
    )
    assert books.notices == [
        "privacy: no rule for 1 (PReLU): torch.func clips them, which is slower"
    ]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (layers(nn.Linear(6, 8), nn.BatchNorm1d(8)), "GroupNorm"),
        (layers(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "layer 1 .BatchNorm2d. mixes the samples"),
        (layers(nn.InstanceNorm1d(4, track_running_stats=True)), "track_running_stats=False"),
        (layers(nn.Embedding(4, 4, max_norm=1.0)), "max_norm"),
    ],
)
def test_layers_that_mix_samples_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        refuse_mixing(model)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0)) * 1.0


class Borrows(nn.Module):
    """A model that uses a layer's parameters outside that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.layer(x), self.layer.weight))


class MixesInTraining(Mixes):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.training else x)


class Faint(nn.Module):
    """A model that uses a layer's parameters elsewhere, with a small effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + 0.003 * F.linear(x, self.layer.weight)[:, :CLASSES]


@pytest.mark.parametrize(
    "model",
    [Mixes(), Borrows(), MixesInTraining(), Faint()],
    ids=["mixes", "borrows", "mixes in training", "faint"],
)
def test_what_mixes_samples_is_found_out_before_training(model: nn.Module) -> None:
    books = Bookkeeping(
        model, F.cross_entropy, [(p, torch.empty_like(p)) for p in model.parameters()], 1.0, False
    )
    with pytest.raises(BadRequest, match="mix"):
        books.try_out(torch.randn(8, 6), torch.randint(0, CLASSES, (8,)), 8)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(torch.relu(self.first(x)), 0.5, self.training))


def test_dropout_is_no_mixing() -> None:
    model = FunctionalDropout()
    books = Bookkeeping(
        model, F.cross_entropy, [(p, torch.empty_like(p)) for p in model.parameters()], 1.0, False
    )
    inputs = torch.randn(8, 6)
    books.try_out(inputs, torch.randint(0, CLASSES, (8,)), 8)
    assert not torch.equal(model(inputs), model(inputs))  # afterwards it drops out as before


class Adds(nn.Module):
    """A layer with a parameter of its own and an input that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x * self.scale + table.sum(0) * self.scale


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adds, self.out = Adds(), nn.Linear(6, CLASSES)
        self.register_buffer("table", torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.adds(x, self.table))


@pytest.mark.parametrize("samples", [4, 5, 6])
def test_what_all_samples_share_is_no_samples_own(samples: int) -> None:
    """A shared input is recognised also when the batch has the same length."""
    torch.manual_seed(0)
    model = Shares().double()
    places = [(p, torch.empty_like(p)) for p in model.parameters()]
    books = Bookkeeping(model, F.cross_entropy, places, 0.3, False)
    books.try_out(torch.randn(5, 6).double(), torch.randint(0, CLASSES, (5,)), 5)
    inputs, targets = torch.randn(samples, 6).double(), torch.randint(0, CLASSES, (samples,))
    expected = [(p, torch.empty_like(p)) for p in model.parameters()]
    Loop(model, F.cross_entropy, expected, 0.3, False)(inputs, targets, samples)
    books(inputs, targets, samples)
    assert_agree([g for _, g in expected], [g for _, g in places])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_losses_that_weigh_rows_are_refused(loss: nn.Module) -> None:
    with pytest.raises(BadRequest, match="mean over the rows"):
        refuse_unequal_loss(loss)


def test_a_loss_that_is_no_mean_over_rows_is_found_out() -> None:
    model = nn.Linear(6, CLASSES)

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 20.0]))

    books = Bookkeeping(
        model, weighted, [(p, torch.empty_like(p)) for p in model.parameters()], 1.0, False
    )
    with pytest.raises(BadRequest, match="mean over the rows"):
        books.try_out(torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), 8)


def test_targets_that_the_loss_leaves_out_are_refused_in_every_batch() -> None:
    """The eight rows of the trial have no ignored target, but a later row has one."""
    model = layers(nn.Linear(6, 3))
    # classes of one place: rows x classes x places
    outputs = nn.Sequential(model, nn.Unflatten(1, (3, 1)))
    clipper = Bookkeeping(
        outputs,
        F.cross_entropy,
        [(p, torch.empty_like(p)) for p in outputs.parameters()],
        1.0,
        False,
    )
    inputs, targets = torch.randn(8, 6), torch.zeros(8, 1, dtype=torch.int64)
    clipper.try_out(inputs, targets, 8)
    clipper(inputs, targets, 8)
    targets[5] = -100
    for refused in (clipper, clipper.try_out):
        with pytest.raises(BadRequest, match=r"a target is -100.*clipping=loop"):
            refused(inputs, targets, 8)


def test_a_sample_that_leaves_out_places_is_bounded_alone() -> None:
    """With `clipping=loop` the ignored targets of one sample do not change another."""
    model = nn.Linear(6, 3)
    places = [(p, torch.empty_like(p)) for p in model.parameters()]
    loop = Loop(
        model,
        lambda outputs, targets: F.cross_entropy(outputs.transpose(1, 2), targets),
        places,
        1.0,
        False,
    )
    inputs, targets = torch.randn(5, 4, 6), torch.randint(0, 3, (5, 4))
    targets[1, 2:] = -100

    def total(rows: int) -> Tensor:
        loop(inputs[:rows], targets[:rows], rows)
        return torch.cat([place.flatten() for _, place in places])

    assert float((total(5) - total(4)).norm()) <= 1.0 + 1e-6
    assert float((total(2) - total(1)).norm()) <= 1.0 + 1e-6


@pytest.mark.parametrize(
    ("loss", "targets"),
    [(nn.MSELoss(), torch.full((8, 1), -100)), (F.mse_loss, torch.full((8, 1), -100.0))],
)
def test_minus_hundred_is_a_number_like_any_other_where_nothing_is_left_out(
    loss: Loss, targets: Tensor
) -> None:
    model = layers(nn.Linear(6, 1))
    sums = [torch.empty_like(p) for p in model.parameters()]
    Bookkeeping(model, loss, list(zip(model.parameters(), sums, strict=True)), 1.0, False)(
        torch.randn(8, 6), targets, 8
    )
    assert all(bool(total.isfinite().all()) for total in sums)


@pytest.mark.parametrize("kind", [Loop, Bookkeeping])
def test_a_gradient_that_is_not_finite_is_refused(kind: type[Loop] | type[Bookkeeping]) -> None:
    """The loss is finite, but the slope of the root at zero is infinite."""
    model = layers(nn.Linear(6, 1, bias=False))
    nn.init.zeros_(next(model.parameters()))
    clipper = kind(
        model,
        lambda outputs, _: outputs.abs().sqrt().mean(),
        [(p, torch.empty_like(p)) for p in model.parameters()],
        1.0,
        False,
    )
    with pytest.raises(NotFinite, match="a sample's gradient is not finite"):
        clipper(torch.randn(4, 6), torch.zeros(4), 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_say_that_the_loop_can_do_them(kind: type[nn.RNNBase]) -> None:
    """The loop gives what autograd gives for each sample alone, clipped."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.read(x)[0][:, -1])  # type: ignore[no-any-return]

    model = Reads()
    places = [(p, torch.empty_like(p)) for p in model.parameters()]
    with pytest.raises(
        BadRequest,
        match=rf"layer read \({kind.__name__}\) returns several tensors.*use clipping=loop",
    ):
        Bookkeeping(model, F.cross_entropy, places, 1.0, False)
    inputs, targets = torch.randn(6, 7, 4), torch.randint(0, 3, (6,))
    Loop(model, F.cross_entropy, places, 0.3, False)(inputs, targets, 6)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(6):
        own = torch.autograd.grad(
            F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]), list(model.parameters())
        )
        length = float(sum(g.square().sum() for g in own)) ** 0.5
        for total, gradient in zip(sums, own, strict=True):
            total.add_(gradient, alpha=min(1.0, 0.3 / length))
    assert_agree(sums, [place for _, place in places])


def test_a_model_is_as_it_was_after_it_was_tried_out() -> None:
    model = layers(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    books = Bookkeeping(
        model, F.cross_entropy, [(p, torch.empty_like(p)) for p in model.parameters()], 1.0, False
    )
    before = torch.get_rng_state()
    books.try_out(
        torch.randn(8, 6, generator=torch.Generator()), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), 8
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize(
    ("model", "inputs", "says"),
    [
        (
            layers(nn.Flatten(0, 1), nn.Linear(6, 3)),
            torch.randn(4, 2, 6),
            r"layer 1 returns \(8, 3\) for 4 samples.*clipping=loop",
        ),
        (
            layers(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)),
            torch.randn(4, 5, 8),
            "dropout",
        ),
    ],
)
def test_layers_that_cannot_be_done_say_what_to_do(
    model: nn.Module, inputs: Tensor, says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        Bookkeeping(
            model,
            F.cross_entropy,
            [(p, torch.empty_like(p)) for p in model.parameters()],
            1.0,
            False,
        )(inputs, torch.zeros(4, dtype=torch.int64), 4)


@pytest.mark.parametrize("bias", [True, False])
@given(
    rows=st.integers(1, 70), into=st.integers(1, 90), out=st.integers(1, 70), turned=st.booleans()
)
@settings(max_examples=40)
def test_compiled_rows_are_the_same_as_by_torch(
    bias: bool, rows: int, into: int, out: int, turned: bool
) -> None:
    """The loops in C do not handle gradients that are not contiguous; the result is the same."""
    if native.loops() is None:
        pytest.skip("no C compiler")
    module = nn.Linear(into, out, bias=bias)
    a, factors = torch.randn(rows, into), torch.rand(rows)
    g = torch.randn(out, rows).t() if turned else torch.randn(rows, out)
    found = []
    for quick in (True, False):
        places = {n: torch.full_like(p, torch.nan) for n, p in module.named_parameters()}
        layer, call = Linear("", module, places), Call((a,), {}, None)
        call.grads = g
        with pytest.MonkeyPatch.context() as patch:
            if not quick:
                patch.setattr(rules, "loops_for", lambda *_: None)
            squares = layer.book([call])
            layer.add_up(factors)
        found.append([squares, *places.values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [lambda out: torch.cat([out, out], 1), lambda out: out[:, :2]])
def test_a_hook_that_changes_a_layers_shape_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(4, CLASSES))
    model[0].register_forward_hook(lambda module, inputs, out: change(out))
    places = [(p, torch.zeros_like(p)) for p in model.parameters()]
    with pytest.raises(
        BadRequest, match=r"changes the shape of the output of layer 0: use clipping=loop"
    ):
        Bookkeeping(model, F.cross_entropy, places, 1.0, False)(
            torch.randn(5, 4), torch.zeros(5, dtype=torch.long), 5
        )
