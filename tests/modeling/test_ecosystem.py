"""Tests of every model family with tools for Transformers models: training, PEFT, compilation and export."""

import peft
import pytest
import torch
import transformers
from PIL import Image
from transformers import Trainer, TrainingArguments

from kinds import KINDS, main_output


def nightly_but(*kinds: str, of=tuple(KINDS)):
    """Parametrize a test's argument `kind`. Names in `kinds` are always tested, other names in `of` only nightly."""
    others = [pytest.param(kind, marks=pytest.mark.nightly) for kind in of if kind not in kinds]
    return pytest.mark.parametrize("kind", [*kinds, *others])


TRANSFORMERS = ("bootstrapped", "patches", "v1", "vit_impulse_init", "vit_context_broadcast")


@pytest.fixture(scope="module")
def cifar10(photographs) -> list[dict]:
    images, labels = photographs
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    batch = processor(images, return_tensors="pt")["pixel_values"]
    return [{"pixel_values": pixels, "labels": label} for pixels, label in zip(batch, labels, strict=True)]


def test_a_training_step_changes_most_weights_of_each_class(kind, make_model, pixel_values):
    for model_class in KINDS[kind].classes:
        model = make_model(model_class, kind).train()
        main_output(model(pixel_values)).square().mean().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        learned = [parameter for parameter in trained if parameter.grad is not None and parameter.grad.any()]
        assert len(learned) > 0.8 * len(trained) and all(parameter.grad.isfinite().all() for parameter in learned)
        before = [parameter.detach().clone() for parameter in learned]
        torch.optim.AdamW(model.parameters(), 1e-3).step()
        assert not any(torch.equal(*pair) for pair in zip(learned, before, strict=True))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@nightly_but("patches", of=TRANSFORMERS)
def test_lora(kind, make_model, cifar10, pixel_values, tmp_path):
    model = make_model("classifier", kind, num_labels=10)
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["classifier"], r=4)
    tuned = peft.get_peft_model(model, config)
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "remove_unused_columns": False}
    options |= {"max_steps": 4, "learning_rate": 1e-2, "gradient_checkpointing": True}
    arguments = TrainingArguments(str(tmp_path / "out"), **options)
    Trainer(tuned, arguments, train_dataset=cifar10).train()
    tuned.eval().save_pretrained(tmp_path / "adapter")
    base = KINDS[kind].classifier.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    # Weights of `loaded` and `tuned` are equal but have different memory addresses. The order of summation depends on
    # the addresses, so the logits differ by rounding errors.
    torch.testing.assert_close(loaded(pixel_values).logits, tuned(pixel_values).logits, rtol=0, atol=1e-6)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(pixel_values).logits, tuned(pixel_values).logits, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(pixel_values).logits, merged(pixel_values).logits, rtol=0, atol=1e-6)


class TestCompilationAndExport:
    @pytest.fixture
    def classifier(self, kind, make_model, request) -> transformers.PreTrainedModel:
        """Return a tiny classifier with one layer, because export takes time for each layer. The test of graph breaks
        gets a classifier with two layers."""
        fewer = {"num_focusing_iterations": 2} if kind in ("bootstrapped", "patches", "v1") else {}
        layers = 2 if request.function.__name__ == "test_compile_without_graph_breaks" else 1
        return make_model("classifier", kind, num_hidden_layers=layers, **fewer)

    @torch.no_grad()
    @nightly_but("bootstrapped", "content", "agent_cnn")
    def test_compile_without_graph_breaks(self, kind, classifier, pixel_values):
        # Transformers uses a lock in a model's first call with hidden states, and a lock cannot be compiled. So the
        # model is called once before it is compiled.
        arguments = {"output_hidden_states": True}
        if kind in ("bootstrapped", "v1"):
            arguments["output_rois"] = True
        expected = classifier(pixel_values, **arguments)
        outputs = torch.compile(classifier, fullgraph=True, backend="eager")(pixel_values, **arguments)
        assert torch.equal(outputs.logits, expected.logits)
        for name in ("hidden_states", "rois"):
            for compiled, eager in zip(outputs.get(name, ()), expected.get(name, ()), strict=True):
                assert torch.equal(compiled, eager)

    @torch.no_grad()
    @nightly_but("patches")
    def test_export(self, kind, classifier, pixel_values):
        shapes = {"pixel_values": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(classifier, (pixel_values,), dynamic_shapes=shapes)
        for images in (pixel_values, pixel_values[[1, 0, 1]]):
            assert torch.equal(program.module()(images).logits, classifier(images).logits)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*tokens.*:UserWarning")
@pytest.mark.parametrize("task, pooled", [("image-classification", False), ("image-feature-extraction", True)])
def test_pipelines_choose_the_number_of_tokens(task, pooled, make_model, tmp_path):
    model = make_model("classifier", "patches", num_labels=10)
    model.save_pretrained(tmp_path)
    pipe = transformers.pipeline(task, model=str(tmp_path), model_kwargs={"num_tokens": 4})
    image = Image.new("RGB", (40, 40), "red")
    pixel_values = pipe.image_processor(image, return_tensors="pt").pixel_values
    assert pipe.model.config.num_tokens == 4 != model.config.default_num_tokens
    if pooled:
        expected = model.base_model(pixel_values, num_tokens=4).last_hidden_state
        torch.testing.assert_close(torch.tensor(pipe(image)), expected, rtol=0, atol=1e-6)
    else:
        expected = model(pixel_values, num_tokens=4).logits.softmax(-1).max().item()
        assert pipe(image, top_k=1)[0]["score"] == pytest.approx(expected, abs=1e-6)
