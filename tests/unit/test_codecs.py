"""The laws of codecs: error feedback loses nothing, unbiased codecs are exact on average, messages
have the predicted length, and all ranks end with the same bits.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.codecs.packing import blocks, sparse
from paceline.collectives.algorithms.stepwise import counts
from paceline.collectives.base import SCHEDULES, choose, schedule_of
from paceline.collectives.execute import Executor
from paceline.common.seeding import generator
from paceline.errors import BadRequest, NotFinite
from paceline.registry import codecs
from paceline.transport.inproc import Hub, InprocTransport
from paceline.transport.metered import Metered
from paceline.types import Layout, Slot

LOSSY = [name for name in codecs.names() if name != "none"]
CHOICES = [
    *LOSSY,
    "qsgd:bits=2",
    "qsgd:bits=8",
    "topk:ratio=0.2",
    "topk:ratio=0.1,warmup=4",
    "int8:block=16",
    "powersgd:rank=1",
]
UNBIASED = [c for c in CHOICES if not build_codec(c).biased]


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    slots, at = [], 0
    for index, shape in enumerate(shapes):
        n = math.prod(shape)
        slots.append(
            Slot(f"tensor{index}", shape, torch.empty(shape, device="meta").stride(), at, n, 0)
        )
        at += n
    return Layout(tuple(slots))


MODEL = layout_of((20, 3, 5, 5), (20,), (30, 40), (30,), ())
# cnn-wide on MNIST
WIDE = layout_of(
    (128, 1, 5, 5), (128,), (256, 128, 5, 5), (256,), (512, 1024), (512,), (10, 512), (10,)
)
SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (3, 5), (8, 9), (4, 2, 3, 3), (0,), (600,)]),
    min_size=0,
    max_size=4,
)


def values_of(layout: Layout, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def started(codec: Codec, layout: Layout, rank: int = 0) -> dict[str, object]:
    return codec.start(layout, generator(1, "own", rank), generator(1, "shared"))


def trip(
    codec: Codec, values: Tensor, layout: Layout, state: dict[str, object]
) -> tuple[Tensor, int]:
    """Encode and decode; return the decoded values and the bytes used."""
    message = torch.zeros(codec.message_bytes(layout), dtype=torch.uint8)
    used = codec.encode(values, layout, message, state)
    arrived = torch.full_like(values, 77.0)
    codec.decode(message[:used], layout, arrived)
    return arrived, used


# --- one message


@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=15)
@given(shapes=SHAPES, seed=st.integers(0, 1000))
def test_sent_and_remembered_is_the_original(
    choice: str, shapes: list[tuple[int, ...]], seed: int
) -> None:
    """Over several messages, the sum of the decoded values plus the residual is the input's sum."""
    layout = layout_of(*shapes)
    codec = build_codec(f"{choice}{',' if ':' in choice else ':'}feedback=true")
    state = started(codec, layout)
    given_in, arrived = torch.zeros(layout.numel), torch.zeros(layout.numel)
    for step in range(4):
        values = values_of(layout, seed + step)
        kept = values.clone()
        out, used = trip(codec, values, layout, state)
        assert torch.equal(values, kept)
        assert used <= codec.message_bytes(layout)
        given_in += values
        arrived += out
    assert torch.allclose(arrived + state["error"], given_in, atol=1e-4)


@pytest.mark.parametrize("choice", UNBIASED)
def test_unbiased_codecs_are_right_on_average(choice: str) -> None:
    """The mean over many messages is within six standard errors (chance: one in 10^9) plus plain
    rounding.
    """
    codec, layout = build_codec(choice), layout_of((6, 50))
    values, state, rounds = values_of(layout), started(build_codec(choice), layout), 2000
    arrived = torch.stack([trip(codec, values, layout, state)[0] for _ in range(rounds)]).double()
    error = (arrived.mean(0) - values).abs()
    largest = float(values.abs().max())
    rounding = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}.get(
        choice.split(":")[0], 1e-4
    ) * largest
    assert bool((error <= 6 * arrived.std(0) / rounds**0.5 + rounding).all())
    if choice.startswith("qsgd"):  # it does draw
        assert float(arrived.std(0).max()) > 0


