"""SparseFormers behave like models of Transformers: pipelines, Trainer, attention interfaces, compilation, export."""

import copy
import itertools
import math

import numpy as np
import onnxruntime
import peft
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoImageProcessor, Trainer, TrainingArguments, pipeline
from transformers.utils import output_capturing

from frugalvit import (
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)


CLASSES = (
    SparseFormerModel,
    SparseFormerForImageClassification,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)

# The name that every supported version of Transformers knows.
OLD_NAME = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")


@pytest.fixture
def classifier(generation, make_model) -> SparseFormerForImageClassification:
    return make_model(SparseFormerForImageClassification, generation)


def training_arguments(folder, **fields) -> TrainingArguments:
    """Arguments of short, silent runs on CPU."""
    return TrainingArguments(
        output_dir=str(folder),
        **{
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "remove_unused_columns": False,
            "save_strategy": "no",
            **fields,
        },
    )


@pytest.fixture(scope="module")
def cifar10(make_config, photographs) -> list[dict]:
    """Photographs as the image processor of a saved model prepares them, with labels."""
    images, labels = photographs
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    batch = processor(images, return_tensors="pt")["pixel_values"]
    return [{"pixel_values": pixels, "labels": label} for pixels, label in zip(batch, labels, strict=True)]


class TestAutoClasses:
    def test_registered(self, make_config):
        config = make_config("bootstrapped")
        assert type(transformers.AutoConfig.for_model("sparseformer")) is SparseFormerConfig
        assert type(transformers.AutoModel.from_config(config)) is SparseFormerModel
        model = transformers.AutoModelForImageClassification.from_config(config)
        assert type(model) is SparseFormerForImageClassification

    def test_saved_by_one_class_and_loaded_by_another(self, classifier, pixel_values, tmp_path):
        classifier.save_pretrained(tmp_path)
        model, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is SparseFormerModel and not info["missing_keys"]
        expected = classifier(pixel_values, output_hidden_states=True)
        assert torch.equal(
            model(pixel_values, output_hidden_states=True).hidden_states[-1], expected.hidden_states[-1]
        )
        model.save_pretrained(tmp_path / "base")
        loaded, info = SparseFormerForImageClassification.from_pretrained(tmp_path / "base", output_loading_info=True)
        assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
        assert torch.equal(loaded.sparseformer(pixel_values).pooler_output, model(pixel_values).pooler_output)

    def test_vision_model_is_the_base_model(self, generation, make_model, pixel_values, tmp_path):
        model = make_model(SparseFormerVisionModel, generation)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModel.from_pretrained(tmp_path)
        assert torch.equal(loaded(pixel_values).pooler_output, model(pixel_values).pooler_output)


class TestPipelines:
    def test_image_classification(self, generation, make_model, photographs, tmp_path):
        labels = {0: "plane", 1: "car", 2: "bird"}
        model = make_model(SparseFormerForImageClassification, generation, id2label=labels)
        model.save_pretrained(tmp_path)
        image = photographs[0][0]
        classify = pipeline("image-classification", model=str(tmp_path), device="cpu")
        predictions = classify(image)
        pixels = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            probabilities = model(pixels).logits.softmax(-1)[0]
        assert [prediction["label"] for prediction in predictions] == [
            labels[i] for i in probabilities.argsort(descending=True).tolist()
        ]
        scores = [prediction["score"] for prediction in predictions]
        assert scores == pytest.approx(probabilities.sort(descending=True).values.tolist(), abs=1e-6)

    def test_image_feature_extraction(self, generation, make_model, photographs, tmp_path):
        make_model(SparseFormerForImageClassification, generation).save_pretrained(tmp_path)
        extract = pipeline("image-feature-extraction", model=str(tmp_path), device="cpu")
        model = transformers.AutoModel.from_pretrained(tmp_path)
        image = photographs[0][0]
        pixels = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            outputs = model(pixels)
        np.testing.assert_allclose(extract(image), outputs.last_hidden_state.numpy(), atol=1e-5)
        np.testing.assert_allclose(extract(image, pool=True), outputs.pooler_output.numpy(), atol=1e-5)


