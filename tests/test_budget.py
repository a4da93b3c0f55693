"""`frugalvit budget`: a model with each of its counts of tokens, measured, and the largest within a budget."""

import argparse
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageClassification,
    AutoProcessor,
    CLIPTextConfig,
    ViTConfig,
    ViTForImageClassification,
)

from frugalvit import (
    SparseFormerCLIPConfig,
    SparseFormerCLIPModel,
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerForSemanticSegmentation,
    SparseFormerLlavaConfig,
    SparseFormerLlavaForConditionalGeneration,
    checkpoint_path,
    count_macs,
    matching_processor,
)
from frugalvit import budget as budget_command
from frugalvit.cli import main
from frugalvit.common import packing
from frugalvit.common.num_tokens import using_tokens
from frugalvit.options.budget import number, seconds


COUNTS = [4, 6, 9]
TINY = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"stem_channels": 8, "num_sampling_points": 4, "focusing_hidden_size": 32, "num_focusing_iterations": 1}


def make_config(**fields) -> SparseFormerConfig:
    return SparseFormerConfig(
        **TINY, **SMALL, intermediate_size=48, **{"num_latent_tokens": 9, "elastic_token_counts": COUNTS, **fields}
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SparseFormerForImageClassification(make_config()).eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def macs(model):
    found = {}
    for count in COUNTS:
        with using_tokens(model, count):
            found[count] = count_macs(model, 32).macs_with_attention
    assert found[4] < found[6] < found[9]
    return found


@pytest.fixture
def teacher(tmp_path):
    ViTForImageClassification(ViTConfig(**TINY, patch_size=4, intermediate_size=64)).save_pretrained(tmp_path / "vit")
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path / "vit"


@pytest.fixture
def clock_of_work(monkeypatch):
    """A second passes for a multiply-accumulate, and only then."""
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr("frugalvit.common.speed.time.perf_counter", lambda: counter.get_total_flops() / 2)
        # The counter does not know packed products.
        monkeypatch.setattr(packing, "packing_pays", lambda dtype: False)
        yield


def budget(*arguments, capsys) -> dict:
    command = ["budget", *map(str, arguments), "--device", "cpu", "--rounds", "1", "--json"]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def work(model) -> dict[int, float]:
    """Multiply-accumulates of a batch of two: fewer than twice those of an image, as the classifier reads [CLS] alone
    and the first step is the same for both."""
    found = {}
    for count in COUNTS:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(2, 3, 32, 32), num_tokens=count)
        found[count] = counter.get_total_flops() / 2
    return found


@pytest.mark.parametrize(
    ("limit", "largest"), [("latency", 6), ("images-per-second", 6), ("macs", 4), ("macs", 6), ("macs", 9)]
)
@pytest.mark.usefixtures("clock_of_work")
def test_the_largest_count_within_the_budget(folder, macs, work, limit, largest, capsys):
    allowed = work[largest] + 1
    value = {"latency": f"{allowed}s", "images-per-second": f"{2 / allowed:e}", "macs": macs[largest]}[limit]
    found = budget(folder, f"--{limit}", value, "--batch-size", 2, capsys=capsys)
    assert [row["num_tokens"] for row in found["rows"]] == COUNTS
    for row in found["rows"]:
        count = row["num_tokens"]
        assert row["macs"] == macs[count]
        assert row["latency (ms)"] == pytest.approx(1000 * work[count])
        assert row["images/s"] == pytest.approx(2 / work[count])
    assert found["chosen"] == found["rows"][COUNTS.index(largest)]
    assert found["settings"]["batch_size"] == 2


def test_nothing_within_the_budget(folder, macs, tmp_path, capsys):
    output = tmp_path / "small"
    assert main(["budget", str(folder), "--macs", "1k", "--rounds", "1", "--output", str(output)]) == 1
    printed = capsys.readouterr()
    # What was measured is of use all the same.
    assert "num_tokens" in printed.out
    nearest = f"num_tokens=4, {macs[4] / 1e9:.4g} G multiply-accumulates"
    assert f"Nothing is within 1e-06 G multiply-accumulates an image: the nearest is {nearest}." in printed.err
    assert len(printed.err.splitlines()) == 1 and not output.exists()