def test_ratios_are_as_declared() -> None:
    """One message for cnn-wide, counted with everything, against float32."""
    limits = {
        "sign": 30,
        "topk:ratio=0.01": 45,
        "powersgd:rank=2": 40,
        "int8": 3.9,
        "qsgd:bits=4": 7.5,
        "fp16": 1.99,
    }
    for choice, least in limits.items():
        codec = build_codec(choice)
        used = trip(codec, values_of(WIDE), WIDE, started(codec, WIDE))[1]
        assert used == codec.message_bytes(WIDE)
        assert 4 * WIDE.numel / used >= least, choice


@pytest.mark.parametrize("choice", CHOICES)
def test_the_same_seed_gives_the_same_bytes(choice: str) -> None:
    def messages() -> list[Tensor]:
        codec = build_codec(choice)
        state, found = started(codec, MODEL), []
        for step in range(3):
            message = torch.zeros(codec.message_bytes(MODEL), dtype=torch.uint8)
            used = codec.encode(values_of(MODEL, step), MODEL, message, state)
            found.append(message[:used])
        return found

    first, second = messages(), messages()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(choice: str, bad: float) -> None:
    codec = build_codec(choice)
    values = values_of(MODEL)
    values[7] = bad
    with pytest.raises(NotFinite, match=rf"codec {codec.name}: .* NaN or infinity"):
        trip(codec, values, MODEL, started(codec, MODEL))


