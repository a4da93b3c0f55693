"""Run by test_trainer.py as a program: `killed_at_random.py FOLDER KILLS ARGUMENT…` kills trainings at random moments,
KILLS times, and looks at what they leave after every kill. Prints how often runs ended whole.

All but counting is done in forked processes: loading a model starts threads, and a process that has some may deadlock
when it forks.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # once, rather than in the first step of every process
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from frugalvit.training import train as recipe
from frugalvit.training.components.checkpoints import Checkpoints


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work) -> int:
    """Do `work` in a process of its own; returns its exit code, minus the signal that killed it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = work() or 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(arguments: list[str], prepare=None) -> int:
    """Train in a process of its own."""

    def work():
        if prepare:
            prepare()
        return recipe.main(arguments)

    return forked(work)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def check_model(folder: Path):
    AutoModelForImageClassification.from_pretrained(folder)


def check_what_is_left(folder: Path):
    """The model, if there is one, and every checkpoint are whole."""
    if (folder / "model.safetensors").exists():
        check_model(folder)
    for state in Checkpoints(None, folder / "checkpoints").all():
        load_file(state / "model.safetensors")
        torch.load(state / "optimizer.pt", weights_only=True)
        assert (state / "state.json").read_text().endswith("}\n")


def train(folder: Path, kills: int, arguments: list[str], chance: random.Random) -> int:
    whole, killed, finished = folder / "whole", folder / "killed", 0
    start = time.monotonic()
    assert run([*arguments, "--output", str(whole)]) == 0
    seconds = time.monotonic() - start
    while kills or not finished:
        delay = chance.uniform(0, seconds) if kills else 1e6

        def after_a_while(delay=delay):
            timer = threading.Timer(delay, die)
            timer.daemon = True
            timer.start()

        ended = run([*arguments, "--output", str(killed)], after_a_while)
        assert ended in (0, -9), ended
        if ended:
            kills -= 1
            assert forked(lambda: check_what_is_left(killed)) == 0
        else:
            finished += 1
            assert weights(killed) == weights(whole)
            if kills:
                shutil.rmtree(killed)
    return finished


if __name__ == "__main__":
    folder, kills, *arguments = sys.argv[1:]
    chance = random.Random(int(os.environ.get("FRUGALVIT_SEED", "0")))
    print(train(Path(folder), int(kills), arguments, chance))
