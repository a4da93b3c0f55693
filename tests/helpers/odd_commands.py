"""Run by test_odd_commands.py as a program: `odd_commands.py FOLDER [COUNT]` gives commands models, data, outputs and
numbers that are odd, one at a time, and writes to FOLDER/report.json how each ended.

Every command runs in a fork of this process, in a folder of its own. It may do what it is asked for, or end with one
clear line; it may not end with a traceback or a signal, take two minutes, or change what it was given. COUNT commands
are drawn, all of them if it is missing.
"""

import collections
import dataclasses
import importlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch._dynamo
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from frugalvit import SparseFormerForImageClassification, SparseFormerVisionModelWithProjection, cli
from frugalvit.registry import register
from tiny import SMALL, make_llava, randomize, save_to_swap, word_tokenizer


# What a command may take: the odd models ask for more than there is.
SECONDS, BYTES = 120, 24 * 2**30
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
WORDS = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "a", "photo", "of", "cat", "dog"]
RUN = "--epochs 1 --batch-size 4 --num-workers 0 --mixed-precision no --output {output}"
JOINT = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"

TRAIN = f"train --model {{vit}} --dataset {{photos}} {RUN}"
SEGMENT = f"segment --model {{sparseformer}} --dataset {{masks}} --num-labels 2 --warmup-steps 0 {RUN}"
INDEX = "index {photos} --model {clip} --output {output}"

CARD = """---
license: mit
library_name: transformers
pipeline_tag: image-classification
tags: [vision]
datasets: [uoft-cs/cifar10]
model-index:
- name: odd
  results:
  - task: {type: image-classification}
    dataset: {name: CIFAR-10, type: uoft-cs/cifar10}
    metrics:
    - {type: accuracy, value: 0.5}
---

Made to be odd.
"""

# They work. Each word in braces is given odd values in turn, and so is each of their options.
COMMANDS = [
    "predict {image} --model {vit}",
    "predict {image} --model {sparseformer} --rois {output}.png",
    "info {sparseformer}",
    "benchmark {vit} --rounds 1 --output {output}.json",
    "budget {sparseformer} --macs 1G --output {output}",
    "calibrate {sparseformer} --dataset {photos} --disagreement 0.9 --certainty 0.5 --output {output}",
    "compare {vit} {sparseformer} --dataset {photos} --rounds 1 --no-memory --output {output}",
    "attention {vit} --image {image} --picture {output}.png",
    "features {vit} --image {image} --picture {output}.png",
    "curves {run} --picture {output}.png",
    "evaluate classification --model {vit} --dataset {photos} --output {output}.json",
    "evaluate knn --model {vit} --dataset {photos} --neighbors 2 --output {output}.json",
    "evaluate linear --model {vit} --dataset {photos} --output {output}.json",
    "evaluate segmentation --model {segmenter} --dataset {masks} --split val --output {output}.json",
    "evaluate zero-shot --model {clip} --vision-model {student} --dataset {photos} --output {output}.json",
    "evaluate retrieval --model {clip} --dataset {captions} --image-folder {photos} --output {output}.json",
    "evaluate scienceqa --model {llava} --dataset {questions} --output {output}.json",
    INDEX,
    "search {index} {image} --picture {output}.png",
    "export {vit} --format onnx --dataset {photos} --limit 4 --force --output {output}",
    "export {vit} --precision int8 --float-layers classifier --dataset {photos} --limit 4 --force --output {output}",
    "publish {vit} --license mit --output {output}",
    "swap --model {llava} --vision-model {tower} --dataset {photos} --output {output}",
    TRAIN,
    f"bootstrap --teacher {{vit}} --dataset {{photos}} --no-compare {RUN}",
    f"joint --vit {JOINT},image_size=32 --agent {JOINT} --dataset {{photos}} {RUN}",
    SEGMENT,
    f"align-llava --model {{llava}} --vision-model {{tower}} --dataset {{conversations}} {RUN}",
]
# It is given no checkpoint of SparseFormer's authors and refuses what it is given.
REFUSING = "convert showlab {weights} --output {output}"
# It serves until it is interrupted.
SERVING = "demo {sparseformer} --port 0"
MODELS = ("vit", "sparseformer", "segmenter", "clip", "student", "llava", "tower")


