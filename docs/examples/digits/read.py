"""Read digits with the weights of the best configuration, and show those that it takes for others."""

import json
from pathlib import Path

import torch
from digits import Digits

import slurmgpu

SHADES = " .:-=+*%@"

best = json.loads(Path("runs/digits/report.json").read_text())["summary"]
with slurmgpu.open("runs/digits/merged.h5") as merged:
    config = merged["config"][best["best_configuration"]]

user = Digits(width=config["width"])
model = user.model()
model.load_state_dict(torch.load(f"runs/digits/{best['best_weights']}", weights_only=True))
model.eval()

images, labels = user.data("test").tensors
with torch.no_grad():
    guesses = model(images).argmax(1)
wrong = (guesses != labels).nonzero().flatten().tolist()
print(
    f"width {config['width']}, lr {config['lr']}: {len(labels) - len(wrong)} of {len(labels)} digits of the test split"
)
for number in wrong[:3]:
    print(f"\na {labels[number]}, read as a {guesses[number]}")
    for row in images[number, 0]:
        print("  ", "".join(2 * SHADES[int(value * 8)] for value in row).rstrip())
