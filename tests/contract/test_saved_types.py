"""Models with dtypes that safetensors may not know are saved, or refused before the first step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import weights_distance
from torch import Tensor, nn

from paceline import Run
from paceline.errors import BadRequest, DataCorrupt
from paceline.record import checkpoint

RunInproc = Callable[..., Run]


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128).to(dtype))
        self.register_buffer("phase", torch.ones((), dtype=dtype))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.weight.dtype) @ self.weight * self.phase).abs().float())


@pytest.mark.parametrize(
    ("strategy", "workers"), [("serial", 1), ("allreduce", 2), ("local-sgd:every=2", 2)]
)
def test_a_complex128_model_is_saved_and_resumed(
    run_inproc: RunInproc, tmp_path: Path, strategy: str, workers: int
) -> None:
    options = {"model": Complex, "strategy": strategy, "workers": workers}
    whole = run_inproc(**options, steps=6)
    assert whole.weights["weight"].dtype is torch.complex128
    assert whole.weights["phase"].dtype is torch.complex128
    assert whole.weights["phase"].shape == ()
    assert whole.model.weight.dtype is torch.complex128
    run_inproc(**options, steps=4, checkpoint_every=2, out=str(tmp_path / "parts"))
    parts = run_inproc(
        **options, steps=6, out=str(tmp_path / "parts"), resume=str(tmp_path / "parts")
    )
    assert (
        weights_distance(
            {"w": torch.view_as_real(whole.weights["weight"])},
            {"w": torch.view_as_real(parts.weights["weight"])},
        )
        < 1e-12
    )


def test_distances_between_complex_weights_have_both_parts(run_inproc: RunInproc) -> None:
    """The distance of replicas and the test of convergence keep the imaginary parts; dropping one
    would be a warning, and warnings are errors.
    """
    options = {"model": Complex, "strategy": "local-sgd:every=3", "workers": 2}
    run = run_inproc(**options, epochs=2, until_converged=1e-9)
    assert run.record["status"] == "completed"
    assert run.record["workers"][0]["replica_distance_max"] > 0


def test_weights_of_every_type_come_back(tmp_path: Path) -> None:
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.bool,
        torch.uint16,
    )
    state = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    state["conjugate"] = (torch.arange(3) * (1 + 2j)).to(torch.complex128).conj()
    state["empty"] = torch.zeros(0, 3, dtype=torch.complex128)
    checkpoint.save_weights(tmp_path / "w", state)
    back = checkpoint.load_weights(tmp_path / "w")
    assert {k: v.dtype for k, v in back.items()} == {k: v.dtype for k, v in state.items()}
    assert all(torch.equal(back[k], state[k]) for k in state)
    # what other programs see: real and imaginary parts
    plain = load_file(tmp_path / "w")["torch.complex128"]
    assert (plain.dtype, plain.shape) == (torch.float64, (2, 3, 2))


def test_a_damaged_list_of_complex_weights_is_one_sentence(tmp_path: Path) -> None:
    for said in ("{", "[1]", '["nosuch"]', '["x"]', "7"):
        save_file({"x": torch.zeros(3)}, tmp_path / "w", {"complex128": said})
        with pytest.raises(DataCorrupt, match="cannot be read"):
            checkpoint.load_weights(tmp_path / "w")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_type_that_cannot_be_saved_is_refused_before_the_first_step(
    run_inproc: RunInproc,
) -> None:
    stepped: list[int] = []

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 3)
            self.register_buffer("table", torch.zeros(2, dtype=torch.complex32))

        def forward(self, x: Tensor) -> Tensor:
            stepped.append(1)
            return self.last(x)

    with pytest.raises(
        BadRequest,
        match=r"table is torch\.complex32, which cannot be saved.*\.to\(torch\.complex64\)",
    ):
        run_inproc(model=Half, steps=1)
    assert not stepped