@torch.no_grad()
def test_the_folder_uses_the_count(folder, model, macs, tmp_path, capsys):
    (folder / "README.md").write_text("The card.")
    (folder / "results.json").write_text("{}")
    (folder / "checkpoints").mkdir()
    output = tmp_path / "output"
    assert main(["budget", str(folder), "--macs", str(macs[6]), "--rounds", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Within" in printed and "num_tokens=6" in printed and f"Wrote {output}." in printed
    assert {path.name for path in output.iterdir()} == {path.name for path in folder.iterdir() if path.is_file()} - {
        "results.json"
    }
    assert (output / "README.md").read_text() == "The card."
    assert (output / "preprocessor_config.json").is_file() and (output / "modeling_sparseformer.py").is_file()
    weights, kept = (load_file(path / "model.safetensors") for path in (folder, output))
    assert weights.keys() == kept.keys() and all(torch.equal(weights[name], kept[name]) for name in weights)
    images = torch.randn(2, 3, 32, 32)
    loaded = AutoModelForImageClassification.from_pretrained(output)
    assert torch.equal(loaded(images).logits, model(images, num_tokens=6).logits)
    assert torch.equal(loaded(images, num_tokens=9).logits, model(images).logits)


class TestScores:
    def test_of_the_training(self, folder, teacher, capsys):
        """Beside the teacher that it had."""
        best = {"accuracy": 0.75, "teacher_accuracy": 0.875, "alignment": 0.5}
        best |= {f"accuracy_{count}": count / 16 for count in COUNTS}
        # Chosen on the one, measured on the other, which is what counts.
        best |= {"test_accuracy_4": 0.25, "accuracy_4": 0.5}
        images = {"evaluation split": "validation", "evaluation images": 40, "test split": "test", "test images": 60}
        results = {"arguments": {"teacher": str(teacher), "dataset": ["owner/name"]}, "best": best, "images": images}
        (folder / "results.json").write_text(json.dumps(results))
        found = budget(folder, capsys=capsys)
        assert found["settings"]["scored_on"] == "test of owner/name (60 images)"
        rows = found["rows"]
        assert [row["accuracy"] for row in rows] == [0.875, 0.25, 0.375, 0.5625]
        assert [(row["model"], row["num_tokens"]) for row in rows][:2] == [("teacher", 64), ("student", 4)]
        assert (
            rows[0]["macs"] == count_macs(ViTForImageClassification.from_pretrained(teacher), 32).macs_with_attention
        )

    def test_without_labels(self, folder, capsys):
        best = {f"alignment_{count}": count / 16 for count in COUNTS}
        (folder / "results.json").write_text(json.dumps({"best": best}))
        assert [row["alignment"] for row in budget(folder, capsys=capsys)["rows"]] == [0.25, 0.375, 0.5625]

    @pytest.mark.parametrize(
        "table",
        [
            "| num_tokens | accuracy |\n| ---: | ---: |\n| 4 | 0.5 |\n| 9 | 0.75 |\n",
            "| `num_tokens` | G | accuracy |\n| --- | --- | --- |\n| 4 | 1.0 | 50.00 % |\n| 9 | 2.0 | 75.00 % |\n|\n",
        ],
    )
    def test_of_the_card(self, table, folder, capsys):
        (folder / "README.md").write_text(f"---\nlicense: mit\n---\n\nA model.\n\n{table}\nMore.\n")
        assert [row["accuracy"] for row in budget(folder, capsys=capsys)["rows"]] == [0.5, None, 0.75]

    def test_that_the_hub_lists(self, capsys):
        found = budget("cifar10-sparseformer", capsys=capsys)
        (row,) = found["rows"]
        assert (row["num_tokens"], row["accuracy"]) == (15, 0.7809)
        assert found["settings"]["scored_on"] == "test of CIFAR-10"
        assert "what the training noted, on test of CIFAR-10." in budget_command.describe(found["settings"])

    def test_that_nobody_measured(self, folder, capsys):
        assert [row["accuracy"] for row in budget(folder, capsys=capsys)["rows"]] == [None] * 3


def test_a_teacher_that_is_given(folder, teacher, capsys):
    rows = budget(folder, "--teacher", teacher, "--dtype", "bfloat16", capsys=capsys)["rows"]
    assert [row["num_tokens"] for row in rows] == [64, *COUNTS]


def test_a_teacher_that_is_elsewhere_is_left_out(folder, capsys):
    (folder / "README.md").write_text("---\nbase_model: someone/teacher\n---\n\nA model.\n")
    assert [row["num_tokens"] for row in budget(folder, capsys=capsys)["rows"]] == COUNTS


def make_clip():
    text = CLIPTextConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1).to_dict()
    return SparseFormerCLIPModel(SparseFormerCLIPConfig(text_config=text, vision_config=make_config().to_dict()))


@pytest.mark.parametrize(
    "make", [make_clip, lambda: SparseFormerForSemanticSegmentation(make_config())], ids=["clip", "segmentation"]
)
def test_other_models_than_classifiers(make, macs, tmp_path, capsys):
    make().save_pretrained(tmp_path / "model")
    found = budget(tmp_path / "model", "--macs", "1T", "--output", tmp_path / "output", capsys=capsys)
    assert [row["num_tokens"] for row in found["rows"]] == COUNTS
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert config.get("vision_config", config)["num_tokens"] == 9


def test_a_llavas_processor_inserts_the_count(macs, tmp_path, capsys):
    shipped = AutoProcessor.from_pretrained(checkpoint_path("cifar10-sparseformer-llava"))
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SparseFormerLlavaConfig(
        text_config={"model_type": "llama", "vocab_size": len(shipped.tokenizer), **text},
        vision_config=make_config().to_dict(),
        image_token_index=shipped.image_token_id,
        vision_feature_select_strategy="full",
    )
    model = SparseFormerLlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    matching_processor(shipped, model).save_pretrained(tmp_path / "model")
    options = ("--macs", macs[6], "--dtype", "bfloat16", "--output", tmp_path / "output")
    found = budget(tmp_path / "model", *options, capsys=capsys)
    prompt = {"images": Image.new("RGB", (32, 32)), "text": "<image>"}
    (ids,) = AutoProcessor.from_pretrained(tmp_path / "output")(**prompt)["input_ids"]
    saved = SparseFormerLlavaConfig.from_pretrained(tmp_path / "output")
    assert saved.vision_config.num_tokens == found["chosen"]["num_tokens"] == 6
    assert ids.count(shipped.image_token_id) == saved.image_seq_length == 6 + saved.vision_config.num_prefix_tokens


def test_a_folder_with_something_in_it_is_refused_at_once(folder, capsys):
    assert main(["budget", str(folder), "--macs", "1T", "--output", str(folder.parent)]) == 1
    printed = capsys.readouterr()
    assert "exists and is not empty" in printed.err and not printed.out


def test_a_model_without_a_choice_has_one_row(teacher, tmp_path, capsys):
    found = budget(teacher, "--macs", "1T", capsys=capsys)
    assert [row["num_tokens"] for row in found["rows"]] == [None] and found["chosen"] == found["rows"][0]
    assert main(["budget", str(teacher), "--macs", "1T"]) == 0
    assert "Within 1000 G multiply-accumulates an image: the model, " in capsys.readouterr().out
    assert main(["budget", str(teacher), "--macs", "1T", "--output", str(tmp_path / "output")]) == 1
    assert "is a ViTForImageClassification, whose tokens cannot be chosen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (seconds, "20ms", 0.02),
        (seconds, "0.5s", 0.5),
        (seconds, "800 us", 0.0008),
        (number, "200", 200),
        (number, "1G", 1e9),
        (number, "350M", 3.5e8),
        (number, "1e3k", 1e6),
    ],
)
def test_quantities(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(seconds, t) for t in ("20", "ms", "0ms", "-1s", "20min", "1.2.3s")] + [(number, t) for t in ("", "1g", "1 GB")],
)
def test_what_is_no_quantity(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match=rf"got '{text}', expected a positive number like \d+"):
        parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--latency", "20"], "argument --latency: got '20', expected a positive number like 20ms, 0.5s or 800us"),
        (["--latency", "20ms", "--macs", "1G"], "not allowed with argument --latency"),
        (["--output", "folder"], "argument --output: needs a budget, --latency, --images-per-second or --macs"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["budget", "cifar10-vit", *arguments])
    assert message in capsys.readouterr().err