class TestTrainer:
    def test_learns_real_images(self, generation, make_config, cifar10, tmp_path):
        torch.manual_seed(0)
        model = SparseFormerForImageClassification(make_config(generation, num_labels=10))
        arguments = training_arguments(
            tmp_path, max_steps=40, learning_rate=5e-3, per_device_train_batch_size=16, logging_steps=5
        )
        trainer = Trainer(model, arguments, train_dataset=cifar10, eval_dataset=cifar10)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert before == pytest.approx(math.log(10), abs=0.3)
        assert trainer.evaluate()["eval_loss"] < 0.7 * before

    def test_predictions_are_logits_alone(self, generation, make_model, cifar10, tmp_path):
        model = make_model(SparseFormerForImageClassification, generation, num_labels=10)
        prediction = Trainer(model, training_arguments(tmp_path)).predict(cifar10)
        assert prediction.predictions.shape == (len(cifar10), 10)
        images = torch.stack([example["pixel_values"] for example in cifar10])
        with torch.no_grad():
            np.testing.assert_allclose(prediction.predictions, model(images).logits.numpy(), atol=1e-5)
        assert list(prediction.label_ids) == [example["labels"] for example in cifar10]

    @pytest.mark.parametrize(
        "problem_type", ["single_label_classification", "multi_label_classification", "regression", "one value"]
    )
    def test_accumulated_steps_equal_the_large_batch(self, problem_type, generation, make_config, cifar10, tmp_path):
        generator = torch.Generator().manual_seed(0)
        labels = {
            "single_label_classification": torch.randint(0, 3, (8,), generator=generator),
            "multi_label_classification": torch.randint(0, 2, (8, 3), generator=generator).float(),
            "regression": torch.randn(8, 3, generator=generator),
            "one value": torch.randn(8, generator=generator),
        }[problem_type]
        fields = {"problem_type": problem_type, "num_labels": 3}
        if problem_type == "one value":
            fields = {"num_labels": 1}
        examples = [
            {"pixel_values": example["pixel_values"], "labels": label}
            for example, label in zip(cifar10, labels, strict=False)
        ]
        losses, weights = [], []
        # 4 steps of 2 images, one of 8, and 3 steps that do not divide the images evenly.
        for batch_size, accumulation in ((2, 4), (8, 1), (3, 3)):
            torch.manual_seed(0)
            model = SparseFormerForImageClassification(make_config(generation, **fields))
            arguments = training_arguments(
                tmp_path,
                max_steps=1,
                optim="sgd",
                learning_rate=0.1,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                logging_steps=1,
                max_grad_norm=0.0,
            )
            trainer = Trainer(model, arguments, train_dataset=examples)
            trainer.train()
            losses.append(trainer.state.log_history[0]["loss"])
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        torch.manual_seed(0)
        model = SparseFormerForImageClassification(make_config(generation, **fields))
        images = torch.stack([example["pixel_values"] for example in examples])
        assert losses == pytest.approx([model(images, labels=labels).loss.item()] * 3, rel=1e-4)
        for other in weights[1:]:
            torch.testing.assert_close(weights[0], other, atol=1e-6, rtol=0)

    @OLD_NAME
    @pytest.mark.parametrize(
        "fields",
        [
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            {"bf16": True},
            {"bf16": True, "gradient_checkpointing": True},
        ],
        ids=["reentrant", "not reentrant", "bf16", "bf16 and checkpointing"],
    )
    def test_options(self, fields, generation, make_config, cifar10, tmp_path):
        losses = []
        for own in ({}, fields):
            torch.manual_seed(0)
            config = make_config(generation, num_labels=10, drop_path_rate=0.3)
            model = SparseFormerForImageClassification(config)
            arguments = training_arguments(
                tmp_path, max_steps=3, logging_steps=1, learning_rate=3e-3, per_device_train_batch_size=8, **own
            )
            trainer = Trainer(model, arguments, train_dataset=cifar10)
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        # Stochastic depth draws the same numbers when a checkpointed layer runs again.
        assert losses[0] == pytest.approx(losses[1], rel=0.05 if "bf16" in fields else 1e-4)

    def test_resume(self, generation, make_config, cifar10, tmp_path):
        def train(steps, resume=None):
            torch.manual_seed(0)
            model = SparseFormerForImageClassification(make_config(generation, num_labels=10, drop_path_rate=0.3))
            arguments = training_arguments(
                tmp_path, max_steps=steps, save_strategy="steps", save_steps=2, per_device_train_batch_size=8, seed=0
            )
            trainer = Trainer(model, arguments, train_dataset=cifar10)
            trainer.train(resume_from_checkpoint=resume)
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

        assert torch.equal(train(4), train(4, resume=f"{tmp_path}/checkpoint-2"))

    def test_more_classes(self, generation, make_model, cifar10, pixel_values, tmp_path):
        model = make_model(SparseFormerForImageClassification, generation)
        model.save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            SparseFormerForImageClassification.from_pretrained(tmp_path, num_labels=10)
        other = SparseFormerForImageClassification.from_pretrained(
            tmp_path, num_labels=10, ignore_mismatched_sizes=True
        )
        assert other(pixel_values).logits.shape == (2, 10)
        assert torch.equal(other.sparseformer(pixel_values)[0], model.sparseformer(pixel_values)[0])
        Trainer(other, training_arguments(tmp_path / "out", max_steps=1), train_dataset=cifar10).train()

    @OLD_NAME
    def test_lora(self, generation, make_model, cifar10, pixel_values, tmp_path):
        model = make_model(SparseFormerForImageClassification, generation, num_labels=10)
        model.save_pretrained(tmp_path / "base")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"], r=4)
        tuned = peft.get_peft_model(model, config)
        arguments = training_arguments(tmp_path / "out", max_steps=4, learning_rate=1e-2, gradient_checkpointing=True)
        Trainer(tuned, arguments, train_dataset=cifar10).train()
        tuned.eval().save_pretrained(tmp_path / "adapter")
        base = SparseFormerForImageClassification.from_pretrained(tmp_path / "base")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(loaded(pixel_values).logits, tuned(pixel_values).logits)
        frozen = {
            name.replace(".base_layer", "").removeprefix("base_model.model."): parameter
            for name, parameter in tuned.named_parameters()
            if not parameter.requires_grad
        }
        for name, parameter in frozen.items():
            if name in before:
                assert torch.equal(parameter, before[name])
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(pixel_values).logits, tuned(pixel_values).logits, atol=1e-4, rtol=1e-4)


