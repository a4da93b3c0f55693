"""Run actions in a process in which frugalvit cannot be imported.

- `load JOBS RESULTS` loads models and computes outputs.
- `fine_tune OUT START…` fine-tunes models with `Trainer` and saves them.
- `compute FOLDER LOADER INPUTS OUTPUTS` loads a model, computes outputs and saves the model. Then it repeats these
  steps with the saved copy.
- `process FOLDER OUTPUTS` converts a prompt to token ids by the processor class in the folder, with 4 image tokens.
  Then it converts the same prompt by `LlavaProcessor`.
- `serve` reads requests from standard input and runs each request in a fork, so libraries are imported only once.
"""

import gc
import importlib.abc
import json
import os
import sys
import traceback
import warnings
from pathlib import Path


class Blocker(importlib.abc.MetaPathFinder):
    """Import finder that raises `ModuleNotFoundError` for frugalvit."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "frugalvit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
try:
    import frugalvit  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    sys.exit("frugalvit could be imported")

import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: E402


warnings.simplefilter("error")


def keep_imports_from_the_collector():
    """Exclude imported objects from garbage collection, because `Trainer` collects garbage in each training."""
    gc.collect()
    gc.freeze()


keep_imports_from_the_collector()


def load_model(source: str, loader: str, **kwargs):
    """Load a model with an Auto class of Transformers, or with a class of the code in its folder."""
    if hasattr(transformers, loader):
        return getattr(transformers, loader).from_pretrained(source, trust_remote_code=True, **kwargs)
    return get_class_from_dynamic_module(loader, source).from_pretrained(source, **kwargs)


@torch.no_grad()
def main_output(model, pixel_values: torch.Tensor) -> torch.Tensor:
    outputs = model.eval()(pixel_values)
    output = next(
        outputs[name]
        for name in ("logits", "image_embeds", "last_hidden_state", "feature_maps")
        if getattr(outputs, name, None) is not None
    )
    return output[-1] if isinstance(output, tuple) else output


def pipeline_computes_the_same(source: str, model, processor) -> bool:
    """Return whether a pipeline gives the same label and score as the model."""
    image = Image.effect_noise((48, 40), 90).convert("RGB")
    pipeline = transformers.pipeline("image-classification", source, trust_remote_code=True, device="cpu")
    best = main_output(model, processor(image, return_tensors="pt")["pixel_values"]).softmax(-1).max(-1)
    predicted = pipeline(image)[0]
    same_label = predicted["label"] == model.config.id2label[best.indices.item()]
    return same_label and abs(predicted["score"] - best.values.item()) < 1e-5


def load(jobs_file: str, results: str):
    report, outputs = {}, {}
    for name, job in json.loads(Path(jobs_file).read_text()).items():
        model = load_model(job["source"], job["loader"])
        config = transformers.AutoConfig.from_pretrained(job["source"], trust_remote_code=True)
        processor = transformers.AutoImageProcessor.from_pretrained(job["source"])
        pixel_values = load_file(job["inputs"])["pixel_values"]
        outputs[name] = main_output(model, pixel_values).contiguous()
        report[name] = {
            "class": type(model).__name__,
            "module": type(model).__module__,
            "config_class_is_the_models": type(model.config) is type(model).config_class is type(config),
            "dtype": str(model.dtype),
            "processor": type(processor).__name__,
        }
        if job["loader"] == "AutoModelForImageClassification":
            assert pipeline_computes_the_same(job["source"], model, processor), name
    Path(results).mkdir()
    save_file(outputs, Path(results) / "outputs.safetensors")
    (Path(results) / "report.json").write_text(json.dumps(report))


def fine_tune(out: str, *starts: str):
    """Fine-tune each model twice with `Trainer`: from the start, and resumed from the checkpoint of step 2."""
    examples = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 3} for i in range(8)]
    pixel_values = torch.stack([example["pixel_values"] for example in examples[:2]])
    for start in starts:
        folder = f"{out}/{Path(start).name}"
        arguments = transformers.TrainingArguments(
            output_dir=f"{folder}/checkpoints",
            per_device_train_batch_size=4,
            max_steps=4,
            save_steps=2,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        logits = {}
        for name, checkpoint in (("trained", None), ("resumed", f"{folder}/checkpoints/checkpoint-2")):
            model = load_model(start, "AutoModelForImageClassification")
            logits[f"{name} from"] = main_output(model, pixel_values)
            trainer = transformers.Trainer(model, arguments, train_dataset=examples)
            trainer.train(resume_from_checkpoint=checkpoint)
            logits[name] = main_output(trainer.model, pixel_values)
        trainer.save_model(f"{folder}/saved")
        for name in ("saved", "checkpoints/checkpoint-4"):
            logits[name] = main_output(load_model(f"{folder}/{name}", "AutoModelForImageClassification"), pixel_values)
        save_file(logits | {"pixel_values": pixel_values}, f"{folder}/logits.safetensors")


@torch.no_grad()
def compute(folder: str, loader: str, inputs: str, outputs: str):
    results, inputs = {}, load_file(inputs)
    for generation in ("loaded", "saved again"):
        model = load_model(folder, loader).eval()
        given = model(**inputs)
        results[generation] = given["logits" if "logits" in given else "logits_per_image"]
        folder = f"{outputs}-{generation.replace(' ', '-')}"
        model.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, outputs)


def process(folder: str, outputs: str):
    prompt = {"images": Image.new("RGB", (48, 40)), "text": "<image> what ?", "return_tensors": "pt"}
    own = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    plain = transformers.LlavaProcessor.from_pretrained(folder)
    save_file({"own": own(**prompt, num_image_tokens=4)["input_ids"], "plain": plain(**prompt)["input_ids"]}, outputs)


def run_source(source: str, *arguments: str):
    """Run source code as `python -c` does."""
    warnings.simplefilter("default")
    sys.argv = ["-c", *arguments]
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def serve():
    """Run requests from standard input. A request is a line of JSON with `directory` and `arguments`. The reply is a
    line of JSON: null, or the path of the fork's output if the request failed."""
    from transformers import LlavaProcessor, Trainer, pipeline  # noqa: F401 (imported before the forks)

    keep_imports_from_the_collector()
    for number, line in enumerate(sys.stdin):
        log = Path(f"{number}.log").absolute()
        if not (child := os.fork()):
            request = json.loads(line)
            os.chdir(request["directory"])
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
            code = 1
            try:
                main(*request["arguments"])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(str(log) if status else None), flush=True)


def main(action: str, *arguments: str):
    actions = {"load": load, "fine_tune": fine_tune, "compute": compute, "process": process, "serve": serve}
    actions |= {"run_source": run_source}
    actions[action](*arguments)
    if any(module and name.partition(".")[0] == "frugalvit" for name, module in sys.modules.items()):
        sys.exit("frugalvit was imported")


if __name__ == "__main__":
    main(*sys.argv[1:])
