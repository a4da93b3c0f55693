"""Measure a ViT that learns beside an agent CNN on CIFAR-10, one table a command.

    python benchmarks/agent_tables.py joint   # ViT and agent alone, joint, shared, joint from impulses
    python benchmarks/agent_tables.py hints   # joint, with the hint removed at a relative depth (figure 1)
    python benchmarks/agent_tables.py agents  # a res-like agent, Agent-B, and SAM instead of an agent
    python benchmarks/agent_tables.py longer  # ViT alone, the control, joint with and without hints, 40 epochs
    python benchmarks/agent_tables.py directions  # weaker hints and weaker SAM, since both cost accuracy here
    python benchmarks/agent_tables.py gradients   # lengths and a cosine of the loss terms' gradients, joint ViT

All rows share these settings, unless their name gives another one:

- architectures: 64 tokens and [CLS], width 72, 4 blocks, 9 heads (ViT) or 9 positions (agent);
- budget: 4,000 images, 6 epochs, batches of 32;
- optimizer, initialization and loss weights of the reference implementation; rows with impulses initialize all other
  weights as in Transformers, because standard normal patch projections would hide the positions;
- images padded by reflection, and accuracy measured after the last epoch.

"joint, no hint, no divergence" is the control: two models train side by side, with the dropouts of the joint rows, and
neither learns from the other. A ViT alone has dropout where Transformers' ViT has it. Finished runs under --runs-dir
are reused, so an interrupted command resumes, and seeds can run side by side. Writes agent_TABLE.json. `frugalvit
joint --config joint-small` and similar recipes have the paper's sizes and budgets.
"""

import itertools
import statistics
from pathlib import Path

import torch
from transformers import ViTImageProcessor

from frugalvit import BootstrappedViTForImageClassification
from frugalvit.training import joint, train
from frugalvit.training.arguments import run_as_program
from frugalvit.training.data import class_names, load_images
from frugalvit.training.decoding import decode_image
from shared import budget_settings, last_accuracies, parse_table, run_row, spread, wanted_rows, write_table