class TestLoss:
    def test_problem_types(self, generation, make_model, pixel_values):
        cases = (
            ({"num_labels": 3}, torch.tensor([0, 2]), "single_label_classification", nn.functional.cross_entropy),
            (
                {"num_labels": 3},
                torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
                "multi_label_classification",
                nn.functional.binary_cross_entropy_with_logits,
            ),
            ({"num_labels": 1}, torch.tensor([0.5, -1.0]), "regression", nn.functional.mse_loss),
        )
        for fields, labels, problem_type, loss_function in cases:
            model = make_model(SparseFormerForImageClassification, generation, **fields)
            outputs = model(pixel_values, labels=labels)
            assert model.config.problem_type == problem_type
            assert torch.equal(outputs.loss, loss_function(outputs.logits.squeeze(1), labels))
            parts = [
                model(pixel_values[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=labels.numel()).loss
                for i in range(2)
            ]
            torch.testing.assert_close(sum(parts), outputs.loss)

    def test_ignored_labels(self, classifier, pixel_values):
        whole = classifier(pixel_values, labels=torch.tensor([1, -100])).loss
        torch.testing.assert_close(whole, classifier(pixel_values[:1], labels=torch.tensor([1])).loss)

    def test_half_precision_loss_is_float32(self, classifier, pixel_values):
        outputs = classifier.to(torch.bfloat16)(pixel_values, labels=torch.tensor([0, 1]))
        assert outputs.loss.dtype == torch.float32 and outputs.logits.dtype == torch.bfloat16


class TestAttention:
    def test_eager_and_sdpa(self, classifier, pixel_values):
        outputs = {}
        for attention in ("eager", "sdpa"):
            classifier.set_attn_implementation(attention)
            loss = classifier(pixel_values, labels=torch.tensor([0, 1])).loss
            outputs[attention] = [loss, *torch.autograd.grad(loss, list(classifier.parameters()))]
        for eager, sdpa in zip(outputs["eager"], outputs["sdpa"], strict=True):
            torch.testing.assert_close(eager, sdpa, atol=1e-5, rtol=1e-4)

    @torch.no_grad()
    def test_flex(self, make_model, pixel_values):
        model = make_model(SparseFormerForImageClassification, "bootstrapped")
        expected = model(pixel_values).logits
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(pixel_values).logits, expected, atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_interface(self, classifier, pixel_values):
        calls = []

        def own_attention(module, query, key, value, attention_mask, scaling, **kwargs):
            calls.append((query.shape, module.is_causal, attention_mask, scaling))
            return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

        transformers.AttentionInterface.register("own_attention", own_attention)
        expected = classifier(pixel_values).logits
        classifier.set_attn_implementation("own_attention")
        torch.testing.assert_close(classifier(pixel_values).logits, expected, atol=1e-6, rtol=1e-6)
        config = classifier.config
        focusing = (2, config.focusing_num_attention_heads, 5, 32 // config.focusing_num_attention_heads)
        cortex = (2, config.num_attention_heads, 5 + config.use_cls_token, 64 // config.num_attention_heads)
        assert calls == [(shape, False, None, shape[-1] ** -0.5) for shape in [focusing] * 4 + [cortex] * 3]

    @pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2", "kernels-community/flash-attn2"])
    def test_narrow_heads_refuse_flex_and_flash(self, attention, make_model, tmp_path):
        model = make_model(SparseFormerModel, "v1")
        model.save_pretrained(tmp_path)
        message = "needs attention heads of 16 or more channels, this model's have 2"
        for refuse in (
            lambda: model.set_attn_implementation(attention),
            lambda: SparseFormerModel.from_pretrained(tmp_path, attn_implementation=attention),
            lambda: transformers.AutoModel.from_config(model.config, attn_implementation=attention),
        ):
            with pytest.raises(ValueError, match=message) as error:
                refuse()
            assert 'Use attn_implementation="sdpa" or "eager"' in str(error.value)

    def test_heads_of_published_variants(self):
        for name in SparseFormerConfig.variants():
            config = SparseFormerConfig.from_variant(name, image_size=32)
            with torch.device("meta"):
                model = SparseFormerModel(config)
            for attention in ("eager", "sdpa"):
                model.set_attn_implementation(attention)
            if name.startswith("v1"):
                with pytest.raises(ValueError, match="needs attention heads"):
                    model.set_attn_implementation("flex_attention")
            else:
                model.set_attn_implementation("flex_attention")


class TestOutputs:
    @torch.no_grad()
    def test_shapes(self, generation, make_model, pixel_values):
        tokens = {"bootstrapped": 6, "v1": 5}[generation]
        adjustments = {"bootstrapped": 4, "v1": 5}[generation]
        for model_class in CLASSES:
            model = make_model(model_class, generation)
            model.set_attn_implementation("eager")
            plain = model(pixel_values)
            for name in ("rois", "sampling_points", "focusing_hidden_states", "hidden_states", "attentions"):
                assert getattr(plain, name) is None
            outputs = model(
                pixel_values,
                output_rois=True,
                output_focusing_hidden_states=True,
                output_hidden_states=True,
                output_attentions=True,
            )
            for name in ("logits", "image_embeds", "last_hidden_state", "pooler_output"):
                if name in plain:
                    assert torch.equal(plain[name], outputs[name])
            assert [tuple(rois.shape) for rois in outputs.rois] == [(2, 5, 4)] * adjustments
            assert [tuple(points.shape) for points in outputs.sampling_points] == [(2, 5, 4, 2)] * 5
            assert {rois.dtype for rois in outputs.rois + outputs.sampling_points} == {torch.float32}
            assert [tuple(states.shape) for states in outputs.focusing_hidden_states] == [(2, 5, 32)] * 4
            assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, tokens, 64)] * 4
            heads = model.config.num_attention_heads
            assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, heads, tokens, tokens)] * 3
            for weights in outputs.attentions:
                torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))

    @torch.no_grad()
    def test_hidden_states_are_those_of_the_blocks(self, generation, make_model, pixel_values):
        model = make_model(SparseFormerModel, generation)
        inputs, results = [], []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
            layer.register_forward_hook(lambda _, arguments, output: results.append(output[0]))
        outputs = model(pixel_values, output_hidden_states=True)
        expected = [inputs[0], *results]
        for states, own in zip(outputs.hidden_states, expected, strict=True):
            assert torch.equal(states, own)
        assert torch.equal(model.layernorm(outputs.hidden_states[-1]), outputs.last_hidden_state)
        assert torch.equal(model.pool(outputs.hidden_states[-1]), outputs.pooler_output)

    @torch.no_grad()
    @pytest.mark.skipif(
        not hasattr(output_capturing, "selected_hidden_states"),
        reason="this version of Transformers does not select hidden states by their index",
    )
    @pytest.mark.parametrize("index", [-2, -1, [0], [1, -1]])
    def test_selected_hidden_states(self, index, generation, make_model, pixel_values):
        model = make_model(SparseFormerModel, generation)
        everything = model(pixel_values, output_hidden_states=True).hidden_states
        selected = model(pixel_values, output_hidden_states=index).hidden_states
        asked = {i % 4 for i in (index if isinstance(index, list) else [index])}
        for i, states in enumerate(selected):
            assert (states is None) if i not in asked else torch.equal(states, everything[i])

    @torch.no_grad()
    def test_tuples(self, generation, make_model, pixel_values):
        for model_class in CLASSES:
            model = make_model(model_class, generation)
            as_tuple = model(pixel_values, return_dict=False, output_rois=True)
            outputs = model(pixel_values, output_rois=True).to_tuple()
            assert isinstance(as_tuple, tuple) and len(as_tuple) == len(outputs)
            assert torch.equal(as_tuple[0], outputs[0])

    @torch.no_grad()
    def test_configured_outputs(self, generation, make_config, pixel_values):
        config = make_config(generation, output_hidden_states=True)
        assert len(SparseFormerForImageClassification(config).eval()(pixel_values).hidden_states) == 4

    @torch.no_grad()
    def test_deterministic_and_independent_of_the_batch(self, classifier, pixel_values):
        classifier.config.drop_path_rate = 0.5
        logits = classifier(pixel_values).logits
        assert torch.equal(logits, classifier(pixel_values).logits)
        for i in range(2):
            torch.testing.assert_close(logits[i], classifier(pixel_values[i : i + 1]).logits[0], atol=1e-5, rtol=1e-5)

    def test_stochastic_depth_acts_in_training_alone(self, generation, make_model, pixel_values):
        model = make_model(SparseFormerForImageClassification, generation, drop_path_rate=0.9)
        assert torch.equal(model(pixel_values).logits, model(pixel_values).logits)
        model.train()
        assert not torch.equal(model(pixel_values).logits, model(pixel_values).logits)


