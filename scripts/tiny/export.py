"""Writes the trained weights as a checkpoint in the released layout: `python -m headrace.scripts.tiny.export`."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ...model.checkpoint import Checkpoint
from ...model.checkpoint_save import save_checkpoint
from . import drafter
from .quantise import round_to_storage

CHECKPOINT = Path("configs/checkpoints/tiny-v41")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def released_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked training weights -> one tensor per released name; `bias_vl` is a copy of `bias` (no image was seen)."""
    tensors = {}
    for name, weight in weights.items():
        weight = weight.detach().float()
        if ".ffn.experts." in name:
            prefix, part = name.rsplit(".", 1)
            tensors |= {
                f"{prefix}.{expert}.{part}.weight": matrix.clone()
                for expert, matrix in enumerate(weight)
            }
        else:
            tensors[name] = weight.clone()
        if name.endswith("ffn.gate.bias"):
            tensors[f"{name}_vl"] = weight.clone()
    return tensors


def stacked_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The inverse of `released_tensors`: fp32 weights of a checkpoint by training name, as it stores them."""
    checkpoint = Checkpoint(directory)
    weights: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name in checkpoint.specs:
        if ".ffn.experts." in name:
            prefix, expert, part, _ = name.rsplit(".", 3)
            experts.setdefault(f"{prefix}.{part}", {})[int(expert)] = checkpoint.tensor(name)
        elif not name.endswith("bias_vl"):
            weights[name] = checkpoint.tensor(name)
    return weights | {
        name: torch.stack([members[i] for i in sorted(members)])
        for name, members in experts.items()
    }


def export(weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Replaces the weights in `directory`; its config.json and tokenizer stay."""
    config = json.loads((directory / "config.json").read_text())
    tensors = released_tensors(weights)
    with tempfile.TemporaryDirectory(dir=directory.parent) as partial:
        save_checkpoint(partial, config, tensors)
        for old in (*directory.glob("*.safetensors"), *directory.glob("*.index.json")):
            old.unlink()
        for file in Path(partial).iterdir():
            if file.name != "config.json":
                file.chmod(0o644)
                shutil.move(file, directory / file.name)


def export_drafter(weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Replaces the `mtp.*` weights in `directory`; every other tensor keeps its stored bytes."""
    config = json.loads((directory / "config.json").read_text())
    everything = released_tensors(stacked_weights(directory) | weights)
    with tempfile.TemporaryDirectory(dir=directory.parent) as partial:
        save_checkpoint(partial, config, everything)
        for file in Path(partial).glob("*.safetensors"):
            new, old = load_file(file), load_file(directory / file.name)
            kept = {name: new[name] if name.startswith("mtp.") else old[name] for name in new}
            save_file(kept, file, metadata={"format": "pt"})
            file.chmod(0o644)
            file.replace(directory / file.name)


def main() -> None:
    """Export, then compare what a reader gets with what was trained."""
    parser = argparse.ArgumentParser(
        description="Export the training state into the bundled checkpoint."
    )
    parser.add_argument("--state", type=Path, default=Path("build/tiny-train"))
    parser.add_argument("--drafter", action="store_true", help="the drafter only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    if arguments.drafter:
        weights = torch.load(arguments.state / "drafter.pt", weights_only=True)
        export_drafter(weights, CHECKPOINT)
    else:
        weights = torch.load(arguments.state / "state.pt", weights_only=True)["weights"]
        weights |= drafter.initial_weights(config, weights, seed=0)
        export(weights, CHECKPOINT)
    stored = stacked_weights(CHECKPOINT)
    for name, weight in weights.items():
        torch.testing.assert_close(
            stored[name],
            round_to_storage(name, weight.float()),
            rtol=0,
            atol=0,
            msg=f"{name} is stored otherwise than it was trained",
        )
    print(f"exported {sum(w.numel() for w in weights.values())} weights to {CHECKPOINT}")


if __name__ == "__main__":
    main()
