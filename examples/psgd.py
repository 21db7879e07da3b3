"""PSGD on MNIST over MPI: every rank trains the network alone on its own part of the data, and the
weights are averaged once, at the end (Zinkevich et al., "Parallelized SGD", 2010).

    pip install 'paceline[mpi]'             # mpi4py and Open MPI
    paceline data fetch mnist               # without it the built-in images of clothes are used
    for P in 1 2 3 4 5; do mpirun --oversubscribe -n $P python examples/psgd.py; done

    mpirun -n 2 python examples/psgd.py --epochs 1 --steps 20      # a quick look

Everything is written out here. The same training, measured, with a report: `paceline study
studies/psgd.toml`, or `paceline train --data mnist --strategy psgd --transport mpi --workers 2`.
"""

import argparse
import copy
import time

import torch
from torch import nn

import paceline
from paceline.errors import DataUnavailable

BATCH = 64  # per rank: with P ranks each makes 1/P of the steps


class Net(nn.Module):
    """Two convolutions and two linear layers, 22,154 parameters: Paceline's `cnn`."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5)  # 28 x 28 -> 24 x 24
        self.conv2 = nn.Conv2d(16, 32, 5)  # 12 x 12 -> 8 x 8
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x), 2).relu()
        x = nn.functional.max_pool2d(self.conv2(x), 2).relu()
        x = nn.functional.max_pool2d(self.dropout(x), 2)
        x = self.fc1(x.view(-1, 32 * 2 * 2)).relu()
        return self.fc2(x)


def load(rank):
    """Return the training and the test set: MNIST, or what is built in."""
    try:
        return paceline.load_data("mnist")
    except DataUnavailable:
        if rank == 0:
            print("MNIST is not here (paceline data fetch mnist): fashion-mini is used instead.")
        return paceline.load_data("fashion-mini")


def train(model, data, mine, epochs, most_steps):
    """Train on the samples `mine`, in a new random order each epoch; return the steps made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    steps = 0
    model.train()
    for _ in range(epochs):
        shuffled = mine[torch.randperm(len(mine))]
        for indices in shuffled.split(BATCH)[: most_steps or None]:
            x, y = data.batch(indices)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    return steps


def average(model, comm, share):
    """w <- the sum over the ranks of share * w, where share is n / N of the rank's samples."""
    from mpi4py import MPI

    with torch.no_grad():
        for weights in model.parameters():
            own = (share * weights).contiguous().numpy()
            comm.Allreduce(MPI.IN_PLACE, own, MPI.SUM)
            weights.copy_(torch.from_numpy(own))


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    x, y = data.batch(torch.arange(len(data)))
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    from mpi4py import MPI

    options = argparse.ArgumentParser(description="PSGD on MNIST; start it with mpirun")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--steps", type=int, default=0, help="at most so many in an epoch")
    given = options.parse_args()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    torch.set_num_threads(1)

    train_set, test_set = load(rank)
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = Net()
    order = torch.randperm(len(train_set))  # the same on all ranks
    mine = order[rank::size]
    torch.manual_seed(1 + rank)  # from here on each rank has its own randomness

    comm.Barrier()
    began = time.perf_counter()
    steps = train(model, train_set, mine, given.epochs, given.steps)
    alone = copy.deepcopy(model)
    average(model, comm, len(mine) / len(train_set))
    seconds = time.perf_counter() - began  # Allreduce waits for the slowest rank
    if rank == 0:
        print(
            f"P = {size}: {seconds:.2f} s, {steps} steps per rank, accuracy"
            f" {100 * accuracy(model, test_set):.1f}% (rank 0 alone:"
            f" {100 * accuracy(alone, test_set):.1f}%)"
        )


if __name__ == "__main__":
    main()
