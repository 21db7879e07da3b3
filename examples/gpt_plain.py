"""A small GPT on the bytes of a text file: in plain PyTorch, and the same with Paceline.

python examples/gpt_plain.py                                  one process
paceline launch -n 2 examples/gpt_paceline.py --batch 4       two workers, half the batch each

Both evaluate and save under runs/gpt as they go; --resume goes on from the last checkpoint.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, default=argparse.__file__, help="any file; its bytes")
parser.add_argument("--out", type=Path, default="runs/gpt")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--decay-steps", type=int, default=300, help="length of the cosine")
parser.add_argument("--eval-every", type=int, default=50)
parser.add_argument("--batch", type=int, default=8, help="windows in a micro-batch")
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--block", type=int, default=64, help="bytes in a window")
args = parser.parse_args()
HEADS, VOCABULARY = 4, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = args.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(args.width), Attention()
        self.before_mlp = nn.LayerNorm(args.width)
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.before_attention(x)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.block, args.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)
        self.apply(self.initialise)
        self.head.weight = self.tokens.weight  # tied

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Windows(Dataset):
    def __init__(self, text):
        self.text = text

    def __len__(self):
        return (len(self.text) - 1) // args.block

    def __getitem__(self, index):
        window = self.text[index * args.block : (index + 1) * args.block + 1].long()
        return window[:-1], window[1:]


def learning_rate(step):
    """A linear warm-up, then half a cosine down to a tenth."""
    warmup = args.decay_steps // 20 + 1
    if step < warmup:
        return args.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, args.decay_steps - warmup))
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def evaluate():
    model.eval()
    losses = []
    for x, y in validation:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            losses.append(model(x.to(device), y.to(device)).item())
    model.train()
    return sum(losses) / len(losses)


def endless(batches):
    while True:
        yield from batches


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
cut = len(text) * 9 // 10
order = torch.Generator().manual_seed(2)
train = DataLoader(Windows(text[:cut]), args.batch, shuffle=True, drop_last=True, generator=order)
validation = DataLoader(Windows(text[cut:]), 64)

model = GPT().to(device)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))

start = 0
args.out.mkdir(parents=True, exist_ok=True)
if args.resume:
    state = torch.load(args.out / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]

batches = endless(train)
for step in range(start, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    total = 0.0
    for _ in range(args.accumulate):
        x, y = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = model(x.to(device), y.to(device)) / args.accumulate
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    validated = ""
    if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
        validated = f", validation loss {evaluate():.6f}"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, args.out / "checkpoint.pt")
    print(f"step {step + 1}: loss {total:.6f}{validated}")