def test_sixteen_bits_overflow_loudly() -> None:
    codec = build_codec("fp16")
    with pytest.raises(NotFinite):
        trip(codec, torch.tensor([1e6]), layout_of((1,)), {})
    assert (
        trip(build_codec("bf16"), torch.tensor([2.0**20]), layout_of((1,)), {})[0].item() == 2.0**20
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats_travel_too(choice: str, dtype: torch.dtype) -> None:
    codec = build_codec(choice)
    values = values_of(MODEL, dtype=torch.float32).to(dtype)
    arrived, _ = trip(codec, values, MODEL, started(codec, MODEL))
    assert arrived.dtype == dtype
    assert float(arrived.abs().max()) > 0


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("topk:ratio=0", "must be above 0 and at most 1"),
        ("topk:ratio=2", "must be above 0 and at most 1"),
        ("topk:warmup=-1", "0 or more steps"),
        ("randomk:ratio=0", "must be above 0 and at most 1"),
        ("threshold:times=-1", "0 or more"),
        ("threshold:most=0", "must be above 0 and at most 1"),
        ("qsgd:bits=3", "2, 4 or 8"),
        ("qsgd:block=3", "multiple of 2"),
        ("int8:block=0", "1 or more"),
        ("powersgd:rank=0", "1 or more"),
    ],
)
def test_impossible_options_are_refused(choice: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        build_codec(choice)


def test_a_rank_larger_than_every_matrix_is_refused() -> None:
    with pytest.raises(
        BadRequest, match=r"rank=31 is larger than every matrix .* tensor2, is 30 x 40"
    ):
        build_codec("powersgd:rank=31").fits(MODEL)
    build_codec("powersgd:rank=25").fits(MODEL)
    # It fits one matrix. The others would not get smaller and are sent uncompressed.
    assert build_codec("powersgd:rank=25").message_bytes(MODEL)


# --- packing


@given(st.integers(0, 300), st.sampled_from([2, 4]), st.integers(0, 100))
def test_packed_numbers_come_back(numel: int, bits: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed, back = (
        torch.zeros(blocks.packed_bytes(numel, bits), dtype=torch.uint8),
        torch.zeros_like(codes),
    )
    blocks.pack(codes, bits, packed)
    blocks.unpack(packed, bits, back)
    assert packed.numel() == -(-numel * bits // 8)
    assert torch.equal(codes, back)


@given(st.integers(1, 300_000), st.floats(0.0001, 1.0), st.integers(0, 50))
@settings(max_examples=30)
def test_the_largest_are_found_without_sorting(numel: int, ratio: float, seed: int) -> None:
    values = values_of(layout_of((numel,)), seed)
    if seed % 3 == 0:
        values.clamp_(-0.5, 0.5)  # many equal ones
    if seed % 5 == 0:
        values[: numel // 2] = 0
    count = max(1, int(ratio * numel))
    found = sparse.largest(values, count, torch.empty(numel))
    assert found.numel() == count == found.unique().numel()
    assert torch.equal(found, found.sort().values)
    expected = values.abs().topk(count).values.sort().values
    assert torch.equal(values[found].abs().sort().values, expected)


def test_sparse_messages_take_six_bytes_a_number() -> None:
    values = values_of(layout_of((200_000,)))
    indices = torch.tensor([0, 1, 65_535, 65_536, 131_071, 131_072, 199_999])
    message = torch.zeros(sparse.message_bytes(200_000, 7), dtype=torch.uint8)
    # 4 blocks of 4 bytes, 7 of 6, rounded to 8
    assert sparse.write(values, indices, message) == message.numel() == 64
    back, chosen = sparse.read(message, 200_000)
    assert torch.equal(back, indices)
    assert torch.equal(chosen, values[indices])


# --- all ranks together


def reduced(
    choice: str, ranks: int, layout: Layout, collective: str = "ring", steps: int = 3, seed: int = 0
) -> list[list[Tensor]]:
    """Each rank's buffer after each step; every step has new values."""

    def body(transport: InprocTransport) -> list[Tensor]:
        codec, chosen = build_codec(choice), choose(collective, transport)
        state, found = started(codec, layout, transport.rank), []
        for step in range(steps):
            buffer = values_of(layout, 100 * step + transport.rank + seed)
            codec.reduce(buffer, layout, chosen, state)
            found.append(buffer)
        return found

    results = Hub(ranks, seed).run(body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_ranks_end_with_the_same_bits(choice: str, ranks: int) -> None:
    found = reduced(choice, ranks, MODEL)
    for rank in range(1, ranks):
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[rank], strict=True))


@pytest.mark.parametrize("choice", ["none", "fp16", "bf16", "int8", "qsgd:bits=8"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fine_codecs_are_nearly_the_sum(choice: str, ranks: int) -> None:
    exact = sum(values_of(MODEL, rank) for rank in range(ranks))
    close = reduced(choice, ranks, MODEL, steps=1)[0][0]
    assert float((close - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(
    "choice", ["sign", "topk:ratio=0.1", "threshold", "randomk:ratio=0.3", "powersgd:rank=2"]
)
def test_nothing_is_lost_for_good(choice: str) -> None:
    """The sum of all inputs = the sum of all results + the residuals of all ranks."""

    def body(transport: InprocTransport) -> tuple[Tensor, Tensor]:
        codec, ring = build_codec(choice), choose("ring", transport)
        state, arrived = started(codec, MODEL, transport.rank), torch.zeros(MODEL.numel)
        for step in range(6):
            buffer = values_of(MODEL, 100 * step + transport.rank)
            codec.reduce(buffer, MODEL, ring, state)
            arrived += buffer
        return arrived, state["error"]

    results = Hub(3).run(body)
    given_in = sum(values_of(MODEL, 100 * step + rank) for step in range(6) for rank in range(3))
    assert torch.allclose(results[0][0] + sum(error for _, error in results), given_in, atol=1e-4)


@pytest.mark.parametrize("collective", [n for n in SCHEDULES if n != "ring-reduce"])
@settings(max_examples=10)
@given(ranks=st.integers(2, 6), length=st.integers(0, 200), seed=st.integers(0, 100))
def test_encoded_hops_follow_any_schedule(
    collective: str, ranks: int, length: int, seed: int
) -> None:
    layout = layout_of((length,))
    found = reduced("int8:block=16", ranks, layout, collective, steps=2, seed=seed)
    exact = sum(values_of(layout, rank + seed) for rank in range(ranks))
    assert all(torch.equal(f[0], found[0][0]) for f in found)
    if length:
        assert float((found[0][0] - exact).abs().max()) < 0.05 * ranks + 0.1


@pytest.mark.parametrize("choice", [c for c in CHOICES if not build_codec(c).varies])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_metered_are_bytes_predicted(choice: str, ranks: int) -> None:
    """Gather: P-1 messages per rank; linear: a ring of sums; hop: a ring of encoded chunks."""
    kind, one = build_codec(choice).kind, build_codec(choice).message_bytes(MODEL)

    def body(transport: InprocTransport) -> int:
        metered = Metered(transport)
        codec, state = build_codec(choice), {}
        state = started(codec, MODEL, transport.rank)
        codec.reduce(values_of(MODEL, transport.rank), MODEL, choose("ring", metered), state)
        return metered.meter.totals["setup"].sent_bytes

    sent = Hub(ranks).run(body)
    if kind == "gather":
        assert sent == [(ranks - 1) * one] * ranks
    else:  # no rank writes a whole message: it holds no seed, and each chunk is aligned
        whole = one - 8 if choice == "randomk" else one
        assert sum(sent) == pytest.approx(2 * (ranks - 1) * whole, rel=0.02)


def test_varying_messages_send_what_they_use() -> None:
    def body(transport: InprocTransport) -> tuple[int, int]:
        metered = Metered(transport)
        codec = build_codec("threshold")
        values = values_of(MODEL, transport.rank)
        alone = trip(build_codec("threshold"), values, MODEL, started(codec, MODEL))[1]
        codec.reduce(values, MODEL, choose("ring", metered), started(codec, MODEL))
        lengths = sum(
            t.sent_bytes for (_, kind, _), t in metered.meter.tallies.items() if kind == "send"
        )
        return alone, lengths

    for alone, sent in Hub(3).run(body):
        assert sent == 2 * alone


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_half_a_ring_through_a_hop_codec(codec: str) -> None:
    """As in stepwise, every rank ends with about the sum over the ranks that each chunk visited."""
    schedule = schedule_of("stepwise", 3)

    def body(transport: InprocTransport) -> Tensor:
        buffer = values_of(MODEL, transport.rank)
        Executor(schedule, transport, wire=build_codec(codec).wire).run(buffer)
        return buffer

    exact = Hub(3).run(lambda t: _run_exactly(schedule, t))
    for rank, (coded, plain) in enumerate(zip(Hub(3).run(body), exact, strict=True)):
        assert sorted(counts(schedule, rank)) == [1, 2, 3]
        assert float((coded - plain).norm() / plain.norm()) < 0.02


def _run_exactly(schedule, transport: InprocTransport) -> Tensor:
    from paceline.collectives.execute import Executor

    buffer = values_of(MODEL, transport.rank)
    Executor(schedule, transport).run(buffer)
    return buffer


def test_times_are_counted() -> None:
    codec = build_codec("sign")
    Hub(1).run(
        lambda t: codec.reduce(values_of(WIDE), WIDE, choose("ring", t), started(codec, WIDE))
    )
    encode, decode = codec.timer.taken()
    assert encode > 0
    assert decode > 0
    assert codec.timer.taken() == (0.0, 0.0)


def test_many_small_halves_are_not_infinity() -> None:
    layout = layout_of((400_000,))
    values = torch.full((400_000,), 0.5, dtype=torch.float16)
    for choice in ("topk", "randomk", "threshold"):
        codec = build_codec(choice)
        arrived, _ = trip(codec, values, layout, started(codec, layout))
        # Each number has arrived unchanged, or not yet.
        assert set(arrived.unique().tolist()) <= {0.0, 0.5}, choice


def test_a_copy_of_a_codec_has_memory_of_its_own() -> None:
    codec = build_codec("topk")
    other = copy.deepcopy(codec)
    assert other is not codec
    assert other.plain is not codec.plain
    assert other.plain.scratch is not codec.plain.scratch