def make_inputs(folder: Path):
    """A model of every kind, and data for each."""
    torch.manual_seed(0)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    config = transformers.ViTConfig(**TOWER, image_size=32, patch_size=8, id2label={0: "cat", 1: "dog"})
    vit = transformers.ViTForImageClassification(config)
    sparseformer = SparseFormerForImageClassification.from_teacher(vit, 4, elastic_token_counts=[1, 4], **SMALL)
    for name, model in {"vit": vit, "sparseformer": sparseformer}.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
        (folder / name / "README.md").write_text(CARD)
    text = {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": WORDS.index("[EOS]")}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    clip = transformers.CLIPModel(config)
    clip.save_pretrained(folder / "clip")
    processor = transformers.CLIPImageProcessor(**IMAGES)
    tokenizer = word_tokenizer(WORDS, model_max_length=16)
    transformers.CLIPProcessor(processor, tokenizer).save_pretrained(folder / "clip")
    student = SparseFormerVisionModelWithProjection.from_teacher(clip, 4, **SMALL)
    randomize(student).save_pretrained(folder / "student")
    save_to_swap(folder, make_llava())
    make_data(folder)


def make_data(folder: Path):
    generator = np.random.default_rng(0)
    conversations, captions = [], []
    for number in range(16):
        split, name, file = ("train", "val")[number // 8], ("cat", "dog")[number % 2], f"{number}.png"
        pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        photo = folder / "photos" / split / name / file
        mask = folder / "masks" / "annotations" / split / file
        for path, values in {
            photo: pixels,
            folder / "masks" / "images" / split / file: pixels,
            mask: pixels[..., 0] % 2,
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(path)
        turns = [{"from": "human", "value": "<image>\nwhat is this ?"}, {"from": "gpt", "value": name}]
        conversations.append({"id": number, "image": str(photo), "conversations": turns})
        captions.append({"filename": str(photo), "split": "test", "sentences": [{"raw": f"a photo of a {name}"}]})
    (folder / "conversations.json").write_text(json.dumps(conversations))
    (folder / "captions.json").write_text(json.dumps({"images": captions}))
    write_table(
        folder / "questions.parquet",
        question=["what is this ?"] * 4,
        choices=[["cat", "dog"]] * 4,
        answer=[0, 1, 0, 1],
    )


def write_table(path: Path, **columns):
    """A parquet file of columns, the first of four small images unless `image` is given, or None for none."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    columns = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 4} | columns
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)


def text(content: str, name: str = ""):
    """A change of a file, or of one in a folder: other content."""
    return lambda path: (path / name if name else path).write_text(content)


def fields(name: str, **changed):
    """A change of some fields of a JSON file in a folder."""

    def change(folder: Path):
        file = folder / name
        # A folder without such a file has one that says too little.
        old = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(old | changed))

    return change


def tensors(alter: Callable[[dict], dict]):
    """A change of a model's weights."""

    def change(folder: Path):
        state = {name: value.clone() for name, value in load_file(folder / WEIGHTS).items()}
        save_file(alter(state), folder / WEIGHTS, metadata={"format": "pt"})

    return change


def cut(name: str, share: float):
    def change(folder: Path):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return change


def replaced(make: Callable[[Path], None]):
    """A change of a file or folder to something else at its place."""

    def change(path: Path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return change


def gone(path: Path):
    """Leave nothing at the path."""


def ring(path: Path):
    path.symlink_to(path.name)


def to_nothing(path: Path):
    path.symlink_to("nothing")


def picture(mode: str, size: tuple[int, int] = (32, 32), format: str = "PNG"):
    return replaced(lambda path: Image.new(mode, size).save(path, format))


def pickled(folder: Path):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def bomb(path: Path):
    """A small file of 900 megapixels."""
    with path.open("wb") as file:
        Image.new("1", (30_000, 30_000)).save(file, "PNG")


CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
NESTED = "[" * 100_000
JSON = {"empty": "", "null": "null", "5": "5", "list": "[]", "text": '"text"', "half": "{", "nested": NESTED}
JSON |= {"nested objects": '{"a":' * 1_000 + "1" + "}" * 1_000}
# Of anything that is read.
PLACES = {
    "missing": replaced(gone),
    "link to itself": replaced(ring),
    "link to nothing": replaced(to_nothing),
    "pipe": replaced(os.mkfifo),
}
MODEL_CHANGES = {
    **PLACES,
    "empty folder": replaced(os.mkdir),
    "a file": replaced(text("no model")),
    **{f"configuration: {name}": text(content, CONFIG) for name, content in JSON.items()},
    **{
        f"configuration: {name}={str(value)[:20]}": fields(CONFIG, **{name: value})
        for name, values in {
            "num_hidden_layers": (-1, "many"),
            "hidden_size": (0, 2.5),
            "num_attention_heads": (0, 3),
            "patch_size": (0,),
            "image_size": (None, -1, [32, 32, 32]),
            "hidden_act": ("no_such",),
            "num_channels": (0, 4),
            "num_latent_tokens": (0,),
            "model_type": ("no_such", None, 5, "vit_msn"),
            "architectures": ([5], ["Trainer"], ["NoSuch"], 5, "text", [None], [[]], []),
            "id2label": (None, [], "x", {"a": "b"}, {"0": None}),
            "dtype": ("no_such", 5, "bfloat16"),
            "attn_implementation": ("no_such",),
            "vision_config": (None, [], {}),
            "text_config": (None, 5),
        }.items()
        for value in values
    },
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "weights: empty": text("", WEIGHTS),
    "weights: half": cut(WEIGHTS, 0.5),
    "weights: half a header": cut(WEIGHTS, 0.01),
    "weights: none": text("no weights", WEIGHTS),
    "weights: pickled": pickled,
    "weights: not finite": tensors(lambda state: {name: value * float("nan") for name, value in state.items()}),
    "weights: one is missing": tensors(lambda state: dict(list(state.items())[1:])),
    "weights: one of another shape": tensors(lambda state: state | {next(iter(state)): torch.zeros(3, 5)}),
    "weights: of nothing": tensors(lambda state: {"x": torch.zeros(1)}),
    **{f"processor: {name}": text(content, PROCESSOR) for name, content in JSON.items()},
    **{
        f"processor: {name}={str(value)[:20]}": fields(PROCESSOR, **{name: value})
        for name, values in {
            "resample": (99, "no"),
            "size": (*({"height": odd, "width": odd} for odd in (-1, "a")), 0, "big"),
            "image_mean": (None, [0.5, 0.5], "mean"),
            "image_std": ([0, 0, 0],),
            "image_processor_type": ("NoSuch", 5),
            "rescale_factor": ("a", 0),
        }.items()
        for value in values
    },
}
IMAGE_CHANGES = {
    **PLACES,
    "a folder": replaced(os.mkdir),
    "empty": text(""),
    "no image": text("no image"),
    "half": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "16 bits": picture("I;16"),
    "palette with alpha": picture("PA", format="TIFF"),
    "alpha": picture("LA"),
    "one pixel": picture("RGB", (1, 1)),
    "a line": picture("RGB", (3000, 1)),
    "of floats": picture("F", format="TIFF"),
    "of ink": picture("CMYK", format="JPEG"),
    "of 900 megapixels": replaced(bomb),
}


def first_image(change: Callable[[Path], object]):
    """A change of a folder of images: one of them."""
    return lambda folder: change(min(folder.rglob("*.png")))


def table(**columns):
    """A change of a folder of images: a table in its place."""
    return lambda folder: (shutil.rmtree(folder), write_table(folder / "train.parquet", **columns))


def only(pattern: str):
    """A change of a folder of images: those that fit alone."""

    def change(folder: Path):
        for path in folder.rglob("*.png"):
            if not path.match(pattern):
                path.unlink()

    return change


def renamed(old: str, new: str):
    def change(folder: Path):
        for path in sorted(folder.rglob(old)):
            path.rename(path.with_name(new))

    return change


FOLDER_CHANGES = {
    **PLACES,
    "empty folder": replaced(os.mkdir),
    "a file": replaced(text("no images")),
    "no images": only("none"),
    "one image": only("0.png"),
    "no evaluation": only("train/*/*"),
    "an empty class": only("cat/*"),
    "another class": lambda folder: renamed("dog", "emu")(folder / "val") if (folder / "val").is_dir() else None,
    "classes named train": renamed("cat", "train"),
    "a line break in a name": renamed("cat", "a\nb"),
    "a bracket in a name": renamed("0.png", "0 [1].png"),
    **{f"an image: {name}": first_image(change) for name, change in IMAGE_CHANGES.items()},
    "table: of no columns": table(image=None, x=[1]),
    "table: of no rows": table(image=pa.array([], pa.struct({"bytes": pa.binary(), "path": pa.string()}))),
    "table: no labels": table(),
    "table: null images": table(image=[None] * 4, label=[0, 1, 0, 1]),
    "table: numbers for images": table(image=[1, 2, 3, 4], label=[0, 1, 0, 1]),
    "table: words for images": table(image=["a", "b", "c", "d"], label=[0, 1, 0, 1]),
    "table: images of no bytes": table(image=[{"bytes": b"", "path": None}] * 4, label=[0, 1, 0, 1]),
    **{
        f"table: labels {str(labels)[:20]}": table(label=labels)
        for labels in ([None] * 4, [0, None, 1, 0], [-1, 0, 1, 0], [0.5] * 4, ["a", "b", "a", None], [0, 10**9, 1, 0])
    },
    "table: labels in lists": table(label=[[0], [1], [0], [1]]),
    "table: no parquet": lambda folder: (shutil.rmtree(folder), folder.mkdir(), text("none", "train.parquet")(folder)),
}
TURN = {"from": "human", "value": "<image>"}
RECORDS = [
    *(None, 5, "text", [], {}, {"image": 5}, {"images": None}, {"image": "none.png"}, {"conversations": None}),
    *({"image": None, "conversations": [TURN]}, {"images": [{"filename": 5}]}, {"images": [{"sentences": None}]}),
    *({"images": [{"filename": "x", "split": "test", "sentences": [{"raw": None}]}]}, {"conversations": [TURN] * 3}),
    {"id": 0, "image": "none.png", "conversations": [TURN, {"from": "gpt", "value": "x"}]},
]
FILE_CHANGES = {
    **PLACES,
    "a folder": replaced(os.mkdir),
    **{name: text(content) for name, content in JSON.items()},
    **{f"a record: {json.dumps(record)[:60]}": text(json.dumps([record])) for record in RECORDS},
    **{f"a value: {json.dumps(record)[:60]}": text(json.dumps(record)) for record in RECORDS},
}
ROW = {"question": "what is this ?", "choices": ["cat", "dog"], "answer": 0}
QUESTION_CHANGES = {
    **PLACES,
    "no table": text("none"),
    **{
        f"{name}: {str(value)[:20]}": lambda path, name=name, value=value: write_table(
            path, **{key: [kept] * 4 for key, kept in (ROW | {name: value}).items() if kept is not ...}
        )
        for name, values in {
            "question": (None, 5, "", ...),
            "choices": (None, [], ["cat"], [None, "dog"], [1, 2], "cat", ["cat"] * 40, ...),
            "answer": (None, -1, 2, 0.5, "A", ...),
        }.items()
        for value in values
    },
    "images: numbers": lambda path: write_table(
        path, image=[5] * 4, **{key: [value] * 4 for key, value in ROW.items()}
    ),
}
CHANGES = {
    **dict.fromkeys(MODELS, MODEL_CHANGES),
    **{"photos": FOLDER_CHANGES, "masks": FOLDER_CHANGES, "image": IMAGE_CHANGES, "questions": QUESTION_CHANGES},
    **dict.fromkeys(("captions", "conversations", "weights"), FILE_CHANGES),
    "index": {**PLACES, "empty folder": replaced(os.mkdir), "a file": replaced(text("no index"))},
    "run": {**PLACES, "empty folder": replaced(os.mkdir), "no numbers": text("", "metrics.jsonl")},
}
FILES = {"image": "photos/train/cat/0.png", "questions": "questions.parquet", "weights": "vit/model.safetensors"}
FILES |= {name: f"{name}.json" for name in ("captions", "conversations")}


def occupied(path: Path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


# What is made at the place of an output, or elsewhere, and where the output is to go.
OUTPUTS = {
    "a file": (text("mine"), "out"),
    "a folder": (occupied, "out"),
    "a link to itself": (ring, "out"),
    "a link to nothing": (to_nothing, "out"),
    "below a file": (lambda path: Path("file").write_text("mine"), "file/out"),
    "below nothing": (gone, "no/such/out"),
    "in /proc": (gone, "/proc/out"),
    "a long name": (gone, "x" * 300),
    "empty": (gone, ""),
    "a dot": (gone, "."),
}
NUMBERS = ("-1", "0", "nan", "inf", "1e99", "")


@dataclasses.dataclass
class Case:
    """A command with one odd thing: the file at `odd`, the output, or one of `more` arguments."""

    command: str
    slot: str = ""
    change: str = ""
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(
            [*self.command.split(" --")[0].split()[:3], *self.more, *filter(None, (self.slot, self.change))]
        )

    def arguments(self, given: Path) -> list[str]:
        """Makes what is odd, in the current folder."""
        places = {name: given / FILES.get(name, name) for name in CHANGES} | {"output": Path("out")}
        if self.slot == "output":
            make, places["output"] = OUTPUTS[self.change]
            make(Path("out" + self.ending))
        elif self.slot:
            # One of several of a command.
            odd = Path("odd") / places[self.slot].name
            odd.parent.mkdir()
            copy = shutil.copytree if places[self.slot].is_dir() else shutil.copy
            copy(places[self.slot], odd)
            CHANGES[self.slot][self.change](odd)
            places[self.slot] = odd
        words = self.command.split()
        if self.slot == "output" and not places["output"]:
            words = [word.replace(self.ending, "") if "{output}" in word else word for word in words]
        return [word.format(**places) for word in words] + list(self.more)

    @property
    def ending(self) -> str:
        return next((found[1] for found in [re.search(r"\{output\}(\S*)", self.command)] if found), "")


def all_cases(options: dict[str, list[str]]) -> Iterator[Case]:
    """Args: the options of each command that take a value."""
    seen = set()
    for command in [*COMMANDS, REFUSING, SERVING]:
        for slot in re.findall(r"\{(\w+)\}", command):
            for change in OUTPUTS if slot == "output" else CHANGES[slot]:
                yield Case(command, slot, change)
        for option in options[command]:
            # What several commands share is tried with the first.
            if option not in seen:
                seen.add(option)
                yield from (Case(command, more=(f"{option}={number}",)) for number in NUMBERS)


def forked(work: Callable[[], int | None], folder: Path, seconds: float = SECONDS) -> int | None:
    """Do `work` in a process of its own, in a new folder; returns its exit code, minus the signal that ended it, or
    None if it did not end in time."""
    folder.mkdir()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            for number, name in enumerate((os.devnull, "stdout", "stderr")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
            # The bar of the cases is no bar of the command, which would draw it again with what it writes.
            tqdm._instances.clear()
            code = work() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def options_of(command: str, folder: Path) -> list[str]:
    """The options of a command that take any value."""
    words = itertools.takewhile(lambda word: not word.startswith(("-", "{")), command.split())
    assert forked(lambda: cli.main([*words, "--help"]), folder) == 0
    usage = (folder / "stdout").read_text().partition("\n\n")[0]
    return re.findall(r"(--[\w-]+) [A-Z]", usage)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def files_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def try_case(case: Case, given: Path, folder: Path) -> tuple[int | None, str | None]:
    """Run a command; return its exit code and what is wrong with its end, None for nothing."""

    def work():
        if case.command == SERVING:
            threading.Timer(8, os.kill, (os.getpid(), signal.SIGINT)).start()
        arguments = case.arguments(given)
        Path("before").write_text(json.dumps(files_in(Path())))
        return cli.main(arguments)

    code = forked(work, folder)
    said = (folder / "stderr").read_text(errors="replace")
    *_, last = [line for line in said.splitlines() if line.strip()] or [""]
    if code is None:
        return code, "takes too long"
    if "Traceback" in said:
        return code, "a traceback"
    if code < 0 or code not in (0, 1, 2, 130):
        return code, f"ends with {code}"
    if code in (1, 2) and not re.fullmatch(r"frugalvit [\w -]+: error: .{15,1500}", last):
        return code, "no clear last line"
    # Trainings and indexes keep what was done, and go on.
    if code == 1 and RUN not in case.command and not case.command.startswith("index"):
        left = {*files_in(folder)} - {*json.loads((folder / "before").read_text()), "before"}
        if left:
            return code, f"leaves {', '.join(sorted(left))}"
    return code, None


def main(folder: Path, count: int | None):
    given = folder / "given"
    register()
    for module, _ in cli.COMMANDS.values():
        importlib.import_module(module)
    assert forked(lambda: make_inputs(given), given) == 0, (given / "stderr").read_text()
    for name, command in {"segmenter": SEGMENT, "run": TRAIN, "index": INDEX}.items():
        code, wrong = try_case(Case(command), given, folder / name)
        assert code == 0, (command, wrong, (folder / name / "stderr").read_text())
        (folder / name / "out").rename(given / name)
    options = {}
    for number, command in enumerate([*COMMANDS, REFUSING, SERVING]):
        options[command] = options_of(command, folder / f"options{number}")
    cases = list(all_cases(options))
    if count is not None:
        cases = random.Random(0).sample(cases, count)
    # What works, too, or nothing would be told by what does not.
    cases += [Case(command) for command in COMMANDS] if count is None else []

    before, ended, failures, started = contents(given), collections.Counter(), [], time.monotonic()
    for number, case in enumerate(tqdm(cases, unit="case")):
        code, wrong = try_case(case, given, folder / f"case{number}")
        if not (case.slot or case.more) and code != 0:
            wrong = f"ends with {code}, and nothing is odd"
        if contents(given) != before:
            before, wrong = contents(given), "changes what it was given"
        ended[str(code)] += 1
        if wrong:
            said = (folder / f"case{number}" / "stderr").read_text(errors="replace")
            failures.append({"case": case.name, "wrong": wrong, "said": said[-1500:]})
        shutil.rmtree(folder / f"case{number}", ignore_errors=True)
    report = {"cases": len(cases), "ended": dict(sorted(ended.items())), "failures": failures}
    (folder / "report.json").write_text(json.dumps(report | {"seconds": round(time.monotonic() - started)}, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else None)
