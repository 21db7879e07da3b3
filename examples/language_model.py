"""A small language model. Sentences have different lengths, so workers are weighted by tokens
instead of rows.

paceline launch -n 2 examples/language_model.py
"""

import torch
from torch import nn

import paceline

TEXT = """in a paceline the riders take turns at the front
how often they look at each other is the whole art
who is in front breaks the wind for all the others
who is behind rests and sees only the wheel ahead
when the front rider tires the line rotates and nobody stops"""
LETTERS = sorted(set(TEXT))
SENTENCES = [[LETTERS.index(c) for c in line + "\n"] for line in TEXT.splitlines()] * 8
PAD = -100  # ignored by cross_entropy


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = torch.full((64,), PAD)
        line[: len(SENTENCES[index])] = torch.tensor(SENTENCES[index])
        return line[:-1].clamp(min=0), line[1:]


class LanguageModel(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.recur = (
            nn.Embedding(len(LETTERS), width),
            nn.GRU(width, width, batch_first=True),
        )
        self.read = nn.Linear(width, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.read(self.recur(self.embed(letters))[0])


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with paceline.join("allreduce", check_every=10) as pace:
    model, optimizer, batches = pace.prepare(model, optimizer, Sentences(), batch_size=4)
    for epoch in range(12):
        total = count = 0.0
        for x, y in batches:
            tokens = int((y != PAD).sum())
            loss = nn.functional.cross_entropy(
                model(x).flatten(0, 1), y.flatten(), ignore_index=PAD
            )
            pace.step(loss, weight=tokens)  # the loss is a mean over tokens
            total, count = total + loss.item() * tokens, count + tokens
        if pace.leads and epoch % 4 == 3:
            print(f"epoch {epoch + 1}: {total / count:.3f} nats per letter")
        if pace.any(total / count < 0.05):  # all workers stop in the same epoch
            break
