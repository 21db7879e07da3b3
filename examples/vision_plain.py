"""A small CNN that tells shapes in noisy pictures apart: in plain PyTorch, and with Paceline.

python examples/vision_plain.py                               one process
paceline launch -n 2 examples/vision_paceline.py --batch 16   two workers, half the batch each

Both evaluate and save under runs/vision after each epoch; --resume goes on from the last one.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default="runs/vision")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--decay-epochs", type=int, default=8, help="length of the LR schedule")
parser.add_argument("--images", type=int, default=2048)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--loaders", type=int, default=2, help="processes that read images")
parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
args = parser.parse_args()
SIZE, SHAPES = 20, ("disk", "ring", "square", "cross")


class Shapes(Dataset):
    """Pictures of one shape each, drawn from their number; `augment` shifts and mirrors them."""

    def __init__(self, first, count, augment):
        self.first, self.count, self.augment = first, count, augment

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(len(SHAPES), (), generator=random))
        x, y, radius = (torch.rand(3, generator=random) * torch.tensor([4, 4, 3])).tolist()
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        down, right, radius = (rows - 8 - y).abs(), (columns - 8 - x).abs(), radius + 4
        distance = (down**2 + right**2).sqrt()
        inside = {
            "disk": distance < radius,
            "ring": (distance < radius) & (distance > radius / 2),
            "square": torch.maximum(down, right) < radius,
            "cross": (torch.minimum(down, right) < 1.5) & (torch.maximum(down, right) < radius),
        }[SHAPES[label]]
        image = inside.float() + 0.3 * torch.randn(SIZE, SIZE, generator=random)
        return self.changed(image)[None], label

    def changed(self, image):
        if not self.augment:
            return image
        if torch.rand(()) < 0.5:
            image = image.flip(1)
        shift = torch.randint(-3, 4, (2,)).tolist()
        return image.roll(shift, dims=(0, 1))


def stage(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_set = Shapes(0, args.images, args.augment)
tests = Shapes(args.images, args.images // 4, augment=False)
order = torch.Generator().manual_seed(2)
train = DataLoader(
    train_set,
    args.batch,
    shuffle=True,
    drop_last=True,
    num_workers=args.loaders,
    generator=order,
)
test = DataLoader(tests, 64, num_workers=args.loaders)

width = args.width
model = nn.Sequential(
    stage(1, width), stage(width, 2 * width), stage(2 * width, 4 * width),
    nn.Flatten(), nn.Linear(4 * width * (SIZE // 8) ** 2, len(SHAPES)),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.decay_epochs)

start = 0
args.out.mkdir(parents=True, exist_ok=True)
if args.resume:
    state = torch.load(args.out / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    order.set_state(state["order"])
    scheduler.load_state_dict(state["scheduler"])
    start = state["epoch"]

for epoch in range(start, args.epochs):
    model.train()
    total = 0.0
    for x, y in train:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / len(train)
    scheduler.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in test:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    print(f"epoch {epoch}: loss {total:.6f}, {right}/{len(tests)} right")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scheduler": scheduler.state_dict(), "order": order.get_state()}
    torch.save({**state, "epoch": epoch + 1}, args.out / "checkpoint.pt")