class TestCompilationAndExport:
    @pytest.fixture
    def classifier(self, generation, make_model) -> SparseFormerForImageClassification:
        return make_model(
            SparseFormerForImageClassification, generation, num_focusing_iterations=2, num_hidden_layers=2
        )

    @torch.no_grad()
    def test_compile_without_graph_breaks(self, classifier, pixel_values):
        # Transformers installs what records hidden states in the first call that asks for them, behind a lock.
        arguments = {"output_hidden_states": True, "output_rois": True}
        expected = classifier(pixel_values, **arguments)
        compiled = torch.compile(classifier, fullgraph=True, backend="eager")
        outputs = compiled(pixel_values, **arguments)
        assert torch.equal(outputs.logits, expected.logits)
        for own, other in itertools.chain(
            zip(outputs.rois, expected.rois, strict=True),
            zip(outputs.hidden_states, expected.hidden_states, strict=True),
        ):
            assert torch.equal(own, other)

    def test_compile_for_training(self, classifier, pixel_values):
        labels = torch.tensor([0, 1])
        classifier.train()
        expected = torch.autograd.grad(classifier(pixel_values, labels=labels).loss, list(classifier.parameters()))
        compiled = torch.compile(classifier, fullgraph=True, backend="aot_eager")
        gradients = torch.autograd.grad(compiled(pixel_values, labels=labels).loss, list(classifier.parameters()))
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)

    @torch.no_grad()
    def test_export_and_onnx(self, classifier, pixel_values, tmp_path):
        dynamic = torch.export.Dim.DYNAMIC
        shapes = {"pixel_values": {0: dynamic, 2: dynamic, 3: dynamic}}
        program = torch.export.export(classifier, (pixel_values,), dynamic_shapes=shapes)
        other_size = torch.randn(3, 3, 40, 52, generator=torch.Generator().manual_seed(1))
        for images in (pixel_values, other_size):
            assert torch.equal(program.module()(images).logits, classifier(images).logits)
        onnx = torch.onnx.export(
            program, dynamo=True, input_names=["pixel_values"], output_names=["logits"], verbose=False
        )
        onnx.save(tmp_path / "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
        for images in (pixel_values, other_size):
            [logits] = session.run(None, {"pixel_values": images.numpy()})
            np.testing.assert_allclose(logits, classifier(images).logits.numpy(), atol=1e-4, rtol=1e-4)


class TestLoading:
    @pytest.mark.parametrize(
        "variant",
        [
            "v1-tiny",
            "v1-base",
            "augreg-base-49-224",
            "augreg-large-196-384",
            "augreg-base-49-224-untruncated",
            "clip-base-49-224",
            "clip-large-144-336",
        ],
    )
    @torch.no_grad()
    def test_saved_variants_compute_the_same(self, variant, pixel_values, tmp_path):
        config = SparseFormerConfig.from_variant(
            variant,
            num_latent_tokens=6,
            num_sampling_points=9,
            stem_channels=8,
            focusing_hidden_size=64,
            hidden_size=128,
            num_hidden_layers=2,
            num_labels=5,
        )
        torch.manual_seed(0)
        if config.projection_dim is None:
            model = SparseFormerForImageClassification(config).eval()
        else:
            model = SparseFormerVisionModelWithProjection(config).eval()
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
        assert torch.equal(loaded(pixel_values)[0], model(pixel_values)[0])

    @torch.no_grad()
    def test_device_maps(self, classifier, pixel_values, tmp_path):
        classifier.save_pretrained(tmp_path)
        expected = classifier(pixel_values).logits
        disk = {f"sparseformer.{name}": "disk" for name, _ in classifier.sparseformer.named_children()}
        for device_map in ("cpu", "auto", {"": "cpu"}, {**disk, "classifier": "cpu"}):
            model = SparseFormerForImageClassification.from_pretrained(
                tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
            )
            assert torch.equal(model(pixel_values).logits, expected)

    @pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # sampling points are views
    def test_fully_sharded(self, generation, make_model, pixel_values):
        model = make_model(SparseFormerForImageClassification, generation)
        labels = torch.tensor([0, 1])
        loss = model(pixel_values, labels=labels).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            for module in model.modules():
                if type(module).__name__ in model._no_split_modules:
                    fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
            sharded = model(pixel_values, labels=labels).loss
            sharded.backward()
            assert torch.equal(sharded, loss)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert torch.equal(parameter.grad.full_tensor(), gradient)
        finally:
            torch.distributed.destroy_process_group()

    @torch.no_grad()
    def test_built_on_meta(self, generation, make_config, pixel_values):
        config = make_config(generation)
        with torch.device("meta"):
            model = SparseFormerForImageClassification(config)
        assert not dict(model.named_buffers())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        model.init_weights()
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        torch.manual_seed(0)
        direct = SparseFormerForImageClassification(config)
        for (name, own), other in zip(model.named_parameters(), direct.parameters(), strict=True):
            torch.testing.assert_close(own.std(correction=0), other.std(correction=0), rtol=0.5, atol=0.02, msg=name)
        assert model.eval()(pixel_values).logits.isfinite().all()


NAN, INFINITY = torch.full((1, 3, 8, 8), float("nan")), torch.full((1, 3, 8, 8), float("inf"))
BAD_PIXELS = {
    "none": (None, "You have to specify `pixel_values`"),
    "one channel": (torch.zeros(1, 1, 8, 8), r"shape \(1, 1, 8, 8\), expected \(batch, 3, height, width\)"),
    "channels last": (torch.zeros(1, 8, 8, 3), r"shape \(1, 8, 8, 3\), expected \(batch, 3, height, width\)"),
    "no batch": (torch.zeros(3, 8, 8), r"shape \(3, 8, 8\), expected .* AutoImageProcessor"),
    "video": (torch.zeros(1, 2, 3, 8, 8), r"shape \(1, 2, 3, 8, 8\), expected"),
    "bytes": (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "dtype torch.uint8, expected normalized floating point"),
    "integers": (torch.zeros(1, 3, 8, 8, dtype=torch.long), "dtype torch.int64, expected normalized floating point"),
    "complex": (torch.zeros(1, 3, 8, 8, dtype=torch.cfloat), "dtype torch.complex64, expected normalized"),
    "low": (torch.zeros(1, 3, 3, 8), "image of 3 x 8 pixels, expected at least 4 x 4, the stride of the first"),
    "narrow": (torch.zeros(1, 3, 8, 3), "image of 8 x 3 pixels, expected at least 4 x 4"),
    "empty": (torch.zeros(0, 3, 8, 8), "batch of no images, expected at least one"),
    "NaN": (torch.cat([torch.zeros(2, 3, 8, 8), NAN]), r"Images \[2\] of the batch hold NaN or infinite pixels"),
    "infinity": (torch.cat([INFINITY, NAN]), r"Images \[0, 1\] of the batch hold NaN or infinite pixels"),
}
BAD_LABELS = {
    "too few": ({}, torch.tensor([1]), r"labels of shape \(1,\) .* expects 2 integers"),
    "two for an image": ({}, torch.tensor([[0, 1], [0, 1]]), r"labels of shape \(2, 2\) .*multi_label"),
    "too large": ({}, torch.tensor([0, 3]), r"Got labels \[3\]; the model's classes are 0 to 2"),
    "negative": ({}, torch.tensor([0, -1]), r"Got labels \[-1\]; the model's classes are 0 to 2"),
    "floats": (
        {"problem_type": "single_label_classification"},
        torch.tensor([0.0, 1.0]),
        "dtype torch.float32; single-label classification expects 2 integers",
    ),
    "one of several": ({}, torch.tensor([0.0, 1.0]), r"labels of shape \(2,\) for logits of shape \(2, 3\)"),
    "values": (
        {"num_labels": 1},
        torch.zeros(3),
        r"shape \(3,\) for logits of shape \(2, 1\); regression expects one",
    ),
}
BAD_FIELDS = {
    "heads": (
        {"hidden_size": 96, "num_attention_heads": 5},
        "`hidden_size`=96 is not divisible by `num_attention_heads`=5",
    ),
    "focusing heads": (
        {"focusing_hidden_size": 64, "focusing_num_attention_heads": 3},
        "`focusing_hidden_size`=64 is not divisible by `focusing_num_attention_heads`=3",
    ),
    "width": ({"hidden_size": 100, "num_attention_heads": 1}, "`hidden_size`=100 is not a multiple of 8"),
    "no tokens": ({"num_latent_tokens": 0}, "`num_latent_tokens` is 0, expected at least 1"),
    "negative width": ({"hidden_size": -8}, "`hidden_size` is -8, expected at least 1"),
    "no heads": ({"num_attention_heads": 0}, "`num_attention_heads` is 0, expected at least 1"),
    "no blocks": ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0, expected at least 1"),
    "no iterations": ({"num_focusing_iterations": 0}, "`num_focusing_iterations` is 0, expected at least 1"),
    "one point": ({"num_sampling_points": 1}, "`num_sampling_points` is 1, expected at least 2"),
    "tiny images": ({"image_size": 3}, "`image_size` is 3, expected .* at least 4"),
    "three sizes": ({"image_size": [8, 8, 8]}, "expected one size or a height and a width"),
    "means": ({"image_mean": [0.5]}, "`image_mean` has 1 values, expected one number or one for each of the"),
    "no deviation": ({"image_std": 0.0}, "`image_std` is 0.0, expected numbers to divide by"),
    "unknown step": (
        {"focusing_steps": ["sample"]},
        r"`focusing_steps` has unknown steps \['sample'\]; the steps are",
    ),
    "step twice": ({"focusing_steps": ["sampling", "mlp", "mlp"]}, "lists a step twice"),
    "nothing sampled": ({"focusing_steps": ["mlp"], "final_focusing_steps": []}, "No focusing step samples the image"),
    "[CLS] in a focusing block": ({"final_focusing_steps": ["attention", "mlp"]}, "set `use_cls_token=False`"),
    "pooled [CLS] without [CLS]": ({"use_cls_token": False}, "`pooling='cls'` needs `use_cls_token=True`"),
    "pooling": ({"pooling": "max"}, r"`pooling` is 'max', expected one of \['cls', 'mean'\]"),
    "padding": ({"sampling_padding_mode": "reflect"}, r"`sampling_padding_mode` is 'reflect', expected one of"),
    "problem": ({"problem_type": "segmentation"}, "problem_type.*'segmentation'.* expected one of"),
    "filter": ({"resample": 9}, "`resample` is 9, expected one of"),
    "rate": ({"drop_path_rate": 1.0}, "`drop_path_rate` is 1.0, expected 0 <= rate < 1"),
    "epsilon": ({"layer_norm_eps": 0.0}, "`layer_norm_eps` is 0.0, expected a positive number"),
    "a word": ({"hidden_size": "768"}, "'hidden_size' expected int, got str"),
    "misspelled": ({"num_hiden_layers": 6}, "no field `num_hiden_layers`; did you mean `num_hidden_layers`"),
}


class TestBadInput:
    @pytest.mark.parametrize("case", BAD_PIXELS)
    def test_pixels(self, case, classifier):
        pixel_values, message = BAD_PIXELS[case]
        with pytest.raises(ValueError, match=message):
            classifier(pixel_values)

    @pytest.mark.parametrize("case", BAD_LABELS)
    def test_labels(self, case, generation, make_model, pixel_values):
        fields, labels, message = BAD_LABELS[case]
        model = make_model(SparseFormerForImageClassification, generation, **fields)
        with pytest.raises(ValueError, match=message):
            model(pixel_values, labels=labels)

    @pytest.mark.parametrize("case", BAD_FIELDS)
    def test_configurations(self, case):
        fields, message = BAD_FIELDS[case]
        with pytest.raises(StrictDataclassError, match=message):
            SparseFormerConfig(**fields)

    @pytest.mark.parametrize("case", BAD_FIELDS)
    def test_assigned_later(self, case, tmp_path):
        fields, message = BAD_FIELDS[case]
        config = SparseFormerConfig(hidden_size=64, focusing_hidden_size=32)

        def assign_and_build():
            for name, value in fields.items():
                setattr(config, name, value)
            SparseFormerModel(config)

        def assign_and_save():
            for name, value in fields.items():
                setattr(config, name, value)
            config.save_pretrained(tmp_path / "config")

        for use in (assign_and_build, assign_and_save):
            with pytest.raises(StrictDataclassError, match=message):
                use()
        assert not list(tmp_path.glob("config/*"))

    def test_unknown_fields_that_resemble_none_are_kept(self, tmp_path):
        SparseFormerConfig(dataset="cifar10").save_pretrained(tmp_path)
        assert SparseFormerConfig.from_pretrained(tmp_path).dataset == "cifar10"

    def test_activation(self, make_config):
        config = make_config("bootstrapped", hidden_act="gelo")
        with pytest.raises(ValueError, match=r"no activation 'gelo'; there are .*quick_gelu"):
            SparseFormerModel(config)

    def test_projection_width(self, make_config):
        config = make_config("bootstrapped", projection_dim=None)
        with pytest.raises(ValueError, match="`projection_dim` of the configuration is None"):
            SparseFormerVisionModelWithProjection(config)

    def test_variant(self):
        with pytest.raises(ValueError, match="no SparseFormer variant 'v1-tinny'. Did you mean: v1-tiny"):
            SparseFormerConfig.from_variant("v1-tinny")

    def test_resized_to_no_tokens(self, classifier):
        before = copy.deepcopy(classifier.state_dict())
        with pytest.raises(ValueError, match="`num_latent_tokens` is 0, expected at least 1"):
            classifier.resize_tokens(0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in classifier.state_dict().items())