BLOCKS = 4
SIZES = f"patch_size=4,hidden_size=72,num_hidden_layers={BLOCKS},intermediate_size=288"
VIT = f"image_size=32,{SIZES},num_attention_heads=9"
# `branch_dropout=0`, because results were measured before shared agents supported the reference's branch dropout.
AGENT = f"{SIZES},num_positions=9,branch_dropout=0"
IMPULSE = {"initialization": "impulse", "initialization_options": "value_init=mimetic"}
TRANSFORMERS = {"initialization": "default"}
# Models that train alone have the augmentation of joint rows: no mixing, no label smoothing.
ALONE = {
    "weight_decay": 0.05,
    "randaugment_layers": 0,
    "mixup": 0,
    "label_smoothing_factor": 0,
    "crop_size": 32,
    "max_grad_norm": 0,
    "initialization": "reference",
}
VIT_ALONE = ALONE | {
    "model_type": "vit",
    "config_overrides": f"{VIT},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1,layer_norm_eps=1e-5",
}
AGENT_ALONE = ALONE | {"model_type": "agent_cnn", "config_overrides": f"image_size=32,{AGENT}"}
# Gradients are not clipped: the reference's configuration sets 1, but its SAM code does not use this value.
SAM = {"sam_rho": 0.1}
PAIR = {"vit": VIT, "agent": AGENT, "padding_mode": "reflect"}
JOINT, SHARED = (PAIR | {"variant": f"{name}-small"} for name in ("joint", "shared"))
NO_HINT = {"config_overrides": "hint_weight=0"}
CONTROL = {"config_overrides": "hint_weight=0,divergence_weight=0"}
# Training module and its arguments for each row, by row name. Tables share the runs of rows with the same name.
TABLES = {
    "joint": {
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, clipped at 0.1": (train, VIT_ALONE | {"max_grad_norm": 0.1}),
        "ViT alone, Transformers' start": (train, VIT_ALONE | TRANSFORMERS),
        "ViT alone, impulse": (train, VIT_ALONE | IMPULSE),
        "agent alone": (train, AGENT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint": (joint, JOINT),
        "joint, clipped at 0.1": (joint, JOINT | {"vit_max_grad_norm": 0.1}),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint, Transformers' start": (joint, JOINT | TRANSFORMERS),
        "shared": (joint, SHARED),
        "shared, no hint": (joint, SHARED | NO_HINT),
        "joint, impulse, no hint": (joint, JOINT | IMPULSE | NO_HINT),
    },
    "hints": {
        "joint": (joint, JOINT),
        **{
            f"joint, no hint at depth {block / BLOCKS:g}": (joint, JOINT | {"without_hint_at": block / BLOCKS})
            for block in range(1, BLOCKS + 1)
        },
        "joint, no hint": (joint, JOINT | NO_HINT),
    },
    "agents": {
        "joint": (joint, JOINT),
        # The stem outputs maps of 4 x 4 positions, the first block maps of 2 x 2.
        "joint, res-like agent": (joint, JOINT | {"agent": f"{AGENT},stem=res,downsample_after=[0]"}),
        "joint, Agent-B": (joint, JOINT | {"agent": f"{SIZES},num_positions=6,norm_position=after"}),
        "ViT alone": (train, VIT_ALONE),
        "ViT alone, SAM": (train, VIT_ALONE | SAM),
    },
    # Hints and SAM lower the accuracy after few epochs; each of these rows weakens one of the two.
    "directions": {
        "joint, no hint": (joint, JOINT | NO_HINT),
        **{f"joint, hints of weight {w}": (joint, JOINT | {"config_overrides": f"hint_weight={w}"}) for w in (0.1, 1)},
        **{f"ViT alone, SAM of {rho}": (train, VIT_ALONE | SAM | {"sam_rho": rho}) for rho in (0.01, 0.05)},
    },
    "longer": {
        "ViT alone": (train, VIT_ALONE),
        "joint, no hint, no divergence": (joint, JOINT | CONTROL),
        "joint, no hint": (joint, JOINT | NO_HINT),
        "joint": (joint, JOINT),
    },
}
# The table "gradients" has a row for each untrained model, here with its `--initialization`, and the row "trained" for
# the model of the row "joint".
STARTS = {"fresh, Transformers' start": "default", "fresh, reference's start": "reference"}
GRADIENTS = ("trained", *STARTS)


def main():
    arguments = parse_table(__doc__, [*TABLES, "gradients"], 4000, "runs/agent_tables")
    file, rows = arguments.results_dir / f"agent_{arguments.table}.json", []
    table = TABLES.get(arguments.table, GRADIENTS)
    names = wanted_rows(arguments, table)
    if arguments.table == "gradients":
        write_table(file, budget_settings(arguments), gradients(arguments, names))
        return

    for name in names:
        results = [run(arguments, name, *table[name], seed)[1] for seed in arguments.seeds]
        row = {"row": name, **last_accuracies(results)}
        if "eval_agent_accuracy" in results[0]:
            values = [result["eval_agent_accuracy"] for result in results]
            row |= {"agent": statistics.mean(values), "agent_spread": spread(values), "agent_accuracies": values}
        rows.append(row)
        write_table(file, budget_settings(arguments), rows)


def run(arguments, name: str, training, row: dict, seed: int) -> tuple[Path, dict]:
    return run_row(arguments, training, name, seed, {"per_device_train_batch_size": 32} | row)


def gradients(arguments, names: list[str]) -> list[dict]:
    """Measure the weighted gradients of the loss terms on 512 training images, for the ViT of the row "joint"."""
    images = load_images(arguments.dataset, "train[:512]")
    labels = torch.tensor(images["label"][:])
    decoded = [decode_image(record["image"], index) for index, record in enumerate(images)]
    image_processor = ViTImageProcessor(size={"height": 32, "width": 32})
    inputs = {"pixel_values": image_processor(decoded, return_tensors="pt")["pixel_values"], "labels": labels}
    measured = {}
    for seed, name in itertools.product(arguments.seeds, names):
        if name == "trained":
            folder, _ = run(arguments, "joint", *TABLES["joint"]["joint"], seed)
            model = BootstrappedViTForImageClassification.from_pretrained(folder)
        else:
            torch.manual_seed(seed)
            pair = joint.TwinArguments(JOINT["variant"], VIT, AGENT, initialization=STARTS[name])
            model = joint.build_twins(pair, class_names(images))
        measured.setdefault(name, []).append(gradient_lengths(model, inputs))
    return [
        {"ViT": name}
        | {column: statistics.mean(each[column] for each in values) for column in values[0]}
        | {f"{column}_values": [each[column] for each in values] for column in values[0]}
        for name, values in measured.items()
    ]


def gradient_lengths(
    model: BootstrappedViTForImageClassification, inputs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the length of each loss term's gradient, the cosine between the hints' gradient and the sum of the other
    gradients, and the root mean square of tokens before the first block."""
    outputs = model.eval()(**inputs, output_hidden_states=True)
    losses = outputs.losses
    parameters = list(model.vit.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    vectors = {name: gradient(losses[name].sum()) for name in ("classification", "divergence", "hints")}
    others = vectors["classification"] + vectors["divergence"]
    lengths = {name: vector.norm().item() for name, vector in vectors.items()}
    return lengths | {
        "hints_by_classification": lengths["hints"] / lengths["classification"],
        "cosine_of_hints": torch.cosine_similarity(vectors["hints"], others, dim=0).item(),
        "rms_of_tokens": outputs.hidden_states[0].detach().square().mean().sqrt().item(),
    }


if __name__ == "__main__":
    run_as_program(main, "agent_tables.py")
