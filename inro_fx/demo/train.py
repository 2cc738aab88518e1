"""Trains the model of the demo and writes ``digits.safetensors`` beside this file (scikit-learn must be installed).

    python -m inro_fx.demo.train
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from . import DigitsTransformer, accuracy

EPOCHS, BATCH = 30, 64


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.4, random_state=0, stratify=labels)
    pixels, digits = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    model = DigitsTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=EPOCHS * -(-len(train) // BATCH))
    for _ in range(EPOCHS):
        for batch in torch.tensor(train)[torch.randperm(len(train))].split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    print(f"test accuracy {accuracy(model, pixels[test], digits[test]):.1%} of {len(test)} images")
    save_file({**model.state_dict(), "test.images": torch.tensor(images[test]).to(torch.uint8),
               "test.labels": digits[test].to(torch.uint8)}, Path(__file__).with_name("digits.safetensors"))


if __name__ == "__main__":
    main()
